"""Programs that tests drive, from the distribution."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ENGINE = {"dockerd": "docker.io", "mmdebstrap": "mmdebstrap", "ssh": "openssh-client", "ip": "iproute2"}
"""What a Docker Engine of our own, a Debian root and a host over SSH take: program and package."""


def installed(packages: Mapping[str, str]) -> None:
    """Install the packages whose program is missing; without root, skip the test and say what to install.

    No service of theirs is started. Raises AssertionError with apt's own words.
    """
    with (Path(tempfile.gettempdir()) / "hearth-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of tests may want something
        _install(sorted({package for program, package in packages.items() if shutil.which(program) is None}))


def _install(missing: list[str]) -> None:
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"missing {', '.join(missing)}: apt-get install {' '.join(missing)}, and run as root")
    # RUNLEVEL=1 makes invoke-rc.d leave services alone, as in a chroot.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def newer(package: str, suite: str, folder: Path) -> Path:
    """A package of another Debian release, unpacked below `folder` and not installed: where its files are.

    Skips the test where apt has no Debian mirror. Raises AssertionError with apt's own words.
    """
    words = ["bash", "-c", f"source {Path(__file__).parent}/mirrors.sh; mirror Debian ''"]
    mirror = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    if not mirror:
        pytest.skip(
            f"no Debian mirror for {package} of {suite}: this machine's apt names none (apt-get update)"
        )
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb {mirror} {suite} main\n")
    settings = {
        "Dir::State": folder / "state",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    for words in ([*apt, "update"], [*apt, "download", package]):
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "--extract", archive, folder / "root"], check=True)
    return folder / "root"
