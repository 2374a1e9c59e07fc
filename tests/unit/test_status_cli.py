"""`hearth status`: where a supervisor is reached, how the last one ended, and what is shown."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hearth.board import Board
from hearth.cli import app
from hearth.cli.status import _show
from hearth.deploy.release import Draft
from hearth.deploy.releases import Store, load
from hearth.errors import ConfigError, Unreachable
from hearth.failure import Phase
from hearth.ladder import GraphPlan
from hearth.states import State

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


def shown(capsys: pytest.CaptureFixture[str], live: bool = True, **facts: object) -> dict[str, str]:
    """The table that a board with these facts is shown as, by the first column."""
    plan = GraphPlan("breakable", "full", 32)
    _show(Board(wanted=plan, plan=plan, **facts).to_json(), live)  # type: ignore[arg-type]
    rows = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line]
    return {name: value.strip() for name, value in rows}


def test_a_start_shows_its_phase_for_how_long_and_how_far(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"state": State.STARTING, "state_since": time.time() - 3600, "phase": Phase.LOAD}
    said = shown(capsys, **start, phase_seconds={"spawn": 600.0}, progress="Loading shards [3/20]")
    phase, seconds, rest = said["phase"].split(" ", 2)
    assert (phase, rest) == ("load,", "s: Loading shards [3/20]")
    assert int(seconds) >= 3000
    assert said["canary"] == "not asked yet"


def test_the_canarys_last_answer_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    serving = {"state": State.SERVING, "phase": Phase.SERVING, "progress": "of long ago"}
    said = shown(capsys, **serving, canary_ok=True, canary_detail="Rome\n [it is]")
    assert (said["phase"], said["canary"]) == ("serving", "right: Rome [it is]")
    assert shown(capsys, **serving, canary_detail="no answer")["canary"] == "not right: no answer"


def test_how_long_the_last_phase_of_one_that_ended_took(capsys: pytest.CaptureFixture[str]) -> None:
    gone = {"state": State.GAVE_UP, "phase": Phase.LOAD, "phase_seconds": {"spawn": 1.0, "load": 41.7}}
    assert shown(capsys, live=False, **gone)["phase"] == "load, 42 s"
