"""Stacks of the engine's processes, taken with py-spy before a hanging engine is killed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil

SECONDS = 15.0
"""Seconds that all dumps together may take: recovery waits for them."""
PAUSED_SECONDS = 4.0
"""Seconds for a dump that pauses its process; then without: what is stuck in a driver can't pause."""
_AT_ONCE = 4
_CANT_PAUSE = (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP, psutil.STATUS_TRACING_STOP)
_NO_TOOL = "no stack: there is no py-spy on PATH or beside the engine's interpreter"
_ADVICE = "py-spy needs the right to trace: in a container, --cap-add SYS_PTRACE"


async def stacks_text(pids: Sequence[int], python: str, seconds: float = SECONDS) -> str:
    """For each process its state and its Python stacks, or why there are none; never fails.

    `python` is the engine's interpreter: its environment may have a py-spy.
    """
    if not pids:
        return "No process of the engine was left.\n"
    headings = [_heading(pid) for pid in pids]
    tool = find_tool(python)
    told = [_NO_TOOL] * len(pids) if tool is None else await _all(pids, tool, seconds)
    return "\n".join(f"{heading}\n{text}\n" for heading, text in zip(headings, told, strict=True))


async def _all(pids: Sequence[int], tool: str, seconds: float) -> list[str]:
    room = asyncio.Semaphore(_AT_ONCE)
    tasks = [asyncio.create_task(_stack(pid, tool, room)) for pid in pids]
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [_told(end, seconds) for end in ends]


def _told(end: str | BaseException, seconds: float) -> str:
    if isinstance(end, asyncio.CancelledError):
        return f"no stack: all of them together took longer than {seconds:g} s"
    return f"no stack: {end}" if isinstance(end, BaseException) else end


def find_tool(python: str) -> str | None:
    """py-spy on PATH, or in the environment of the engine's interpreter."""
    interpreter = shutil.which(python)
    beside = None if interpreter is None else shutil.which("py-spy", path=str(Path(interpreter).parent))
    return shutil.which("py-spy") or beside


async def _stack(pid: int, tool: str, room: asyncio.Semaphore) -> str:
    """A dump that pauses the process where that works: it can't catch a frame half built."""
    command = [tool, "dump", "--pid", str(pid)]
    async with room:
        if _status(pid) not in _CANT_PAUSE:
            done, text = await _dump(command, PAUSED_SECONDS)
            if done:
                return text
        done, text = await _dump([*command, "--nonblocking"], SECONDS)
        return text if done else f"no stack: {text}"


async def _dump(command: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Whether py-spy printed stacks, and those; otherwise its complaint."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, complaint = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        return False, f"py-spy gave no answer within {seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    text = out.decode("utf-8", "replace").rstrip()
    return (True, text) if "Thread " in text else (False, _why(complaint))


def _why(complaint: bytes) -> str:
    """py-spy's error without its own backtrace, in one line."""
    text = complaint.decode("utf-8", "replace").partition("Stack backtrace:")[0]
    line = " ".join(text.split()) or "py-spy said nothing"
    return f"{line} ({_ADVICE})" if "denied" in line.lower() or "not permitted" in line.lower() else line


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def _heading(pid: int) -> str:
    """Name, state and what the kernel says it waits for: told even where no stack can be had."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            title = f"{process.name()}, {process.status()}, {process.num_threads()} threads"
    except psutil.Error:
        return f"== process {pid}: gone"
    return f"== process {pid}: {title}{_waits_in(pid)}"


def _waits_in(pid: int) -> str:
    with contextlib.suppress(OSError):
        channel = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
        return "" if channel in ("", "0") else f", waits in {channel}"
    return ""
