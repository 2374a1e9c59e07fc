"""The same Dockerfile by BuildKit: a whole second build, with its own cache (6 minutes on 2 idle cores)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hearth.image.build import layers_of
from hearth.image.check import HEARTH_LAYER_LIMIT

TAG = "hearth-test/cpu-buildkit:latest"


def client_folder() -> str | None:
    """A folder of PATH whose `docker` has BuildKit: an old client has it built in, a new one as a plugin."""
    for folder in dict.fromkeys([*os.environ["PATH"].split(os.pathsep), "/usr/bin"]):
        tool = Path(folder, "docker")
        if not tool.is_file():
            continue
        said = subprocess.run([str(tool), "--version"], capture_output=True, text=True).stdout
        release = re.search(r"version ([0-9]+)", said)
        plugin = subprocess.run([str(tool), "buildx", "version"], capture_output=True).returncode == 0
        if plugin or (release and int(release[1]) < 23):
            return folder
    return None


@pytest.fixture
def buildkit() -> str:
    """PATH with such a client first, or a skip that says what to install."""
    folder = client_folder()
    if folder is None:
        pytest.skip("no docker client with BuildKit: install docker-buildx-plugin (Debian: docker.io)")
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_buildkit_builds_the_same_image(
    hearth: Any, bases: list[str], client: Any, built: Any, buildkit: str
) -> None:
    done = hearth("image", "build", "cpu", "--builder", "buildkit", "--tag", TAG, *bases, path=buildkit)
    assert done.returncode == 0, done.stdout + done.stderr
    image = client.images.get(TAG)
    sizes, classic = ([layer.size for layer in layers_of(one)] for one in (image, built))
    assert len(sizes) == len(classic)
    assert sizes[0] < HEARTH_LAYER_LIMIT
    for key in (
        "User",
        "Entrypoint",
        "Cmd",
        "Env",
        "StopSignal",
        "Healthcheck",
        "ExposedPorts",
        "WorkingDir",
    ):
        assert image.attrs["Config"].get(key) == built.attrs["Config"].get(key), key
    client.images.remove(TAG, force=True)
