"""A real Docker Engine, a Debian root made here, and the `cpu` image built and checked on it.

Uses the Engine that HEARTH_TEST_DOCKER names (a DOCKER_HOST), else starts one of its own, which needs root
and `dockerd`; without either the tests are skipped, with the reason. Images stay between runs: the next run
takes every step from the cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "images"
NAME = "hearth-test"
TAG = f"{NAME}/cpu:latest"
DATA = Path(os.environ.get("HEARTH_TEST_DOCKER_DATA", "/var/tmp/hearth-dockerd"))
"""Where an Engine of our own keeps its images; not on a tmpfs, and not in the project's folder."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.image)


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """The address of a Docker Engine that answers."""
    given = os.environ.get("HEARTH_TEST_DOCKER")
    if given:
        yield given
    elif os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("no Docker Engine: set HEARTH_TEST_DOCKER, or run as root with dockerd installed")
    else:
        with own_engine() as address:
            yield address


@contextlib.contextmanager
def own_engine() -> Iterator[str]:
    """A dockerd with its own data, socket and process folder, stopped at the end."""
    DATA.mkdir(parents=True, exist_ok=True)
    address = f"unix://{DATA}/docker.sock"
    command = ["dockerd", "--data-root", f"{DATA}/data", "--exec-root", f"{DATA}/exec"]
    command += ["--pidfile", f"{DATA}/pid", "--host", address]
    with (DATA / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(daemon, address)
        yield address
    finally:
        daemon.terminate()
        daemon.wait(60)


def wait_for(daemon: subprocess.Popen[bytes], address: str) -> None:
    """Until the Engine answers; the test fails with its last words if it doesn't."""
    for _ in range(120):
        asked = subprocess.run(["docker", "--host", address, "version"], capture_output=True)
        if asked.returncode == 0:
            return
        if daemon.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"dockerd doesn't start: {(DATA / 'dockerd.log').read_text()[-800:]}")


@pytest.fixture(scope="session")
def client(docker_host: str) -> Iterator[Any]:
    """The Docker SDK on that Engine."""
    from docker.client import DockerClient

    connected = DockerClient(base_url=docker_host, timeout=3600)
    yield connected
    connected.close()


@pytest.fixture(scope="session")
def bases(docker_host: str, client: Any) -> list[str]:
    """Arguments that name the base images, made where they aren't there yet."""
    present = {tag for image in client.images.list(NAME) for tag in image.tags}
    if not {f"{NAME}:base", f"{NAME}:build"} <= present:
        environment = {**os.environ, "DOCKER_HOST": docker_host}
        subprocess.run([str(ROOT / "tests/image/mkbase.sh"), NAME], check=True, env=environment)
    return ["--base", f"{NAME}:base", "--build-base", f"{NAME}:build"]


@pytest.fixture(scope="session")
def hearth(docker_host: str) -> Any:
    """Runs `hearth WORDS` on this Engine."""

    def run(*words: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DOCKER_HOST": docker_host, "PATH": path}
        command = [sys.executable, "-m", "hearth", *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def built(hearth: Any, bases: list[str], client: Any) -> Any:
    """The `cpu` image, built now (from the cache where nothing changed), not yet checked."""
    done = hearth("image", "build", "cpu", "--tag", TAG, "--no-check", *bases)
    assert done.returncode == 0, done.stdout + done.stderr
    return client.images.get(TAG)
