"""The lock of a host: one deploy at a time, with who, when and why.

A file, made in one step by whoever comes first. It outlives a reboot of the host: a deploy reboots it itself,
and who changes a card powers it off. A lock whose holder is provably gone (a process of this machine that no
longer runs) is taken over, and that is said; any other lock is refused with what is known about it, and only
`hearth lock HOST --release` removes it.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from hearth.deploy.inventory import Target
from hearth.deploy.remote import run
from hearth.errors import ExitCode, HearthError, Unreachable

PATH = "/var/lib/hearth-deploy.lock"
_LONG = 6 * 3600.0
Say = Callable[[str], None]


class Locked(HearthError):
    """Somebody else works on this host."""

    code = ExitCode.RETRY


@dataclass(frozen=True)
class Holder:
    """Who holds a host. `machine` and `boot` identify the machine the holder runs on."""

    who: str
    why: str
    since: float
    """Unix seconds."""
    run: str = ""
    """Id of the run, for its record on that machine."""
    pid: int = 0
    started: float = 0.0
    """When that process started, Unix seconds: a process id is used again."""
    machine: str = ""
    boot: str = ""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"{self.who}, {age(time.time() - self.since)}: {self.why}"


def age(seconds: float) -> str:
    """`since 21:03 UTC (12 min)`, whole numbers of the fitting unit."""
    units = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((each for each in units if seconds >= each[0]), (1, "s"))
    at = time.strftime("%H:%M UTC", time.gmtime(time.time() - seconds))
    return f"since {at} ({max(0, int(seconds // size))} {unit})"


def myself(why: str, run_id: str) -> Holder:
    """This process as a holder."""
    return Holder(
        who=f"{getpass.getuser()}@{platform.node()}",
        why=why,
        since=time.time(),
        run=run_id,
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        machine=_read("/etc/machine-id"),
        boot=_read("/proc/sys/kernel/random/boot_id"),
    )


def by_hand(why: str) -> Holder:
    """This person as a holder, tied to no process: held until it is released."""
    me = myself(why, f"by-hand-{secrets.token_hex(4)}")
    return replace(me, pid=0, started=0.0)


def parse(text: str) -> Holder | None:
    """A lock file's holder; None where there is none. Unreadable text is a holder nobody knows."""
    if not text.strip():
        return None
    try:
        said = json.loads(text)
        return Holder(**{key: said[key] for key in Holder.__dataclass_fields__ if key in said})
    except (ValueError, TypeError, KeyError, RecursionError):
        return Holder(who="somebody", why=f"the lock file says {text.strip()[:80]!r}", since=time.time())


def gone(holder: Holder, me: Holder, running: Callable[[int], float | None]) -> str:
    """Why a holder can't be at work any more; empty where it may be (pure).

    `running` tells when a process of this machine started, None for one that isn't there.
    """
    if not holder.pid or not holder.machine or holder.machine != me.machine:
        return ""
    if holder.boot != me.boot:
        return "this machine was restarted since"
    started = running(holder.pid)
    if started is None or abs(started - holder.started) > 2:
        return f"its process {holder.pid} on this machine is gone"
    return ""


def refusal(target: Target, holder: Holder) -> Locked:
    """Why not now, and what to do."""
    old = time.time() - holder.since > _LONG
    fix = f"wait for it; if its run {holder.run or 'there'} is dead: hearth lock {target.name} --release"
    stale = ", longer than a deploy takes" if old else ""
    return Locked(f"{target.name} is held by {holder.sentence}{stale}", fix)


def look(target: Target) -> Holder | None:
    """Who holds the host now."""
    return parse(run(target, f"cat {PATH} 2>/dev/null || true", root=False).out)


def take(target: Target, me: Holder, say: Say) -> None:
    """Become the holder. Raises Locked, or what `remote.run` raises."""
    holder = _try(target, me)
    if holder is None:
        return
    reason = gone(holder, me, _started)
    if not reason:
        raise refusal(target, holder)
    say(f"{target.name}: the lock of {holder.sentence} is taken over: {reason}")
    release(target, holder)
    second = _try(target, me)
    if second is not None:
        raise refusal(target, second)


def release(target: Target, holder: Holder) -> bool:
    """Remove the lock if it is still this holder's; whether it was.

    One at a time: of two that saw the same dead holder, the slower must not remove the other's new lock.
    """
    mark = shlex.quote(json.dumps(holder.run))
    script = f"grep -qF {mark} {PATH} 2>/dev/null && rm -f {PATH} && echo removed"
    return "removed" in run(target, f"flock {Path(PATH).parent} sh -c {shlex.quote(script)}").out


def force(target: Target) -> Holder | None:
    """Remove the lock whoever holds it; who that was."""
    return parse(run(target, f"cat {PATH} 2>/dev/null; rm -f {PATH}").out)


@contextlib.contextmanager
def held(targets: list[Target], me: Holder, say: Say) -> Iterator[None]:
    """Hold every host, or none."""
    taken: list[Target] = []
    try:
        for target in targets:
            take(target, me, say)
            taken.append(target)
        yield
    finally:
        for target in taken:
            _let_go(target, me, say)


def _let_go(target: Target, me: Holder, say: Say) -> None:
    try:
        release(target, me)
    except HearthError as error:
        say(f"{target.name}: its lock stays: {error}")


def _try(target: Target, me: Holder) -> Holder | None:
    """Who holds it, None if that is us now. The link is made in one step, with the content in place."""
    text = shlex.quote(json.dumps(asdict(me)))
    aside = f"{PATH}.$$"
    script = (
        f"umask 022; printf %s {text} >{aside} || exit 1; "
        f"if ln {aside} {PATH} 2>/dev/null; then echo taken; else cat {PATH}; fi; rm -f {aside}"
    )
    said = run(target, script)
    if said.code != 0:
        raise Unreachable(
            f"{target.name}: its lock can't be made: {said.err.strip()[-200:]}",
            f"look at {Path(PATH).parent} there",
        )
    return None if said.out.startswith("taken") else parse(said.out)


def _started(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
