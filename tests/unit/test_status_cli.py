"""`hearth status --release`: where a release's supervisor is reached on this host, and how it last ended."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hearth.cli import app
from hearth.deploy.release import Draft
from hearth.deploy.releases import Store, load
from hearth.errors import ConfigError, Unreachable

CONFIG = """\
model: {path: /m, served_name: tiny}
engine: {version: 0.5.23}
ports: {engine_host: 0.0.0.0, supervisor_host: 0.0.0.0}
"""


def release(tmp_path: Path, port: int) -> Path:
    container = {
        "ports": [{"container": 9400, "host": port}],
        "binds": [{"source": str(tmp_path / "state"), "target": "/var/lib/hearth", "read_only": False}],
    }
    image = {"ref": "x", "digest": "sha256:" + "a" * 64}
    store = Store(tmp_path / "releases")
    made, _ = store.add(Draft.model_validate({"image": image, "container": container}), CONFIG)
    return store.folder(made.id)


def test_nobody_there_and_nothing_known_names_the_published_port(tmp_path: Path) -> None:
    folder = release(tmp_path, 1)
    done = CliRunner().invoke(app, ["status", "--release", str(folder)])
    assert isinstance(done.exception, Unreachable)
    assert "http://127.0.0.1:1: no supervisor answers" in str(done.exception)


def test_the_last_end_is_read_where_the_host_keeps_it(tmp_path: Path) -> None:
    folder = release(tmp_path, 1)
    (tmp_path / "state").mkdir()
    last = {"state": "gave_up", "sentence": "Stopped for good."}
    (tmp_path / "state" / "last-status.json").write_text(json.dumps(last))
    done = CliRunner().invoke(app, ["status", "--release", str(folder), "--json"])
    assert json.loads(done.stdout) == {**last, "live": False}


def test_an_unpublished_port_is_named(tmp_path: Path) -> None:
    folder = release(tmp_path, 1)
    document = json.loads((folder / "release.json").read_text())
    document["container"]["ports"] = []
    (folder / "release.json").write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["status", "--release", str(folder)])
    assert isinstance(done.exception, ConfigError)
    assert "9400 isn't published" in str(done.exception)


@pytest.mark.parametrize("inside", ["/var/lib/hearth/state", "/elsewhere"])
def test_what_lies_where(tmp_path: Path, inside: str) -> None:
    spec = load(release(tmp_path, 1)).container
    expected = tmp_path / "state" / "state" if inside.startswith("/var") else None
    assert spec.on_host(Path(inside)) == expected
