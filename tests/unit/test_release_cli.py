"""`hearth release` and `hearth launch` where no Docker Engine is needed: shapes of JSON, and bad input."""

import json

import pytest
from typer.testing import CliRunner

from hearth.cli import app
from hearth.cli.release import _finish
from hearth.deploy.activate import Report
from hearth.deploy.release import Draft
from hearth.deploy.releases import CURRENT, PREVIOUS, Outcome, Store
from hearth.deploy.smoke import Check
from hearth.errors import CheckFailed, ConfigError, ExitCode, HearthError, MissingError

CONFIG = """\
model: {path: /m, served_name: x}
engine: {version: 0.5.23}
ports: {engine_host: 0.0.0.0, supervisor_host: 0.0.0.0}
"""
PORTS = [{"container": 30000, "host": 30000}, {"container": 9400, "host": 9400}]
DRAFT = {"image": {"ref": "x", "digest": "sha256:" + "a" * 64}, "container": {"ports": PORTS}}


def run(*words):
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "releases")
    ids = [made.add(Draft.model_validate(DRAFT), f"{CONFIG}# {n}\n")[0].id for n in range(3)]
    made.ids_in_order = ids
    return made


def test_list_as_json(store):
    one, two, three = store.ids_in_order
    store.point(CURRENT, two)
    store.point(PREVIOUS, one)
    store.note(two, Outcome(1.0, True, "", 2.5))
    (store.folder(three) / "release.json").write_text("{")
    said = json.loads(run("release", "list", "--root", str(store.root), "--json").stdout)
    assert (said["current"], said["previous"]) == (two, one)
    rows = {row["id"]: row for row in said["releases"]}
    assert [rows[each]["state"] for each in (one, two, three)] == ["previous", "current", "kept"]
    assert (rows[two]["proven"], rows[two]["downtime_s"]) == (True, 2.5)
    assert rows[two]["image"]["digest"] == DRAFT["image"]["digest"]
    assert "not JSON" in rows[three]["problem"]


def test_list_for_a_person(store):
    said = run("release", "list", "--root", str(store.root)).stdout
    assert all(each in said for each in store.ids_in_order)
    assert "no releases yet" in run("release", "list", "--root", str(store.root / "none")).stdout


def test_rollback_without_a_previous_one(store):
    result = run("release", "rollback", "--root", str(store.root))
    assert isinstance(result.exception, MissingError)
    assert "no previous release" in str(result.exception)


def test_smoke_without_a_current_one(store):
    result = run("release", "smoke", "--root", str(store.root))
    assert "no release is current" in str(result.exception)


def test_activating_what_is_not_there(store):
    result = run("release", "activate", "20200101T000000Z-000000", "--root", str(store.root))
    assert isinstance(result.exception, MissingError)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("release.json", None, "no such file"),
        ("hearth.yaml", None, "no such file"),
        ("release.json", "{", "not JSON"),
        ("release.json", json.dumps({"image": {}}), "image.ref: missing"),
        ("release.json", json.dumps({**DRAFT, "container": {}}), "30000 isn't published"),
        ("hearth.yaml", "model: {}\n", "model.path"),
        (
            "hearth.yaml",
            CONFIG.replace("supervisor_host: 0.0.0.0", "supervisor: 9400"),
            "ports.supervisor_host",
        ),
    ],
)
def test_a_draft_that_cannot_be_used(tmp_path, name, text, word):
    (tmp_path / "release.json").write_text(json.dumps(DRAFT))
    (tmp_path / "hearth.yaml").write_text(CONFIG)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    root = tmp_path / "releases"
    result = run("release", "add", str(tmp_path), "--root", str(root))
    assert isinstance(result.exception, HearthError)
    assert word in str(result.exception)
    assert not root.exists()


def test_no_engine_is_one_line_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    (tmp_path / "release.json").write_text(json.dumps(DRAFT))
    (tmp_path / "hearth.yaml").write_text(CONFIG)
    result = run("release", "add", str(tmp_path), "--root", str(tmp_path / "releases"))
    assert result.exception.code is ExitCode.UNREACHABLE
    assert "systemctl start docker" in str(result.exception)
    assert not (tmp_path / "releases").exists()


def test_launching_what_is_no_release(tmp_path):
    assert isinstance(run("launch", "--release", str(tmp_path)).exception, MissingError)
    (tmp_path / "release.json").write_text("{}")
    assert isinstance(run("launch", "--release", str(tmp_path)).exception, ConfigError)


FAILED = Report(
    "new", ok=False, reason="smoke test: wrong", rolled_back=True, rolled_back_to="old", downtime_s=3.14159
)


def test_a_report_as_json(capsys):
    with pytest.raises(BaseException) as caught:
        _finish(FAILED, True)
    assert caught.value.exit_code == ExitCode.CHECK_FAILED
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "ok": False,
        "id": "new",
        "changed": True,
        "rolled_back": True,
        "rolled_back_to": "old",
        "reason": "smoke test: wrong",
        "downtime_s": 3.14,
        "ready_s": None,
        "checks": [],
    }


def test_a_report_for_a_person(capsys):
    with pytest.raises(CheckFailed, match=r"new: smoke test: wrong; old serves again; downtime 3.1 s"):
        _finish(FAILED, False)
    _finish(Report("new", ok=True, downtime_s=2.0, checks=(Check("prompt 1", True, "x"),)), False)
    assert capsys.readouterr().out == "new serves; downtime 2.0 s\n"
