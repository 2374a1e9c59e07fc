"""A real Docker Engine, a Debian root made here, and the `cpu` image built and checked on it.

Uses the Engine that HEARTH_TEST_DOCKER names (a DOCKER_HOST), else starts one of its own, which needs root;
without either the tests are skipped, with the reason. Images stay between runs: the next run
takes every step from the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dockerd import own_engine
from tests.tools import ENGINE, installed

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "images"
NAME = "hearth-test"
TAG = f"{NAME}/cpu:latest"


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
    elif os.geteuid() != 0:
        pytest.skip("no Docker Engine: set HEARTH_TEST_DOCKER, or run as root")
    else:
        installed(ENGINE)
        with own_engine() as address:
            yield address


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


@pytest.fixture(scope="session")
def model(built: Any, client: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made by the image's own Python."""
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o777)
    client.containers.run(
        TAG,
        ["/tools/tiny_model.py", "/models/tiny"],
        entrypoint="python3",
        volumes={
            str(ROOT / "tools"): {"bind": "/tools", "mode": "ro"},
            str(folder): {"bind": "/models", "mode": "rw"},
        },
        remove=True,
        network_mode="none",
    )
    return folder / "tiny"
