"""A Docker Engine for tests, with its own data, socket and bridge, next to whatever else the machine runs.

Images stay between runs: the next one takes every step from the cache. One run at a time uses a data folder;
the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

DATA = Path(os.environ.get("HEARTH_TEST_DOCKER_DATA", "/var/tmp/hearth-dockerd"))
"""Where an Engine of our own keeps its images; not on a tmpfs, and not in the project's folder."""


_RUNNING: dict[Path, str] = {}


@contextlib.contextmanager
def own_engine(data: Path = DATA) -> Iterator[str]:
    """The address of a dockerd that is stopped at the end. Raises RuntimeError with its last words.

    Within one process whoever comes second shares the first one's, and is done before it.
    """
    if data in _RUNNING:
        yield _RUNNING[data]
        return
    data.mkdir(parents=True, exist_ok=True)
    address = f"unix://{data}/docker.sock"
    command = ["dockerd", "--data-root", f"{data}/data", "--exec-root", f"{data}/exec"]
    command += ["--pidfile", f"{data}/pid", "--host", address]
    with (data / "lock").open("w") as lock, (data / "dockerd.log").open("wb") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with own_bridge(data) as bridge:
            with starting():
                daemon = subprocess.Popen([*command, "--bridge", bridge], stdout=log, stderr=log)
                try:
                    wait_for(daemon, address, data)
                except RuntimeError:
                    daemon.kill()
                    raise
            try:
                _RUNNING[data] = address
                yield address
            finally:
                _RUNNING.pop(data, None)
                daemon.terminate()
                daemon.wait(60)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """One Engine starts at a time: each clears and makes the same chains of iptables."""
    with Path(f"{DATA}.starting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def own_bridge(data: Path) -> Iterator[str]:
    """A bridge with a network of its own: two Engines on one bridge would give the same address twice."""
    number = int(hashlib.sha256(str(data).encode()).hexdigest(), 16) % 250 + 1
    name = f"hearth-t{number}"
    subprocess.run(["ip", "link", "delete", name], capture_output=True)
    subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
    subprocess.run(["ip", "address", "add", f"10.213.{number}.1/24", "dev", name], check=True)
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    try:
        yield name
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True)


def wait_for(daemon: subprocess.Popen[bytes], address: str, data: Path) -> None:
    """Until the Engine answers; RuntimeError with its last words if it doesn't."""
    for _ in range(120):
        asked = subprocess.run(["docker", "--host", address, "version"], capture_output=True)
        if asked.returncode == 0:
            return
        if daemon.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"dockerd doesn't start: {(data / 'dockerd.log').read_text()[-800:]}")
