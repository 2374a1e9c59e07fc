"""The launcher and the releases with a real Docker Engine; the container's supervisor is a stand-in.

Starts an Engine of its own, on its own bridge: it is stopped and started under the launcher. Needs root;
installs what is missing by apt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools import ENGINE, free_port, installed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "hearth-launch-test"
DATA = Path(os.environ.get("HEARTH_TEST_LAUNCH_DATA", "/var/tmp/hearth-launch-test"))
BRIDGE, NETWORK = "hearth-lt0", "172.29.177.1/24"
PATIENCE = 60.0
CONFIG = {
    "model": {"path": "/models/tiny", "served_name": "tiny", "architecture": "LlamaForCausalLM"},
    "engine": {"version": "0.5.23"},
    "limits": {"drain": 5, "kill": 5},
    "canary": {"prompt": "The capital of Italy is", "expect": "Rome", "max_tokens": 8},
    "ports": {"engine_host": "0.0.0.0", "supervisor_host": "0.0.0.0"},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.host)


class Engine:
    """A dockerd with its own data, socket, bridge and process folder."""

    def __init__(self) -> None:
        self.address = f"unix://{DATA}/docker.sock"
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self, live_restore: bool = True) -> None:
        command = [
            "dockerd",
            "--data-root",
            f"{DATA}/data",
            "--exec-root",
            f"{DATA}/exec",
            "--bridge",
            BRIDGE,
        ]
        command += ["--pidfile", f"{DATA}/pid", "--host", self.address, "--shutdown-timeout", "5"]
        # A starting Engine clears the chains of every other one on this machine; ports are published without.
        command += ["--iptables=false", "--ip6tables=false"]
        command += ["--live-restore"] if live_restore else []
        with (DATA / "dockerd.log").open("ab") as log:
            self._daemon = subprocess.Popen(command, stdout=log, stderr=log)
        wait(self._answers, "dockerd answers")

    def _answers(self) -> bool:
        if self._daemon is not None and self._daemon.poll() is not None:
            raise AssertionError(f"dockerd doesn't start: {(DATA / 'dockerd.log').read_text()[-800:]}")
        return self.docker("version", check=False).returncode == 0

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(60)
            self._daemon = None

    def docker(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["docker", "--host", self.address, *words]
        return subprocess.run(command, capture_output=True, text=True, check=check)


def wait(true: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Until it is true; fails by name when it isn't in time (machines may be slow)."""
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        found = true()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {patience} s: {what}")


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    if os.geteuid() != 0:
        pytest.skip("starts a Docker Engine: run as root")
    installed(ENGINE)
    DATA.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], capture_output=True)
    subprocess.run(["ip", "addr", "replace", NETWORK, "dev", BRIDGE], check=True)
    subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)
    made = Engine()
    try:
        made.start()
        yield made
        made.docker("rm", "--force", "--volumes", *made.docker("ps", "-aq").stdout.split(), check=False)
    finally:
        made.stop()
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False)


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The stand-in's image, made once and kept."""
    ref = f"{NAME}:standin"
    if engine.docker("image", "inspect", ref, check=False).returncode != 0:
        environment = {**os.environ, "DOCKER_HOST": engine.address}
        subprocess.run([str(HERE / "mkimage.sh"), NAME], check=True, env=environment)
    return ref


class Systemd:
    """Stands in for systemd's end of the notification socket: keeps what was said, and when."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[tuple[float, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                for line in self._socket.recv(8192).decode().split("\n"):
                    self.said.append((time.monotonic(), line))

    def close(self) -> None:
        self._socket.close()

    def count(self, message: str) -> int:
        return sum(line.startswith(message) for _, line in self.said)


class Site:
    """A host's folders, its releases, and `hearth` run on them."""

    def __init__(self, folder: Path, engine: Engine, image: str) -> None:
        self.folder, self.engine, self.image = folder, engine, image
        self.address = engine.address
        self.releases, self.state = folder / "releases", folder / "state"
        self.secrets, self.runtime = folder / "secrets", folder / "run"
        for path in (self.state, self.secrets, self.runtime, folder / "standin"):
            path.mkdir()
        self.state.chmod(0o777)
        shutil.copy(HERE / "supervisor.py", folder / "standin")
        self.supervisor, self.port = free_port(), free_port()
        self.systemd = Systemd(folder / "notify.sock")
        self.name = f"hearth-{os.getpid()}-{self.port}"
        self._launched: list[subprocess.Popen[str]] = []

    def draft(self, **container: Any) -> dict[str, Any]:
        binds = [
            {"source": str(self.state), "target": "/var/lib/hearth", "read_only": False},
            {"source": str(self.folder / "standin"), "target": "/standin"},
        ]
        ports = [{"container": 9400, "host": self.supervisor}, {"container": 30000, "host": self.port}]
        said = {"gpus": "none", "shm": "64m", "ulimits": {"nofile": 4096}, "binds": binds, "ports": ports}
        smoke = {"stream": {"min_chunks": 2}, "long_prompt": {"words": 50}, "timeout": 20}
        return {
            "image": {"ref": self.image},
            "container": {**said, **container},
            "smoke": smoke,
            "ready_within": 60,
        }

    def add(
        self, draft: dict[str, Any] | None = None, config: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        folder = self.folder / "draft"
        folder.mkdir(exist_ok=True)
        (folder / "release.json").write_text(json.dumps(draft or self.draft()))
        (folder / "hearth.yaml").write_text(yaml.safe_dump(config or CONFIG))
        done = self.hearth("release", "add", str(folder), "--root", str(self.releases), "--json")
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def hearth(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hearth", *words]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment())

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "DOCKER_HOST": self.address,
            "NOTIFY_SOCKET": str(self.systemd.path),
            "RUNTIME_DIRECTORY": str(self.runtime),
            "CREDENTIALS_DIRECTORY": str(self.secrets),
            "PYTHONUNBUFFERED": "1",
        }

    def launch(self, *words: str, release: str | None = None) -> subprocess.Popen[str]:
        folder = self.releases / (release or self.add()["id"])
        command = [
            sys.executable,
            "-m",
            "hearth",
            "launch",
            "--release",
            str(folder),
            "--name",
            self.name,
            *words,
        ]
        with (self.folder / "log").open("a") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=self.environment())
        self._launched.append(started)
        return started

    def tell(self, name: str, text: object = "1") -> None:
        (self.state / name).write_text(str(text))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def container(self) -> dict[str, Any] | None:
        done = self.engine.docker("inspect", self.name, check=False)
        return json.loads(done.stdout)[0] if done.returncode == 0 else None

    def ready(self) -> None:
        self.tell("ready")
        wait(lambda: self.systemd.count("READY=1"), f"READY\n{self.log}")

    def close(self) -> None:
        for each in self._launched:
            if each.poll() is None:
                each.send_signal(signal.SIGKILL)
                each.wait()
        self.engine.docker("rm", "--force", self.name, check=False)
        tags = [f"hearth-release:{path.name}" for path in self.releases.glob("2*")]
        self.engine.docker("image", "rm", *tags, check=False)
        self.systemd.close()
        print(
            (self.folder / "log").read_text() if (self.folder / "log").exists() else "no launcher was started"
        )


@pytest.fixture
def site(tmp_path: Path, engine: Engine, image: str) -> Iterator[Site]:
    made = Site(tmp_path, engine, image)
    yield made
    made.close()
