"""A real systemd host to deploy to, with the Engine it lives in.

Needs root and `dockerd` (installed by apt where missing); skipped with the reason where that can't be had.
HEARTH_TEST_DOCKER names an Engine that is there already.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dockerd import own_engine
from tests.host.machine import NAME, ROOT, Machine, docker
from tests.host.operating import IMAGE, Operator
from tests.tools import ENGINE, installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.host)


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    """The address of a Docker Engine that has the base images."""
    given = os.environ.get("HEARTH_TEST_DOCKER")
    if given:
        with_bases(given)
        yield given
        return
    if os.geteuid() != 0:
        pytest.skip("no Docker Engine: set HEARTH_TEST_DOCKER, or run as root")
    installed(ENGINE)
    with own_engine() as address:
        with_bases(address)
        yield address


def with_bases(engine: str) -> None:
    """Make the Debian roots where they aren't there."""
    there = docker(engine, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    if not {f"{NAME}:base", f"{NAME}:build"} <= set(there):
        environment = {**os.environ, "DOCKER_HOST": engine}
        subprocess.run([str(ROOT / "tests/image/mkbase.sh"), NAME], check=True, env=environment)


@pytest.fixture(scope="session")
def machine(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The one host that the tests share, in the order in which they are written."""
    host = Machine(engine, tmp_path_factory.mktemp("host"))
    try:
        yield host.start()
    finally:
        host.remove()


@pytest.fixture(scope="session")
def image(engine: str) -> str:
    """The `cpu` image, built here (every step from the cache where nothing changed).

    HEARTH_TEST_HOST_IMAGE=keep takes the one that is there, whatever it was built from.
    """
    there = docker(engine, "image", "ls", "--quiet", IMAGE)
    if not (there and os.environ.get("HEARTH_TEST_HOST_IMAGE") == "keep"):
        words = ["image", "build", "cpu", "--tag", IMAGE, "--no-check"]
        words += ["--base", f"{NAME}:base", "--build-base", f"{NAME}:build"]
        environment = {**os.environ, "DOCKER_HOST": engine}
        done = subprocess.run(
            [sys.executable, "-m", "hearth", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return IMAGE


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model, and the planted faults beside it."""
    python = subprocess.run(
        [sys.executable, "tools/cpu_engine.py", "--print-python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
    made = subprocess.run(
        [python, "tools/tiny_model.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    shutil.copytree(made, folder)
    shutil.copytree(ROOT / "tests/faults", folder / "faults", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="session")
def operator(machine: Machine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Operator:
    """Somebody with a fresh checkout, an inventory and a config."""
    return Operator(machine, tmp_path_factory.mktemp("operator"), model)
