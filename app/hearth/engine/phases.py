"""Where an engine is in its life, from its log lines. Pure: lines and times in, phases out.

The wordings are data (`phases.yaml`) and hold for SGLang 0.5.6 to 0.5.23, on CPU and GPU; engines before
0.5.14 capture decode graphs first, later ones prefill graphs. Times are seconds of one clock that only goes
forward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import yaml

from hearth.failure import Phase

_DATA = Path(__file__).with_name("phases.yaml")
_LINE_MAX = 4096
_ORDER = {phase: place for place, phase in enumerate(Phase)}
# Engines before 0.5.14 capture decode first: neither capture is later than the other.
_ORDER[Phase.CAPTURE_DECODE] = _ORDER[Phase.CAPTURE_PREFILL]
_RANK = re.compile(r"\[[^\]]{10,40}?((?: (?:DP|PP|TP|EP|CP|MOE_?\w*)\d+)+)\]")
_TORCH_RANK = re.compile(r"\[rank(\d+)\]:")
_BAR = re.compile(
    r"(?P<what>[A-Za-z][\w \-]*?)\s*(?:\((?P<item>[\w=. ]*?)(?: avail_mem=[^)]*)?\))?:"
    r"\s+\d+%.*?(?P<done>\d+)/(?P<total>\d+) \["
)


class PhaseLimitLike(Protocol):
    """What a limit must have; the config's own model fits too."""

    @property
    def deadline(self) -> float | None: ...

    @property
    def silence(self) -> float | None: ...


@dataclass(frozen=True)
class PhaseLimit:
    """When a phase has hung: seconds in all, and seconds without a line or other progress. None: no limit."""

    deadline: float | None = None
    silence: float | None = None


@dataclass(frozen=True)
class Overdue:
    """A limit that was passed: the phase, `deadline` or `silence`, and the seconds that passed."""

    phase: Phase
    why: str
    seconds: float

    @property
    def sentence(self) -> str:
        """One line for a person."""
        what = "no line and no progress" if self.why == "silence" else "not finished"
        return f"{self.phase.value}: {what} for {self.seconds:.0f} s"


@dataclass(frozen=True)
class _Marker:
    """One row of phases.yaml."""

    phase: Phase
    edge: str
    then: Phase | None


@dataclass(frozen=True)
class _Table:
    markers: tuple[_Marker, ...]
    pattern: re.Pattern[str]
    starting: tuple[str, ...]
    serving: tuple[str, ...]


@cache
def _table() -> _Table:
    rows: list[dict[str, Any]] = yaml.safe_load(_DATA.read_text(encoding="utf-8"))
    # A marker stands at the start of a message: after the logger's prefix, also where that prefix is glued to
    # the end of a progress bar. Quoted text (a logged prompt) is never one.
    anchor = r"(?:^|[\]|:>]\s*)"
    pattern = anchor + "(?:" + "|".join(f"(?P<m{i}>{row['match']})" for i, row in enumerate(rows)) + ")"
    return _Table(
        tuple(_marker(row) for row in rows),
        re.compile(pattern),
        tuple(dict.fromkeys(row["has"] for row in rows)),
        tuple(dict.fromkeys(row["has"] for row in rows if row.get("serving"))),
    )


def _marker(row: dict[str, Any]) -> _Marker:
    then = Phase(row["then"]) if "then" in row else None
    return _Marker(Phase(row["phase"]), row.get("edge", "begin"), then)


def rank_of(line: str) -> str:
    """The rank tag of a log line, such as `TP3` or `DP0 TP1` (torch writes `[rank3]:`); else empty."""
    found = _RANK.search(line[:200])
    if found:
        return found.group(1).strip()
    own = _TORCH_RANK.match(line)
    return f"TP{own[1]}" if own else ""


class PhaseTracker:
    """Follows one engine. Feed every line to `observe`; ask `overdue` now and then."""

    def __init__(self, limits: Mapping[Phase, PhaseLimitLike], now: float) -> None:
        self._limits = limits
        self._table = _table()
        self._reset(now)
        self.run = 0
        """How many times a new engine started in these lines (0: only the first)."""

    def _reset(self, now: float) -> None:
        self.phase = Phase.SPAWN
        self.ready = False
        self.seconds_done: dict[Phase, float] = {}
        self._since = self._seen = self._progress = now
        self._wanted = self._table.starting
        self._bar = ""
        self._times: dict[tuple[str, Phase], int] = {}
        self._rounds: dict[Phase, int] = {}
        self._open: dict[Phase, set[str]] = {}

    def observe(self, line: str, now: float) -> Phase | None:
        """Take one line (no terminator). Returns the new phase where it changed.

        Called for every line an engine writes: a line that is no marker costs a few substring searches.
        """
        self._seen = self._progress = now
        if len(line) > _LINE_MAX:
            line = line[:_LINE_MAX]
        for text in self._wanted:
            if text in line:
                return self._marked(line, now)
        if not self.ready and "%" in line:
            self._bar = line
        return None

    def progress(self, now: float) -> None:
        """An outside sign of progress (bytes read, CPU time of a compiler): the silence starts anew."""
        self._progress = now

    def overdue(self, now: float) -> Overdue | None:
        """The limit of the present phase that has passed, if any; the deadline is looked at first."""
        limit = self._limits.get(self.phase)
        if limit is None:
            return None
        whole, quiet = now - self._since, now - self._progress
        if limit.deadline is not None and whole > limit.deadline:
            return Overdue(self.phase, "deadline", whole)
        if limit.silence is not None and quiet > limit.silence:
            return Overdue(self.phase, "silence", quiet)
        return None

    @property
    def seconds(self) -> dict[Phase, float]:
        """Seconds spent in each phase so far; the present one up to the last line seen."""
        spent = dict(self.seconds_done)
        spent[self.phase] = spent.get(self.phase, 0.0) + self._seen - self._since
        return spent

    @property
    def progress_text(self) -> str:
        """What this phase's last progress bar said, e.g. `Capturing batches 3/12 (bs=48)`; else empty."""
        found = _BAR.search(self._bar)
        if not found:
            return ""
        item = f" ({found['item']})" if found["item"] else ""
        return f"{found['what'].strip()} {found['done']}/{found['total']}{item}"

    def _marked(self, line: str, now: float) -> Phase | None:
        found = self._table.pattern.search(line)
        if found is None or found.lastgroup is None:
            return None
        marker = self._table.markers[int(found.lastgroup[1:])]
        before = self.phase
        if self._is_new_run(marker):
            self._reset(now)
            self.run += 1
        rank = rank_of(line[: found.end()])
        if marker.edge == "end":
            self._end(marker, rank, now)
        elif marker.edge == "begin":
            self._begin(marker.phase, rank, now)
        if marker.phase is Phase.SERVING:
            self.ready = True
            self._wanted = self._table.serving
        return self.phase if self.phase is not before else None

    def _is_new_run(self, marker: _Marker) -> bool:
        """Whether this line can only come from another engine than the one followed so far."""
        if marker.edge == "run":
            return self.phase not in (Phase.SPAWN, Phase.INIT)
        return marker.phase is Phase.INIT and _ORDER[self.phase] > _ORDER[Phase.INIT]

    def _begin(self, phase: Phase, rank: str, now: float) -> None:
        """A rank enters a phase. Ranks late for a phase that others have left don't bring it back."""
        self._open.setdefault(phase, set()).add(rank)
        times = self._times[rank, phase] = self._times.get((rank, phase), 0) + 1
        again = times > self._rounds.get(phase, 0)
        self._rounds[phase] = max(times, self._rounds.get(phase, 0))
        first = times == 1
        if again and (not first or _ORDER[phase] >= _ORDER[self.phase]):
            self._enter(phase, now)

    def _end(self, marker: _Marker, rank: str, now: float) -> None:
        still = self._open.get(marker.phase, set())
        still.discard(rank)
        if marker.then is None or still:
            return
        if self.phase is marker.phase or _ORDER[self.phase] < _ORDER[marker.phase]:
            self._enter(marker.then, now)

    def _enter(self, phase: Phase, now: float) -> None:
        if phase is self.phase:
            return
        self.seconds_done[self.phase] = self.seconds_done.get(self.phase, 0.0) + now - self._since
        self.phase, self._since, self._bar = phase, now, ""
