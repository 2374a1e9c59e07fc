"""A real SGLang server on CPU under a real `hearth serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hearth.session import ENDED
from tests.tools import free_port

ROOT = Path(__file__).resolve().parents[2]
READY_LIMIT = 900.0
"""Seconds: a start takes half a minute on an idle machine and many on a busy one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


def _tool(*command: str) -> str:
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="session")
def engine_python() -> Callable[[str], str]:
    """Path of the interpreter that holds a given SGLang version."""
    found: dict[str, str] = {}

    def python(version: str = "0.5.23") -> str:
        if version not in found:
            found[version] = _tool(sys.executable, "tools/cpu_engine.py", "--version", version)
        return found[version]

    return python


@pytest.fixture(scope="session")
def tiny_model(engine_python: Callable[[str], str]) -> str:
    return _tool(engine_python("0.5.23"), "tools/tiny_model.py")


def get(url: str, timeout: float = 10.0) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Hearth:
    """A `hearth serve` process with a config of its own; may be started several times on the same state."""

    def __init__(self, folder: Path, python: str, model: str, version: str = "0.5.23") -> None:
        self.folder = folder
        self.engine_port, self.port = free_port(), free_port()
        self.engine_url = f"http://127.0.0.1:{self.engine_port}"
        self.url = f"http://127.0.0.1:{self.port}"
        self.config: dict[str, Any] = yaml.safe_load((ROOT / "demo/hearth.demo.yaml").read_text())
        self.config["model"]["path"] = model
        self.config["engine"].update(version=version, python=python)
        self.config["engine"]["env"].update(
            PYTHONPATH=str(ROOT / "tests/faults"),
            HEARTH_FAULT="none",
            HEARTH_FAULT_MARKER=str(folder / "fault-happened"),
        )
        self.config["limits"].update(backoff=0.5, poll=1)
        self.config["ports"].update(engine=self.engine_port, supervisor=self.port)
        self.config["paths"] = {name: str(folder / name) for name in ("state", "runtime", "cache")}
        self.log = folder / "hearth.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()

    @property
    def config_file(self) -> Path:
        path = self.folder / "hearth.yaml"
        path.write_text(yaml.safe_dump(self.config))
        return path

    def start(self) -> None:
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hearth", "serve", "-c", str(self.config_file)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hearth", *words], capture_output=True, text=True, check=False
        )

    def status(self) -> dict[str, Any] | None:
        try:
            document: dict[str, Any] = json.loads(get(f"{self.url}/status", 3)[1])
            return document
        except (OSError, ValueError):
            return None

    def wait_until(
        self, what: str, condition: Callable[[dict[str, Any]], bool], limit: float = READY_LIMIT
    ) -> dict[str, Any]:
        """Poll the status until the condition holds; fails at once when the supervisor is gone."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            status = self.status()
            if status is not None and condition(status):
                return status
            assert self.process is not None
            code = self.process.poll()
            assert code is None, f"hearth ended with {code} while waiting for {what}:\n{self.tail()}"
            time.sleep(0.2)
        raise AssertionError(f"not within {limit:.0f} s: {what}\n{self.tail()}")

    def wait_ready(self) -> dict[str, Any]:
        return self.wait_until("ready", lambda status: status["ready"])

    def wait_exit(self, limit: float = READY_LIMIT) -> int:
        assert self.process is not None
        return self.process.wait(limit)

    def tail(self, count: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def engine_processes(self) -> list[psutil.Process]:
        """Every process below the supervisor, now or when this was last asked, that still lives."""
        if self.process is not None and self.process.poll() is None:
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return [process for process in self._seen if _lives(process)]

    def scheduler(self) -> psutil.Process:
        """The engine's scheduler process (SGLang sets its title, so the environment can't be read)."""
        processes = self.engine_processes()
        named = [process for process in processes if "scheduler" in " ".join(process.cmdline())]
        assert named, [process.cmdline() for process in processes]
        return named[0]

    def clean_up(self) -> None:
        self.engine_processes()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for process in self.engine_processes():
            process.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in ENDED
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def hearth(
    tmp_path_factory: pytest.TempPathFactory, engine_python: Callable[[str], str], tiny_model: str
) -> Iterator[Hearth]:
    """One supervisor for a whole module: its tests are the chapters of one story, in file order."""
    runner = Hearth(tmp_path_factory.mktemp("hearth"), engine_python("0.5.23"), tiny_model)
    yield runner
    runner.clean_up()


@pytest.fixture
def fresh_hearth(tmp_path: Path, engine_python: Callable[[str], str], tiny_model: str) -> Iterator[Hearth]:
    """A supervisor of the test's own."""
    runner = Hearth(tmp_path, engine_python("0.5.23"), tiny_model)
    yield runner
    runner.clean_up()


def gone(hearth: Hearth, limit: float = 10.0) -> bool:
    """Whether no process of the engine is left within `limit` seconds."""
    end = time.monotonic() + limit
    while hearth.engine_processes():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


os.environ.setdefault("HEARTH_CONFIG", "/nonexistent/hearth.yaml")
