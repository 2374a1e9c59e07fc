"""docker-compose.yml with the real `docker compose`: read, and brought up with the `cpu` image.

Of the file only what this kind of machine lacks is left out: GPUs, their memory limits, and its fixed ports.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools import free_port, installed, newer

from .conftest import ROOT, TAG
from .served import serving

KEY = "a-key-that-nobody-else-has"
SETTINGS = {
    "HEARTH_IMAGE": "hearth/x@sha256:0",
    "HEARTH_MODEL": "/models/x",
    "HEARTH_API_KEY_FILE": "/run/key",
}


Compose = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Compose:
    """`docker compose` on the project's file; where the machine has no plugin, with Debian 13's."""
    installed({"docker": "docker.io"})
    home = Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker"))
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        folder = tmp_path_factory.mktemp("compose")
        root = newer("docker-compose", "trixie", folder)
        home = folder / "docker"
        home.mkdir()
        (home / "cli-plugins").symlink_to(root / "usr/libexec/docker/cli-plugins")

    def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DOCKER_CONFIG": str(home), **settings}
        command = ["docker", "compose", *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


def test_compose_takes_the_file(compose: Compose) -> None:
    done = compose("config", "--format", "json", **SETTINGS)
    assert (done.returncode, done.stderr) == (0, "")
    service = json.loads(done.stdout)["services"]["hearth"]
    assert service["stop_grace_period"] == "1m30s"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_missing_setting_is_named(compose: Compose, name: str) -> None:
    done = compose("config", **{key: value for key, value in SETTINGS.items() if key != name})
    assert done.returncode != 0
    assert name in done.stderr


WITHOUT_GPUS = """
services:
  hearth:
    container_name: !reset null
    deploy: !reset null
    shm_size: 1g
    ulimits: !reset null
    ports: !override ["127.0.0.1:{port}:30000"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A person's folder: the project's file, their config, their key."""
    said = yaml.safe_load((ROOT / "demo/hearth.demo.yaml").read_text())
    said["model"]["path"] = "/var/lib/hearth/models/GLM-5-NVFP4"
    said["engine"]["python"] = "python3"
    del said["engine"]["env"]["PYTHONPATH"], said["engine"]["env"]["HEARTH_FAULT"], said["paths"]
    said["ports"] = {"engine_host": "0.0.0.0"}
    said["secrets"] = {"api_key_file": "/run/secrets/api_key"}
    (tmp_path / "hearth.yaml").write_text(yaml.safe_dump(said))
    (tmp_path / "key").write_text(KEY)
    os.chown(tmp_path / "key", 10001, 10001)
    (tmp_path / "key").chmod(0o400)
    return tmp_path


def test_it_comes_up_serves_and_ends_cleanly(
    compose: Compose, docker_host: str, client: Any, model: Path, folder: Path
) -> None:
    port = free_port()
    (folder / "without-gpus.yml").write_text(WITHOUT_GPUS.format(port=port))
    settings = {"HEARTH_IMAGE": TAG, "HEARTH_MODEL": str(model), "HEARTH_API_KEY_FILE": str(folder / "key")}
    project = ["--project-directory", str(folder), "--project-name", f"hearth-test-{port}"]
    project += ["--file", "docker-compose.yml", "--file", str(folder / "without-gpus.yml")]

    def run(*words: str) -> str:
        done = compose(*project, *words, DOCKER_HOST=docker_host, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        run("up", "--detach")
        container = client.containers.get(run("ps", "--quiet").strip())
        serving(container)
        assert asked(port, KEY)[-1] == "data: [DONE]"
        assert asked(port, "another") == ["HTTP 401"]
        run("stop")
        assert container.wait()["StatusCode"] == 0
        assert KEY not in container.logs().decode() + json.dumps(container.attrs)
    finally:
        print(compose(*project, "logs", "--tail", "60", DOCKER_HOST=docker_host, **settings).stdout)
        run("down", "--volumes")


def asked(port: int, key: str) -> list[str]:
    """The lines of a streamed chat answer, or its HTTP status."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [line.decode().strip() for line in answer if line.strip()]
    except urllib.error.HTTPError as error:
        return [f"HTTP {error.code}"]
