"""`hearth serve` processes for the scenarios: their config, their start, what they say, their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

CAPTURED = re.compile(
    r"Capture target (prefill|decode) CUDA graph end\. elapsed=([\d.]+) s, mem usage=(-?[\d.]+) GB"
)
Status = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """Where engines run: interpreter, SGLang version, and what every engine gets."""

    python: str
    version: str
    work: Path
    env: Mapping[str, str]
    args: Mapping[str, Any]
    profile: str = "gpu"


@dataclass
class Wish:
    """What one `hearth serve` is to run; `extra` is merged over the config, section by section."""

    name: str
    wanted: str
    model: str = "dense"
    max_bs: int | None = 64
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    cache: str = "cache"
    user: int | None = None


class Served:
    """One `hearth serve`. Its timeline keeps each change of state, phase and plan, in seconds since start."""

    _next_port = 30100

    def __init__(self, machine: Machine, wish: Wish) -> None:
        self.machine, self.wish = machine, wish
        self.engine_port, self.port = Served._next_port, Served._next_port + 1
        Served._next_port += 10
        self.url = f"http://127.0.0.1:{self.engine_port}"
        self.folder = machine.work / wish.name
        self.log = self.folder / "hearth.log"
        self.timeline: list[dict[str, Any]] = []
        self.status: Status = {}
        self.every = 0.2
        self.begun = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def config(self) -> dict[str, Any]:
        """The deployment config, as it is written to hearth.yaml."""
        wish, machine = self.wish, self.machine
        document: dict[str, Any] = {
            "model": {"path": str(machine.work / "models" / wish.model), "served_name": wish.model},
            "engine": {
                "version": machine.version,
                "python": machine.python,
                "args": {**machine.args, **wish.args},
                "env": {**machine.env, **wish.env},
            },
            "graphs": {"wanted": wish.wanted, "decode_max_bs": wish.max_bs},
            "limits": {"backoff": 0.1, "drain": 15, "memory_free": 10},
            "canary": {"prompt": "w5 w6 w7", "max_tokens": 8},
            "ports": {
                "engine_host": "127.0.0.1",
                "engine": self.engine_port,
                "supervisor": self.port,
            },
            "paths": {
                "state": str(self.folder / "state"),
                "runtime": str(self.folder / "run"),
                "cache": str(machine.work / wish.cache),
            },
            "profile": machine.profile,
        }
        for section, values in wish.extra.items():
            document.setdefault(section, {}).update(values)
        return document

    def start(self) -> Served:
        """Start it and watch its status."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "hearth.yaml"
        path.write_text(yaml.safe_dump(self.config(), sort_keys=False))
        if self.wish.user is not None:
            for each in (self.folder, path):
                os.chown(each, self.wish.user, self.wish.user)
        self.begun = time.time()
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hearth", "serve", "-c", str(path)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
                user=self.wish.user,
                group=self.wish.user,
            )
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        """Follow /status until the supervisor is gone."""
        url = f"http://127.0.0.1:{self.port}/status"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session:
            while self.process is not None and self.process.poll() is None:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                    async with session.get(url) as answer:
                        self._take(await answer.json())
                await asyncio.sleep(self.every)

    def _take(self, status: Status) -> None:
        self.status = status
        plan = status["plan"]["started"]
        event = {
            "state": status["state"],
            "phase": status["phase"],
            "plan": f"{plan['prefill']},{plan['decode']},{plan['decode_max_bs']}",
            "sentence": status["sentence"],
        }
        if not self.timeline or any(self.timeline[-1][key] != event[key] for key in event):
            self.timeline.append({"at": round(time.time() - self.begun, 2), **event})

    async def until(self, condition: Callable[[Status], bool], limit: float) -> float:
        """Wait; seconds since this call. Raises RuntimeError when hearth ends, TimeoutError after `limit`."""
        begun = time.monotonic()
        while not (self.status and condition(self.status)):
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.wish.name}: hearth ended with {self.process.returncode}")
            if time.monotonic() - begun > limit:
                raise TimeoutError(
                    f"{self.wish.name}: not within {limit:.0f} s: {self.status.get('sentence')}"
                )
            await asyncio.sleep(0.05)
        return round(time.monotonic() - begun, 2)

    async def ready(self, limit: float = 300.0) -> float:
        """Wait until it serves and answers right."""
        return await self.until(lambda status: bool(status["ready"]), limit)

    async def ended(self, limit: float) -> int | None:
        """Wait for hearth to end by itself; its exit code, None when it doesn't."""
        assert self.process is not None
        end = time.monotonic() + limit
        while self.process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return self.process.returncode

    def scheduler(self, rank: int = 0) -> psutil.Process:
        """The engine's scheduler process of a tensor-parallel rank."""
        assert self.process is not None
        found = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if "scheduler" in " ".join(_words(process))
        ]
        found.sort(key=lambda process: " ".join(_words(process)))
        if len(found) <= rank:
            raise RuntimeError(f"{self.wish.name}: no scheduler of rank {rank}")
        return found[rank]

    def captures(self) -> list[dict[str, Any]]:
        """From the log: each capture's seconds and the GPU memory that it took, oldest first."""
        text = self.log.read_text(errors="replace")
        return [
            {"phase": phase, "seconds": float(seconds), "gb": float(gb)}
            for phase, seconds, gb in CAPTURED.findall(text)
        ]

    def report(self) -> dict[str, Any]:
        """What is known of it now, for the results."""
        status = self.status
        keep = ("phase_seconds", "plan", "failures", "graph_passes", "restarts", "ladder_steps", "sentence")
        return {
            "wanted": self.wish.wanted,
            "model": self.wish.model,
            "timeline": self.timeline,
            "captures": self.captures(),
            **{key: status.get(key) for key in keep},
        }

    async def metrics(self) -> str:
        """The supervisor's own metrics page."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return await answer.text()

    async def stop(self, limit: float = 30.0) -> dict[str, Any]:
        """SIGTERM, as systemd stops it; exit code and seconds."""
        assert self.process is not None
        begun = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = await self.ended(limit)
        self.kill()
        return {"exit": code, "seconds": round(time.monotonic() - begun, 2)}

    def kill(self) -> None:
        """End everything at once: the engine's processes die with their supervisor."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
