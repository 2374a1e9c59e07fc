"""An engine with nothing around it: the same command line and environment that Hearth would give it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import aiohttp
from served import Served

from hearth.engine.command import engine_argv, engine_env
from hearth.engine.dialect import dialect_for


class Bare:
    """Started from the config of a `Served` that is never started itself; its log goes to a file."""

    def __init__(self, like: Served) -> None:
        self._like, self.url = like, like.url
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Bare:
        config, machine = self._like.config(), self._like.machine
        dialect = dialect_for(machine.version)
        plan = dialect.resolve(config["graphs"]["wanted"], config["graphs"]["decode_max_bs"])
        model, ports = config["model"], config["ports"]
        argv = engine_argv(
            machine.python,
            dialect,
            plan,
            model["path"],
            "127.0.0.1",
            ports["engine"],
            model["served_name"],
            config["engine"]["args"],
        )
        env = engine_env(dialect, config["engine"]["env"], (), config["paths"]["cache"])
        folder = self._like.folder
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics"
        metrics.mkdir()
        with (folder / "hearth.log").open("wb") as sink:
            self.process = subprocess.Popen(
                argv,
                env={**env, "PROMETHEUS_MULTIPROC_DIR": str(metrics)},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    async def ready(self, limit: float) -> float:
        """Wait for SGLang's own word in its log, then for an answer."""
        begun = time.monotonic()
        log = self._like.folder / "hearth.log"
        while "fired up and ready" not in log.read_text(errors="replace"):
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() - begun > limit:
                raise RuntimeError(f"{self._like.wish.name}: not ready: exit {self.process.poll()}")
            await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/server_info") as answer:
            answer.raise_for_status()
        return round(time.monotonic() - begun, 2)

    def kill(self) -> None:
        """End the whole session."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def folder(self) -> Path:
        return self._like.folder
