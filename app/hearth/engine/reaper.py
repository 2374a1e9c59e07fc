"""Stands between the supervisor and the engine, and leaves no process behind.

Run as `python -I -S reaper.py CONTROL_FD STATUS_FD CWD ARGV...`, in a session of its own. It imports nothing
of Hearth, so that it starts in milliseconds and can't fail with it.

CONTROL_FD (read): `term` sends SIGTERM to the engine's main process only; `kill` sends SIGKILL to every
descendant. End of file means that the supervisor is dead, however it died: everything is killed at once.

STATUS_FD (write): `pid N` once the engine runs, or `error ERRNO cwd|exec`; `exit RC` when the main process is
dead (negative: by that signal), after which leftovers are killed; `gone` when no descendant is left.

A child subreaper (prctl(2)) inherits every orphan below it, also those that left the session or forked twice.
So "no child left to wait for" is exactly "no descendant left".
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

# pathlib and contextlib would add a third to the start-up time.
# ruff: noqa: PTH123, PTH208, SIM105

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Python's resource tracker ends by itself once its users are dead, and unlinks the shared memory that they
# left in /dev/shm. It gets this long (seconds) before it is killed with the rest.
TRACKER_GRACE = 0.3
TRACKER = b"multiprocessing.resource_tracker"
RESTORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGXFSZ", "SIGCHLD")


class Reaper:
    """The engine's main process and everything that descends from it."""

    def __init__(self, control: int, status: int, main: int, wake: int) -> None:
        self.control = control
        self.status = status
        self.main = main
        self.wake = wake
        self.main_dead = False
        self.killing_since: float | None = None
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.poll.register(wake, select.POLLIN)

    def run(self) -> None:
        """Reap, obey, kill; returns when no descendant is left."""
        while self.reap():
            if self.killing_since is not None:
                self.kill_round()
            for fd, _ in self.poll.poll(self.pause()):
                self.read_control() if fd == self.control else os.read(self.wake, 4096)
        say(self.status, "gone")

    def reap(self) -> bool:
        """Collect the dead. False when there is no child, living or dead, any more."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.main:
                    self.main_dead = True
                    say(self.status, f"exit {os.waitstatus_to_exitcode(status)}")
                    self.start_killing()
        except ChildProcessError:
            return False

    def read_control(self) -> None:
        words = os.read(self.control, 4096)
        if not words:
            self.poll.unregister(self.control)
        if not words or b"kill" in words:
            self.start_killing()
        elif b"term" in words and not self.main_dead:
            os.kill(self.main, signal.SIGTERM)

    def start_killing(self) -> None:
        if self.killing_since is None:
            self.killing_since = time.monotonic()

    def pause(self) -> int | None:
        """Milliseconds until the next round: soon at first, seldom for what hangs in the kernel."""
        if self.killing_since is None:
            return None
        return 10 if time.monotonic() - self.killing_since < 1 else 100

    def kill_round(self) -> None:
        """SIGKILL every descendant; then whole groups, so that nothing outruns the list by forking."""
        spare = time.monotonic() - (self.killing_since or 0.0) < TRACKER_GRACE
        for pid, group in descendants(os.getpid()):
            if spare and is_tracker(pid):
                continue
            kill(os.kill, pid)
            if not spare:
                kill(os.killpg, group)


def kill(how: Callable[[int, int], None], target: int) -> None:
    try:
        how(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def say(status: int, line: str) -> None:
    """Tell the supervisor; a dead one isn't told."""
    try:
        os.write(status, line.encode() + b"\n")
    except OSError:
        pass


def descendants(root: int) -> list[tuple[int, int]]:
    """(pid, process group) of every descendant of `root`, from one pass over /proc."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name in parentheses may hold anything; what follows the last one is well-formed.
                _, parent, group = file.read().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        children.setdefault(int(parent), []).append((int(name), int(group)))
    found = list(children.get(root, ()))
    for pid, _ in found:
        found += children.get(pid, ())
    return found


def is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return TRACKER in file.read(4096)
    except OSError:
        return False


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def spawn(command: list[str], cwd: str) -> tuple[int, bytes]:
    """Start the engine. Returns its pid and, where it could not be started, `ERRNO cwd|exec`."""
    read, write = os.pipe()
    reaper = os.getpid()
    pid = os.fork()
    if pid == 0:
        become(command, cwd, write, reaper)
    os.close(write)
    with open(read, "rb") as file:
        return pid, file.read()


def become(command: list[str], cwd: str, problem: int, reaper: int) -> None:
    """In the child: own session, killed with the reaper, default signals, then the engine. Never returns."""
    step = "exec"
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(1)
        for name in RESTORED:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if cwd:
            step = "cwd"
            os.chdir(cwd)
            step = "exec"
        os.execvp(command[0], command)
    except OSError as error:
        os.write(problem, f"{error.errno} {step}".encode())
    finally:
        os._exit(127)


def wake_on_child() -> int:
    """A descriptor that becomes readable when a child dies."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


def main(arguments: list[str]) -> None:
    control, status = int(arguments[0]), int(arguments[1])
    os.set_inheritable(control, False)
    os.set_inheritable(status, False)
    # When to stop is the supervisor's to decide; its death shows as the end of the control pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake = wake_on_child()
    pid, problem = spawn(arguments[3:], arguments[2])
    if problem:
        say(status, f"error {problem.decode()}")
        return
    say(status, f"pid {pid}")
    Reaper(control, status, pid, wake).run()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # at once: there is nothing to finalise
