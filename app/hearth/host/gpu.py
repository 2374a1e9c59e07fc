"""GPU memory, names and driver, through NVML; nothing at all where there is no NVML.

After a kill the memory of the dead can stay taken for seconds; a successor that starts meanwhile fails for
want of memory, and its graph plan would be blamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import psutil
import pynvml

T = TypeVar("T")
_POLL_SECONDS = 0.25


class Gpus:
    """The GPUs that this process can see, in NVML's order (PCI bus); none where the driver isn't there."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._ready = False
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._ready = True
            for index in range(pynvml.nvmlDeviceGetCount()):
                # One card that fell off the bus must not hide the others.
                with contextlib.suppress(pynvml.NVMLError):
                    self._handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))

    def close(self) -> None:
        """Let go of NVML; afterwards there are no GPUs here."""
        if self._ready:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        self._handles, self._ready = [], False

    @property
    def count(self) -> int:
        return len(self._handles)

    def driver(self) -> str | None:
        """The driver's version, e.g. `580.95.05`."""
        if not self._ready:
            return None
        return _ask(lambda _: _text(pynvml.nvmlSystemGetDriverVersion()), None, None)

    def addresses(self) -> list[str]:
        """PCI address of each GPU, e.g. `00000000:C1:00.0`; empty text where it doesn't say."""
        return [_ask(_address, handle, "") for handle in self._handles]

    def names(self) -> list[str]:
        """What each GPU calls itself."""
        return [_ask(_name, handle, "unknown") for handle in self._handles]

    def used_bytes(self) -> list[int]:
        """Memory in use on each GPU, without what the driver itself holds; 0 where a GPU doesn't say."""
        return [_ask(_used, handle, 0) for handle in self._handles]

    def foreign_processes(self, ours: Collection[int] = ()) -> list[tuple[int, int, str, int]]:
        """(GPU index, pid, command, bytes) of compute processes whose pid isn't in `ours`.

        In a container other containers' processes don't show, or show with pids of the host.
        """
        return [
            (index, process.pid, _command(process.pid), process.usedGpuMemory or 0)
            for index, process in self._processes()
            if process.pid not in ours
        ]

    def held(self, at_least: int) -> list[str]:
        """One sentence for each GPU of which `at_least` bytes are in use: how much, and by which processes.

        Ask before the engine starts: what is in use then, it will lack. Processes of other containers
        can't be seen and are said to be so.
        """
        holders = self.foreign_processes()
        sentences = []
        for index, used in enumerate(self.used_bytes()):
            if used >= at_least:
                seen = [f"pid {pid} ({command or 'unknown'})" for i, pid, command, _ in holders if i == index]
                by = ", ".join(seen) or "processes that can't be seen from here"
                sentences.append(f"GPU {index}: {used / 2**30:.1f} GiB are in use already, by {by}")
        return sentences

    async def wait_memory_below(
        self, baseline: Sequence[int], slack_bytes: int, timeout: float = 120.0
    ) -> bool:
        """Wait until no GPU uses more than its `baseline` plus the slack; False after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not _fits(await _in_thread(self.used_bytes), baseline, slack_bytes):
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            return False
        return True

    def _processes(self) -> Iterator[tuple[int, Any]]:
        for index, handle in enumerate(self._handles):
            processes: list[Any] = _ask(_running, handle, [])
            yield from ((index, process) for process in processes)


def _fits(used: Sequence[int], baseline: Sequence[int], slack: int) -> bool:
    return all(now <= before + slack for now, before in zip(used, baseline, strict=False))


async def _in_thread(question: Callable[[], T]) -> T:
    """NVML can hang on a sick GPU: a daemon thread then neither holds up the loop nor the program's end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T) -> None:
        if not answer.done():
            answer.set_result(value)

    def ask() -> None:
        value = question()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, value)

    threading.Thread(target=ask, name="nvml", daemon=True).start()
    return await answer


def _ask(question: Callable[[Any], T], handle: Any, otherwise: T) -> T:
    try:
        return question(handle)
    except pynvml.NVMLError:
        return otherwise


def _name(handle: Any) -> str:
    return _text(pynvml.nvmlDeviceGetName(handle))


def _address(handle: Any) -> str:
    return _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)


def _running(handle: Any) -> list[Any]:
    return list(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _used(handle: Any) -> int:
    """Version 2 keeps the driver's own reservation apart; old drivers only know version 1."""
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except pynvml.NVMLError_FunctionNotFound:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _command(pid: int) -> str:
    """The command up to its first option (those may hold secrets); empty where it isn't seen."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return ""
    shown = shlex.join(takewhile(lambda word: not word.startswith("--"), words))
    return " ".join(shown.split())[:200]
