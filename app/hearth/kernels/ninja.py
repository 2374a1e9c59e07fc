"""Runs one ninja build: its progress, its first error, and an end that leaves no compiler behind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hearth.errors import ExitCode, HearthError
from hearth.session import session_members

_STATUS = re.compile(r"^\[(\d+)/(\d+)\] ")
_ERROR = re.compile(
    r"(fatal error|error\s*:|error:|undefined reference|cannot find -l|: not found|No space left on device"
    r"|\bfatal\s*:)",
    re.IGNORECASE,
)
_KILLED = re.compile(
    r"signal 9|signal: ?9|\bKilled\b|code=137|Killed signal|Cannot allocate memory", re.IGNORECASE
)
_DISK = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_KEPT_LINES = 400
_LINE_LIMIT = 1 << 22


class BuildFailed(HearthError):
    """A compiler refused a source, or was killed."""

    code = ExitCode.CHECK_FAILED


class BuildOutOfMemory(BuildFailed):
    """The kernel killed a compiler for memory."""


class BuildDiskFull(BuildFailed):
    """The build had no room to write."""

    code = ExitCode.DISK


@dataclass(frozen=True)
class Progress:
    """Where a module's build is.

    `total` is None until ninja says it; `elapsed` in seconds; `end` once it's over.
    """

    module: str
    done: int
    total: int | None
    elapsed: float
    eta: float | None
    end: bool = False


@dataclass
class Stream:
    """What ninja's lines say so far: counts, and the lines of what failed."""

    done: int = 0
    total: int | None = None
    failing: bool = False
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def feed(self, line: str) -> bool:
        """Take one line; whether it moved the counts."""
        status = _STATUS.match(line)
        if status:
            self.done, self.total, self.failing = int(status[1]), int(status[2]), False
            return True
        if line.startswith("FAILED:"):
            self.failing = True
        if self.failing or line.startswith("ninja:"):
            self.lines.append(line)
        return False


def failure(
    module: str, returncode: int, lines: list[str], *, jobs: int, gib: float, oom_kills: int
) -> BuildFailed:
    """One error out of a failed build: killed for memory, disk full, or the compiler's first error line."""
    text = [line for line in lines if not line.startswith(("FAILED:", "ninja:"))]
    seen = [line for line in lines if _KILLED.search(line)]
    if oom_kills > 0 or returncode == -signal.SIGKILL or seen:
        said = f": {seen[0].strip()[:200]}" if seen else ""
        fix = (
            f"use --jobs {max(1, jobs // 2)} or a machine with more memory; it needs about {gib:g} GiB a job"
        )
        return BuildOutOfMemory(f"{module}: a compiler was killed, most likely for memory{said}", fix)
    if any(_DISK.search(line) for line in lines):
        return BuildDiskFull(
            f"{module}: no space left while compiling", "free some and run the same command again"
        )
    first = next((line for line in text if _ERROR.search(line)), "") or next(
        (line for line in lines if line.startswith("ninja: error")), f"ninja ended with {returncode}"
    )
    return BuildFailed(
        f"{module}: {first.strip()[:400]}", "the whole output is in build.log beside build.ninja"
    )


async def run(
    ninja: Path,
    build_dir: Path,
    jobs: int,
    env: Mapping[str, str],
    report: Callable[[int, int | None], None],
) -> tuple[int, list[str]]:
    """Build `build_dir` with `jobs` jobs. Returns ninja's exit code and the lines of what failed.

    `report(done, total)` is called whenever the counts move. Whatever ends this coroutine, cancelling it
    too, no process of the build is left. The whole output goes to `build_dir/build.log`.
    """
    process = await asyncio.create_subprocess_exec(
        str(ninja),
        "-C",
        str(build_dir),
        f"-j{jobs}",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**env, "NINJA_STATUS": "[%f/%t] ", "TERM": "dumb"},
        start_new_session=True,
        limit=_LINE_LIMIT,
    )
    stream = Stream()
    try:
        await _follow(process, stream, build_dir / "build.log", report)
        return await process.wait(), list(stream.lines)
    finally:
        await asyncio.shield(_end_session(process))


async def _follow(
    process: asyncio.subprocess.Process,
    stream: Stream,
    log_path: Path,
    report: Callable[[int, int | None], None],
) -> None:
    assert process.stdout is not None
    with log_path.open("w", encoding="utf-8", errors="replace") as log:
        async for raw in process.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            log.write(line + "\n")
            if stream.feed(line):
                report(stream.done, stream.total)


async def _end_session(process: asyncio.subprocess.Process) -> None:
    """End ninja and every process of its session.

    ninja puts each compiler in a process group of its own, so a signal to ninja's group alone would miss
    them; the session is what they share, also after ninja is gone.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 3)
    deadline = time.monotonic() + 10
    while (left := session_members(process.pid)) and time.monotonic() < deadline:
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        await asyncio.sleep(0.05)
    if process.returncode is None:
        await process.wait()
