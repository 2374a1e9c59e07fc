"""A host's files around a release: its secrets, and whether what runs started before they were changed."""

import time
from dataclasses import replace

import pytest

from hearth.deploy.onhost import Host
from hearth.deploy.release import Draft
from hearth.deploy.releases import Store
from hearth.deploy.systemctl import UnitState
from hearth.errors import MissingError

CONFIG = """\
model: {path: /m, served_name: x}
engine: {version: 0.5.23}
ports: {engine_host: 0.0.0.0, supervisor_host: 0.0.0.0}
secrets: {api_key_file: /run/secrets/NAME}
"""
PORTS = [{"container": 30000, "host": 30000}, {"container": 9400, "host": 9400}]
DRAFT = {"image": {"ref": "x", "digest": "sha256:" + "a" * 64}, "container": {"ports": PORTS}}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "releases")


@pytest.fixture
def host(store, tmp_path):
    (tmp_path / "secrets").mkdir()
    return Host(store, tmp_path / "secrets")


def add(store, name):
    return store.add(Draft.model_validate(DRAFT), CONFIG.replace("NAME", name))[0]


def test_the_secrets_of_every_kept_release_are_named(store, host):
    for name in ("new_key", "old_key", "gone"):
        release = add(store, name)
    (store.folder(release.id) / "hearth.yaml").write_text("damaged")
    assert host.secrets() == ["new_key", "old_key"]


def test_a_release_whose_secret_is_gone_is_refused_before_anything_is_touched(store, host):
    with pytest.raises(
        MissingError, match=r"secrets.api_key_file: .*/old_key: no such file .*--secret old_key="
    ):
        host.preflight(add(store, "old_key"))


def test_what_runs_is_older_than_its_unit_or_its_secret(store, host, tmp_path):
    release, unit = add(store, "key"), tmp_path / "hearth.service"
    now = UnitState(started=time.monotonic() + 1, path=str(unit))
    before = replace(now, started=time.monotonic() - 60)
    assert not host.stale(release, before), "without any file"
    (tmp_path / "secrets/other").write_text("x")
    assert not host.stale(release, before), "that secret isn't read by this release"
    for file in (tmp_path / "secrets/key", unit):
        file.write_text("x")
        assert host.stale(release, before)
        assert not host.stale(release, now)
        file.unlink()
