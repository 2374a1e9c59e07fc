"""Spawn, watch and stop the engine's process tree.

The engine runs below a small reaper process (`reaper.py`), in its own session, never as PID 1. However the
engine or Hearth dies, no process of the engine stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hearth.engine import reaper
from hearth.errors import ConfigError, HearthError, MissingError, StateError
from hearth.session import session_members

METRICS_PREFIX = "metrics-"
START_SECONDS = 30.0
_SWEEP_SECONDS = 0.02


@dataclass(frozen=True)
class StopReport:
    """How a stop went: main's exit status (negative: that signal; None: still there), whether main ended by
    itself within the drain limit, whether Hearth had to kill, seconds in all, and pids that would not die."""

    exit_status: int | None
    drained: bool
    killed: bool
    seconds: float
    left: tuple[int, ...] = ()


def fresh_metrics_dir(runtime_dir: Path) -> Path:
    """A new, empty PROMETHEUS_MULTIPROC_DIR below `runtime_dir`; the ones of earlier spawns are removed.

    Stale files count dead processes' numbers twice and corrupt on a reused pid (client_python#1167, #654).
    Raises StateError where the directory can't be written.
    """
    try:
        runtime_dir.mkdir(parents=True, exist_ok=True)
        for old in runtime_dir.glob(f"{METRICS_PREFIX}*"):
            shutil.rmtree(old)
        return Path(tempfile.mkdtemp(prefix=METRICS_PREFIX, dir=runtime_dir))
    except OSError as error:
        raise StateError(
            f"{error.filename or runtime_dir}: {error.strerror}",
            "the runtime directory must be writable by the user that runs hearth",
        ) from error


class EngineProcess:
    """One run of the engine. Make it with `spawn`; it belongs to the running event loop."""

    def __init__(self, child: subprocess.Popen[bytes], control: int, status: int) -> None:
        self.pid = 0
        self._reaper = child
        self._control = control
        self._status = status
        self._loop = asyncio.get_running_loop()
        self._unread = b""
        self._problem = ""
        self._exit_status: int | None = None
        self._started = asyncio.Event()
        self._exited = asyncio.Event()
        self._gone = asyncio.Event()
        self._reported_gone = False
        self._reaper_end = os.pidfd_open(child.pid)
        os.set_blocking(status, False)
        self._loop.add_reader(status, self._read_status)
        self._loop.add_reader(self._reaper_end, self._reaper_ended)

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_sink: int,
        cwd: Path | None = None,
        runtime_dir: Path | None = None,
    ) -> EngineProcess:
        """Start `argv` with exactly `env`; stdout and stderr both go to the descriptor `log_sink`.

        `log_sink` (the write end of `logstream.log_pipe()`) is closed here in every case, so the log ends
        when the last process of the engine is gone. With `runtime_dir` the engine gets a fresh
        PROMETHEUS_MULTIPROC_DIR there. Raises MissingError for a program or directory that isn't there,
        ConfigError for one that can't be run.
        """
        try:
            if runtime_dir is not None:
                env = {**env, "PROMETHEUS_MULTIPROC_DIR": str(fresh_metrics_dir(runtime_dir))}
            process = _start_reaper(cls, argv, env, log_sink, cwd)
        finally:
            os.close(log_sink)
        try:
            await asyncio.wait_for(process._started.wait(), START_SECONDS)
        except BaseException as error:
            process._close_control()
            if isinstance(error, TimeoutError):
                raise HearthError(f"{argv[0]} did not start within {START_SECONDS:.0f} s") from error
            raise
        if not process.pid:
            raise _spawn_error(process._problem, argv[0], cwd)
        return process

    @property
    def exit_status(self) -> int | None:
        """Main's exit status (negative: that signal), None while it runs."""
        return self._exit_status

    async def wait_exit(self) -> int:
        """Wait until the main process is dead; its exit status, negative for a signal."""
        await self._exited.wait()
        assert self._exit_status is not None
        return self._exit_status

    async def wait_gone(self, timeout: float | None = None) -> bool:
        """Wait until no process of the engine is left; False after `timeout` seconds."""
        return await _within(self._gone, timeout)

    def terminate(self) -> None:
        """SIGTERM to the main process only: to the whole group it turns a clean drain into a crash."""
        self._tell(b"term\n")

    def kill(self) -> None:
        """SIGKILL to every process of the engine, again and again until none is left."""
        self._tell(b"kill\n")

    def descendants(self) -> list[int]:
        """Pids of the engine's living processes, main first."""
        if self._gone.is_set():
            return []
        try:
            found = psutil.Process(self._reaper.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return [process.pid for process in session_members(self.pid)]
        return [process.pid for process in found]

    async def stop(self, drain_seconds: float, kill_seconds: float) -> StopReport:
        """SIGTERM to main, wait for it to drain, SIGKILL what is left, wait until everything is gone."""
        begin = self._loop.time()
        was_running = not self._exited.is_set()
        self.terminate()
        drained = await _within(self._exited, drain_seconds)
        if not drained:
            self.kill()
        gone = await self.wait_gone(kill_seconds)
        return StopReport(
            exit_status=self._exit_status,
            drained=was_running and drained,
            killed=not drained,
            seconds=self._loop.time() - begin,
            left=() if gone else tuple(self.descendants()),
        )

    def _tell(self, word: bytes) -> None:
        if self._control >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control, word)

    def _close_control(self) -> None:
        """For the reaper this is the supervisor's death: it kills everything and ends."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _read_status(self) -> bool:
        """Take in what the reaper wrote; False at its end (or when there is nothing to read)."""
        try:
            data = os.read(self._status, 4096)
        except BlockingIOError:
            return False
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            self._heard(word, value)
        if not data:
            self._loop.remove_reader(self._status)
        return bool(data)

    def _heard(self, word: str, value: str) -> None:
        if word == "pid":
            self.pid = int(value)
            self._started.set()
        elif word == "error":
            self._problem = value
        elif word == "exit":
            self._exit_status = int(value)
            self._exited.set()
        elif word == "gone":
            self._reported_gone = True

    def _reaper_ended(self) -> None:
        self._loop.remove_reader(self._reaper_end)
        while self._read_status():
            pass
        self._loop.remove_reader(self._status)
        os.close(self._status)
        os.close(self._reaper_end)
        self._close_control()
        self._reaper.wait()
        self._started.set()
        if self.pid and not self._reported_gone:
            self._sweep()
        else:
            self._gone.set()

    def _sweep(self) -> None:
        """Somebody killed the reaper: main died with it (PDEATHSIG); kill the rest of its session."""
        rest = session_members(self.pid)
        for process in rest:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not self._exited.is_set() and all(process.pid != self.pid for process in rest):
            self._exit_status = -signal.SIGKILL
            self._exited.set()
        if rest:
            self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        else:
            self._gone.set()


def _start_reaper(
    cls: type[EngineProcess], argv: Sequence[str], env: Mapping[str, str], log_sink: int, cwd: Path | None
) -> EngineProcess:
    control_read, control = os.pipe()
    status, status_write = os.pipe()
    command = [sys.executable, "-I", "-S", reaper.__file__, str(control_read), str(status_write)]
    try:
        child = subprocess.Popen(
            [*command, str(cwd or ""), *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log_sink,
            stderr=log_sink,
            pass_fds=(control_read, status_write),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        os.close(control)
        os.close(status)
        raise ConfigError(f"{argv[0]}: its arguments or environment can't be passed on: {error}") from error
    finally:
        os.close(control_read)
        os.close(status_write)
    return cls(child, control, status)


def _spawn_error(problem: str, program: str, cwd: Path | None) -> HearthError:
    """From the reaper's `ERRNO cwd|exec` to an error that names the thing."""
    if not problem:
        return HearthError(f"{program} was not started: Hearth's reaper process died", "see the log above")
    number, step = problem.split()
    if step == "cwd":
        return ConfigError(f"working directory {cwd}: {os.strerror(int(number))}")
    if int(number) == errno.ENOENT and Path(program).is_file():
        return MissingError(f"{program}: the interpreter that its first line names isn't there")
    if int(number) in (errno.ENOENT, errno.ENOTDIR):
        return MissingError(
            f"{program}: no such program", "give its full path, or put it on the engine's PATH"
        )
    return ConfigError(
        f"{program} can't be run: {os.strerror(int(number))}", "it must be executable (chmod +x)"
    )


async def _within(event: asyncio.Event, seconds: float | None) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return event.is_set()
    return True
