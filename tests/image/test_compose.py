"""docker-compose.yml, read by the real `docker compose`; no Engine is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "HEARTH_IMAGE": "hearth/x@sha256:0",
    "HEARTH_MODEL": "/models/x",
    "HEARTH_API_KEY_FILE": "/run/key",
}


def compose(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `docker compose` on the project's file."""
    environment = {**os.environ, **settings}
    return subprocess.run(
        ["docker", "compose", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture(autouse=True)
def plugin() -> None:
    """The compose plugin, or a skip that says what to install."""
    try:
        if compose("version").returncode == 0:
            return
    except FileNotFoundError:
        pass
    pytest.skip("no `docker compose`: install docker-compose-plugin (Debian 13: docker-compose)")


def test_compose_takes_the_file() -> None:
    done = compose("config", "--format", "json", **SETTINGS)
    assert (done.returncode, done.stderr) == (0, "")
    service = json.loads(done.stdout)["services"]["hearth"]
    assert service["stop_grace_period"] == "1m30s"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_missing_setting_is_named(name: str) -> None:
    done = compose("config", **{key: value for key, value in SETTINGS.items() if key != name})
    assert done.returncode != 0
    assert name in done.stderr
