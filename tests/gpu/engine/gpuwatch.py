"""Samples the GPUs' memory ten times a second, for the time from a kill to memory that is free again."""

from __future__ import annotations

import threading
import time
from typing import Any

from hearth.host.gpu import Gpus

MIB = 1 << 20


class GpuWatch:
    """Samples in a thread of its own: (Unix seconds, MiB in use by GPU, MiB by pid)."""

    def __init__(self) -> None:
        self._gpus = Gpus()
        self.samples: list[tuple[float, list[int], dict[int, int]]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._end.wait(0.1):
            used = [number // MIB for number in self._gpus.used_bytes()]
            pids: dict[int, int] = {}
            for _, pid, _, size in self._gpus.foreign_processes():
                pids[pid] = pids.get(pid, 0) + size // MIB
            self.samples.append((round(time.time(), 2), used, pids))

    def gone_after(self, pid: int, since: float) -> float | None:
        """Seconds from `since` (Unix) until no GPU knows the pid any more."""
        later = [sample for sample in self.samples if sample[0] >= since]
        return next((round(at - since, 2) for at, _, pids in later if pid not in pids), None)

    def used_now(self) -> list[int]:
        """MiB in use on each GPU, by the last sample."""
        return self.samples[-1][1] if self.samples else []

    def to_json(self) -> list[Any]:
        """The samples that differ from the one before."""
        kept: list[Any] = []
        for sample in self.samples:
            if not kept or kept[-1][1:] != list(sample[1:]):
                kept.append(list(sample))
        return kept
