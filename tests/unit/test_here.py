"""What is deployed on this host: verbs find it by themselves, and its folders where the host has them."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hearth.cli import app
from hearth.cli.doctor import _settings
from hearth.deploy import here
from hearth.deploy.release import Draft
from hearth.deploy.releases import CURRENT, NotAllowed, Store
from hearth.errors import ConfigError, MissingError, Unreachable
from hearth.host.doctor import wanted_for
from hearth.ladder import GraphPlan
from hearth.planstore import PlanStore

CONFIG = """\
model: {path: /weights, served_name: tiny}
engine: {version: 0.5.23, args: {tp: 4}}
ports: {engine_host: 0.0.0.0, supervisor_host: 0.0.0.0}
"""
WANTED, LOWER = GraphPlan("breakable", "full", 32), GraphPlan("disabled", "full", 32)


def run(*words):
    return CliRunner(env={"HEARTH_CONFIG": "", "HEARTH_URL": ""}).invoke(app, list(map(str, words)))


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with a current release, whose container has its folders under other names."""
    for name in ("state", "failures"):
        (tmp_path / name).mkdir()
    binds = {"weights": "/weights", "state": "/var/lib/hearth", "failures": "/var/lib/hearth/failures"}
    container = {
        "ports": [{"container": 9400, "host": 1}],
        "binds": [{"source": str(tmp_path / name), "target": inside} for name, inside in binds.items()],
    }
    image = {"ref": "x", "digest": "sha256:" + "a" * 64}
    store = Store(tmp_path / "releases")
    made, _ = store.add(Draft.model_validate({"image": image, "container": container}), CONFIG)
    store.point(CURRENT, made.id)
    monkeypatch.setattr(here, "CONFIG", tmp_path / "hearth.yaml")
    monkeypatch.setattr(here, "CURRENT", store.root / CURRENT)
    PlanStore(tmp_path / "state").remember("key", LOWER, WANTED)
    return tmp_path


@pytest.mark.parametrize(
    "words", [[], ["--release", "releases/current"], ["-c", "releases/current/hearth.yaml"]]
)
def test_promote_forgets_where_the_host_keeps_the_plans(host, words):
    words = [host / word if "/" in word else word for word in words]
    done = run("promote", *words)
    assert f"Forgot {LOWER}: the next start tries {WANTED}." in done.stdout
    assert "nothing to forget" in run("promote", *words).stdout


def test_a_config_in_its_usual_place_goes_before_the_release(host):
    (host / "elsewhere").mkdir()
    (host / "hearth.yaml").write_text(f"{CONFIG}paths: {{state: {host}/elsewhere}}\n")
    assert "nothing to forget" in run("promote").stdout
    assert PlanStore(host / "state").recall("key", WANTED) is not None


def test_nothing_is_not_taken_for_no_step_down(host):
    other = host / "other.yaml"
    other.write_text(f"{CONFIG}paths: {{state: {host}/none}}\n")
    done = run("promote", "-c", other)
    assert isinstance(done.exception, MissingError)
    assert f"{other}: paths.state: {host}/none: no such folder" in str(done.exception)
    (host / "releases/current").unlink()
    assert isinstance(run("promote").exception, MissingError)


def test_a_folder_that_only_the_container_has_is_named(host):
    path = host / "releases/current/release.json"
    document = json.loads(path.read_text())
    document["container"]["binds"] = []
    path.write_text(json.dumps(document))
    done = run("promote")
    assert isinstance(done.exception, ConfigError)
    assert "hearth.yaml: /var/lib/hearth is in no folder of this host" in str(done.exception)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_who_may_not_is_told(host):
    (host / "state").chmod(0o500)
    assert isinstance(run("promote").exception, NotAllowed)


def test_status_and_failures_find_the_release_too(host):
    done = run("status")
    assert isinstance(done.exception, Unreachable)
    assert "http://127.0.0.1:1: no supervisor" in str(done.exception)
    assert "http://127.0.0.1:2: no supervisor" in str(run("status", "--url", "http://127.0.0.1:2").exception)
    assert run("failures").stdout == f"No failure is kept in {host}/failures.\n"


def test_doctor_knows_by_the_release_what_there_should_be(host):
    wanted = wanted_for(_settings(None))
    assert wanted.gpus == 4
    assert str(host / "weights") in [room.path for room in wanted.rooms]
    (host / "releases/current/hearth.yaml").write_text("damaged")
    assert wanted_for(_settings(None)).gpus == 8
    with pytest.raises(ConfigError):
        _settings(Path(here.CURRENT) / "hearth.yaml")
