"""`hearth image build`: only an image that passed its checks gets the name that is deployed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hearth.cli import app
from hearth.cli import image as module
from hearth.errors import CheckFailed
from hearth.image.build import Built
from hearth.image.check import Answer, Line

TAG = "registry.example:5000/hearth/cpu:1f3a"


@dataclasses.dataclass
class OwnEngine:
    """Stands in for a Docker Engine: which names it has."""

    names: set[str] = dataclasses.field(default_factory=set)

    @property
    def images(self) -> OwnEngine:
        return self

    def get(self, name: str) -> OwnEngine:
        assert name in self.names
        return self

    def tag(self, repository: str, tag: str | None) -> None:
        self.names.add(f"{repository}:{tag or 'latest'}")

    def remove(self, name: str) -> None:
        self.names.remove(name)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> OwnEngine:
    """An engine in which every build succeeds, and every check is "fine"."""
    made = OwnEngine()

    def build(client: OwnEngine, request: Any, report: Any) -> Built:
        client.names.add(request.tag)
        return Built("sha256:1", request.tag, (), 1, 0, 1.0, Path("log"))

    def seal(client: OwnEngine, tag: str, marks: Any) -> str:
        assert client.names == {tag}, "not sealed under another name than it was built"
        return "sha256:2"

    monkeypatch.setattr(module.building, "connect", lambda: made)
    monkeypatch.setattr(module.building, "build", build)
    monkeypatch.setattr(module.building, "seal", seal)
    monkeypatch.setattr(module.looking, "probe", lambda *_: Answer(0, {"python": {}, "debian": {}}))
    monkeypatch.setattr(module.looking, "look", lambda *_: (None, ""))
    judge(monkeypatch, "ok")
    return made


def judge(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    monkeypatch.setattr(module.checking, "lines", lambda *_: [Line("compilers", status, "x", "y")])


def build(tmp_path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["image", "build", "cpu", "--logs", str(tmp_path), *words])


@pytest.mark.parametrize(("tag", "named"), [(TAG, TAG), ("plain", "plain:latest")])
def test_what_passed_its_checks_has_its_name(engine: OwnEngine, tmp_path: Path, tag: str, named: str) -> None:
    done = build(tmp_path, "--tag", tag)
    assert done.exit_code == 0, done.output
    assert engine.names == {named}


def test_what_failed_a_check_has_not(
    engine: OwnEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(monkeypatch, "fail")
    done = build(tmp_path, "--tag", TAG)
    assert isinstance(done.exception, CheckFailed)
    assert f"{TAG}-unchecked: failed: compilers" in str(done.exception)
    assert engine.names == {f"{TAG}-unchecked"}


def test_without_checks_it_has_its_name_at_once(
    engine: OwnEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(monkeypatch, "fail")
    assert build(tmp_path, "--tag", TAG, "--no-check").exit_code == 0
    assert engine.names == {TAG}
