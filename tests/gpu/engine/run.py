"""One run of the scenarios: the clock, the results that survive a cut, the logs, and what has to end."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import sys
import tarfile
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from gpuwatch import GpuWatch
from served import Machine, Served, Wish


class Ends(Protocol):
    def kill(self) -> None: ...


class Run:
    """What the steps share. `save` after each step writes everything under `out` again."""

    def __init__(self, machine: Machine, out: Path, seconds: float) -> None:
        self.machine, self.out = machine, out
        self.deadline = time.monotonic() + seconds
        self.begun = time.time()
        self.gpu = GpuWatch()
        self.results: dict[str, Any] = {"begun": self.begun}
        self.running: list[Ends] = []
        self._extra: list[Path] = []

    @property
    def left(self) -> float:
        """Seconds until the run must be over."""
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.begun:6.1f} s] {text}", flush=True)

    def serve(self, wish: Wish) -> Served:
        """Start `hearth serve`; it ends with the run at the latest."""
        served = Served(self.machine, wish)
        self.running.append(served)
        return served.start()

    async def step(self, name: str, work: Awaitable[Any]) -> Any:
        """Run one step; its result, or what stopped it, goes into the results. None when it failed."""
        self.say(f"{name}: begins, {self.left:.0f} s left")
        begun = time.time()
        entry: dict[str, Any] = {"begun": round(begun - self.begun, 1)}
        result = None
        try:
            async with asyncio.timeout(max(1.0, self.left)):
                result = await work
            entry["result"] = result
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            entry["trace"] = traceback.format_exc().splitlines()[-6:]
        entry["seconds"] = round(time.time() - begun, 1)
        self.results[name] = entry
        self.say(f"{name}: {entry.get('error', 'done')} ({entry['seconds']} s)")
        self.save()
        return result

    def save(self) -> None:
        """Results and logs, written aside and renamed."""
        self._write("results.json", json.dumps(self.results, indent=1, default=str).encode())
        self._write("gpu.json.gz", gzip.compress(json.dumps(self.gpu.to_json()).encode()))
        aside = self.out / "logs.tmp"
        with tarfile.open(aside, "w:gz") as archive:
            for path in sorted(self.machine.work.glob("*/hearth.*")):
                archive.add(path, str(path.relative_to(self.machine.work)))
            for path in sorted(self.machine.work.glob("*/state/**/*")):
                if path.is_file() and path.stat().st_size < 4 << 20:
                    archive.add(path, str(path.relative_to(self.machine.work)))
        aside.replace(self.out / "logs.tar.gz")

    def _write(self, name: str, content: bytes) -> None:
        aside = self.out / f"{name}.tmp"
        aside.write_bytes(content)
        aside.replace(self.out / name)

    def end(self) -> None:
        """Stop everything that was started."""
        for each in self.running:
            each.kill()
        self.gpu.stop()
        self.save()
        self.say(f"over; python {sys.version.split()[0]}")

    def drop(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
