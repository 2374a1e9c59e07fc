"""What the launcher says to systemd, and how it ends: decided from what was seen. Pure: no I/O, no clock.

Times are seconds of one clock that only goes forward.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hearth.config import Limits
from hearth.errors import ExitCode
from hearth.failure import Phase
from hearth.host.notify import READY, WATCHDOG, extend, status
from hearth.states import State

BOOT_GRACE = 90.0
"""Seconds that a new container gets until its supervisor answers for the first time."""
MARGIN = 120.0
"""Seconds beyond the supervisor's own limits after which it no longer counts as advancing."""
EXTENSION = 60.0
"""Seconds that each sign of progress buys while starting."""
RECREATE_COUNT, RECREATE_WINDOW = 3, 3600.0
"""New containers within so many seconds, before a person has to look."""
_STARTING = (State.IDLE, State.STARTING)
_FINAL = (State.GAVE_UP, State.HOST_ACTION_REQUIRED)


@dataclass(frozen=True)
class Look:
    """What the supervisor's port said just now."""

    alive: bool = False
    """/livez is 200: its loop turns."""
    ready: bool = False
    """/readyz is 200: the engine answers right."""
    document: Mapping[str, Any] | None = None
    """/status, where it could be read."""


@dataclass(frozen=True)
class Gone:
    """How a container ended. `code` is None when it is not there any more at all."""

    code: int | None
    oom: bool = False
    """Docker saw the kernel kill one of its processes for memory."""


@dataclass(frozen=True)
class End:
    """What that means: the launcher's exit code, one sentence, and whether a new container is to be made."""

    code: ExitCode
    sentence: str
    recreate: bool = False


class Progress:
    """Whether a start is still advancing, by the supervisor's own limits."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._mark: tuple[Any, ...] = ()
        self._since = now

    def seen(self, document: Mapping[str, Any] | None, now: float) -> bool:
        """Take a status in; whether the supervisor may still be given time."""
        if document is None:
            return False
        mark = tuple(document.get(key) for key in ("state", "phase", "progress", "restarts"))
        if mark != self._mark:
            self._mark, self._since = mark, now
        return now - self._since <= allowance(self._limits, document)


class Watch:
    """What to tell systemd about one container, tick by tick."""

    def __init__(self, limits: Limits, now: float, ready_sent: bool = False) -> None:
        self._progress = Progress(limits, now)
        self._begun = now
        self._answered = False
        self._said = ""
        self.ready_sent = ready_sent

    def tick(self, look: Look, now: float) -> list[str]:
        """The messages for what was just seen."""
        self._answered = self._answered or look.alive
        messages = []
        if look.alive or self._booting(now):
            messages.append(WATCHDOG)
        if look.ready and not self.ready_sent:
            self.ready_sent = True
            messages.append(READY)
        # Asked every time, so that a status is taken in even where no time is needed any more.
        if self._progress.seen(look.document, now) and look.alive and not self.ready_sent:
            messages.append(extend(EXTENSION))
        return messages + self._status(sentence(look))

    def _booting(self, now: float) -> bool:
        return not self._answered and now - self._begun <= BOOT_GRACE

    def _status(self, said: str) -> list[str]:
        if not said or said == self._said:
            return []
        self._said = said
        return [status(said)]


class Recreations:
    """How often a new container may be made."""

    def __init__(self) -> None:
        self._made: list[float] = []

    def allow(self, now: float) -> bool:
        """Count one more; whether it stays within the limit."""
        self._made = [at for at in self._made if now - at < RECREATE_WINDOW]
        self._made.append(now)
        return len(self._made) <= RECREATE_COUNT

    @property
    def count(self) -> int:
        """New containers in the window."""
        return len(self._made)


def allowance(limits: Limits, document: Mapping[str, Any]) -> float:
    """Seconds that the supervisor may stay as it is: its own limit and a margin. Endless without one."""
    try:
        state, phase = State(str(document.get("state"))), Phase(str(document.get("phase")))
    except ValueError:
        return MARGIN
    if state is State.BACKOFF:
        return limits.backoff_max * 1.2 + MARGIN
    if state in _STARTING:
        own = limits.phase(phase)
        return float("inf") if own.deadline is None else own.deadline + MARGIN
    return limits.kill + limits.memory_free + limits.drain + MARGIN


def sentence(look: Look) -> str:
    """The supervisor's sentence, with phase and progress while it starts; empty when nothing is known."""
    document = look.document
    if document is None:
        return ""
    said = str(document.get("sentence") or "")
    if document.get("state") not in [state.value for state in _STARTING]:
        return said
    progress = str(document.get("progress") or "")
    return f"{said} Phase {document.get('phase')}{': ' + progress if progress else ''}."


def told(end: End, last: Mapping[str, Any] | None) -> End:
    """The end with the supervisor's own last sentence, which names the cause, where it left one."""
    said = " ".join(str((last or {}).get("sentence") or "").split())
    if not said or (last or {}).get("state") not in _FINAL:
        return end
    return replace(end, sentence=f"{said} {end.sentence}")


def ending(gone: Gone, asked: bool) -> End:
    """What the end of a container means. `asked`: the launcher had been told to stop it."""
    if asked and gone.code in (None, 0, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
        how = "Stopped as asked." if gone.code == 0 else "Stopped as asked; it had to be killed."
        return End(ExitCode.OK, how)
    if gone.code is None:
        return End(ExitCode.RECREATE, "The container is gone: somebody removed it.", recreate=True)
    if gone.oom and gone.code == 128 + signal.SIGKILL:
        why = "The container was killed for lack of memory: see the kernel's log, and container.memory"
        return End(ExitCode.RETRY, f"{why} of the release.")
    return _by_code(gone.code)


def _by_code(code: int) -> End:
    known = {each.value: each for each in ExitCode}.get(code)
    if known is ExitCode.RECREATE:
        return End(known, "The container lost its GPUs.", recreate=True)
    if known is ExitCode.OK or code == 128 + signal.SIGTERM:
        return End(
            ExitCode.RETRY,
            "The container was stopped from outside Hearth (docker stop, or Docker itself stopped); "
            "to stop it for good: systemctl stop hearth.",
        )
    if known is not None:
        return End(known, f"The container ended with exit code {code}: {known.meaning}.")
    return _unknown(code)


def _unknown(code: int) -> End:
    if code == 128 + signal.SIGKILL:
        why = "The container was killed from outside Hearth (docker kill, or the kernel for lack of memory)."
        return End(ExitCode.RETRY, why)
    if code in (125, 126, 127):
        why = f"The container couldn't start its command (exit code {code}): the image is damaged."
        return End(ExitCode.MISSING, why)
    if code > 128 and code - 128 in {each.value for each in signal.Signals}:
        return End(ExitCode.BUG, f"The supervisor died of {signal.Signals(code - 128).name}.")
    return End(ExitCode.BUG, f"The container ended with exit code {code}, which Hearth doesn't use.")
