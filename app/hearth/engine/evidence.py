"""Reads a whole log once: what it says, where in the engine's life, by which rank. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hearth.engine.loglines import plain_lines
from hearth.engine.phases import PhaseTracker, rank_of
from hearth.engine.signatures import Signature, Table, Tier, shorten, table
from hearth.failure import Axis, FailureKind, Phase

_STAMP = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] |\[rank\d+\]:")
_GOES_ON = re.compile(r"\d+%|it/s|s/it|Uvicorn running")
_FRAME = re.compile(r'\s+File "')
_BATCH = re.compile(r"(Prefill|Decode) batch.*?cuda graph: (True|False)", re.IGNORECASE)
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Unsupported|Interrupt|SystemExit|Timeout|Failure)\b(?!\w)(?::|$)"
)
_OPENERS = ("Traceback (most recent call last)", "hit an exception", "failed", "Fail ", "error")
_STORY_MAX = 600
_ORDER = {phase: place for place, phase in enumerate(Phase)}
_NOTICES = (FailureKind.UNKNOWN, FailureKind.ENGINE_KILLED)
_PROGRESS = frozenset(Phase) - {Phase.SPAWN, Phase.INIT, Phase.LOAD, Phase.DRAIN}


@dataclass(frozen=True)
class Match:
    """A row of the table found at a line."""

    index: int
    signature: Signature
    phase: Phase
    rank: str


@dataclass
class Run:
    """One engine's life in a log."""

    lines: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    moves: list[tuple[int, Phase]] = field(default_factory=list)
    """Every change of phase: (line index, new phase)."""
    batches: list[tuple[int, Axis, bool]] = field(default_factory=list)
    """Prefill and decode batch lines: (line index, axis, ran a graph)."""
    phase: Phase = Phase.SPAWN
    ready: bool = False

    @property
    def drained(self) -> int | None:
        """Where the engine was asked to stop."""
        return next((index for index, phase in self.moves if phase is Phase.DRAIN), None)

    def visited(self, phase: Phase) -> bool:
        """Whether the log shows the engine in that phase."""
        return any(move is phase for _, move in self.moves)

    def exception_at(self, index: int) -> bool:
        """Whether that line is the last line of a traceback: the exception itself."""
        return bool(_EXCEPTION.match(self.lines[index]))

    def story(self, index: int) -> range:
        """The lines that belong to the message around a line: a header, chained tracebacks, their exceptions.

        Lines of other ranks in between don't end it; the same rank's next ordinary message does.
        """
        rank = self.ranks[index]
        first = index
        while first > 0 and index - first < _STORY_MAX and not self._starts(first, rank):
            first -= 1
        last = index + 1
        while last < len(self.lines) and last - index < _STORY_MAX and not self._ends(last, rank):
            last += 1
        return range(first, last)

    def _starts(self, index: int, rank: str) -> bool:
        """Whether a line begins a message of this rank that isn't the continuation of an error."""
        line = self.lines[index]
        if self.ranks[index] != rank or not _STAMP.match(line):
            return line.startswith("Traceback (most") and not self._chained(index)
        return True

    def _chained(self, index: int) -> bool:
        """Whether a traceback is the next link of an exception chain."""
        before = " ".join(self.lines[max(0, index - 3) : index])
        return "another exception occurred:" in before or "direct cause of" in before

    def _ends(self, index: int, rank: str) -> bool:
        line = self.lines[index]
        if not _STAMP.match(line) or self.ranks[index] != rank:
            return False
        return "hit an exception" not in line and "Traceback" not in line

    def text(self, index: int) -> str:
        """The message around a line, this rank's lines only."""
        rank = self.ranks[index]
        return "\n".join(self.lines[i] for i in self.story(index) if self.ranks[i] == rank)

    @property
    def ends_in_exception(self) -> bool:
        """Whether an exception is the last thing that the log tells: its process said nothing after it."""
        told = (i for i in reversed(range(len(self.lines))) if self.lines[i].strip())
        for index in told:
            if self.exception_at(index):
                return True
            if _STAMP.match(self.lines[index]) or _GOES_ON.search(self.lines[index]):
                return False
        return False

    def fatal(self, index: int) -> bool:
        """Whether the line belongs to an exception that ended a process."""
        return any("hit an exception" in self.lines[i] for i in self.story(index))


def read(lines: Sequence[str], phase: Phase | None = None, rows: Table | None = None) -> list[Run]:
    """The engines' lives in a log, oldest first (a container's log holds one for every restart).

    `phase` is where the caller knows the engine to be, for a log that lacks the start.
    """
    tracker = PhaseTracker({}, 0.0)
    runs, phases = [Run()], [list[Phase]()]
    ranks = _Ranks()
    for line in plain_lines(lines):
        moved = tracker.observe(line, 0.0)
        if tracker.run >= len(runs):
            runs.append(Run())
            phases.append([])
        run = runs[-1]
        if moved is not None:
            run.moves.append((len(run.lines), moved))
        run.lines.append(line)
        run.ranks.append(ranks.of(line))
        run.phase, run.ready = tracker.phase, tracker.ready
        phases[-1].append(phase or tracker.phase)
    for run, where in zip(runs, phases, strict=True):
        _match(run, where, rows or table())
    return runs


class _Ranks:
    """Which rank each line belongs to; lines without a tag belong to the message before them."""

    def __init__(self) -> None:
        self._current = ""
        self._open = False

    def of(self, line: str) -> str:
        """The rank of the next line. One line of another rank doesn't take an open traceback over."""
        if not _STAMP.match(line):
            return self._current
        rank = rank_of(line)
        if line.startswith("[rank"):
            return rank  # torch's own one-line messages
        opener = any(word in line for word in _OPENERS)
        if not self._open or rank == self._current or opener:
            self._current, self._open = rank, opener
        return rank


def _match(run: Run, phases: Sequence[Phase], rows: Table) -> None:
    """Fill in what the table and the batch lines say."""
    short = [shorten(line) for line in run.lines]
    for index in rows.candidates(short):
        if not _is_source(run.lines, index):
            found = rows.match(short[index], phases[index])
            run.matches.extend(Match(index, row, phases[index], run.ranks[index]) for row in found)
    for index, line in enumerate(short):
        batch = _BATCH.search(line) if "batch, #" in line else None
        if batch:
            axis = Axis.PREFILL if batch[1].lower() == "prefill" else Axis.DECODE
            run.batches.append((index, axis, batch[2] == "True"))


def _is_source(lines: Sequence[str], index: int) -> bool:
    """Whether a line is a frame of a traceback or the program text below one: words in there mean nothing."""
    line = lines[index]
    return bool(_FRAME.match(line)) or (
        line.startswith("  ") and index > 0 and bool(_FRAME.match(lines[index - 1]))
    )


def survived(run: Run, match: Match) -> bool:
    """Whether the engine went on after this line: then it was a warning, whatever it says."""
    if match.signature.sticky or (match.signature.tier is Tier.VERDICT and not run.ready):
        return False
    later = [phase for index, phase in run.moves if index > match.index and phase in _PROGRESS]
    on = any(_ORDER[phase] > _ORDER[match.phase] for phase in later)
    return on and not run.fatal(match.index)


def evidence(run: Run, chosen: int, limit: int = 6) -> tuple[str, ...]:
    """The chosen line first, then the other telling lines of its message, then the death notice."""
    picked = [chosen]
    if run.matches:
        told = _telling(run, chosen)
        picked += [*_user_frame(run, chosen), *sorted(told - {chosen})]
        later = (m for m in run.matches if m.index > chosen and m.signature.kind in _NOTICES)
        notice = [m.index for m in later if m.index not in told][:1]
        picked = picked[: limit - len(notice)] + notice
    return tuple(shorten(run.lines[i]).strip()[:500] for i in picked)


def _telling(run: Run, chosen: int) -> set[int]:
    """The lines of the message around one, and shortly before it, that match a row or are an exception."""
    rank, story = run.ranks[chosen], run.story(chosen)
    near = range(max(0, story.start - 60), story.start)
    told = {m.index for m in run.matches if m.index in story and m.signature.tier < Tier.WEAK}
    told |= {m.index for m in run.matches if m.index in near and m.rank == rank}
    return told | {i for i in story if run.exception_at(i) and run.ranks[i] == rank}


def _user_frame(run: Run, chosen: int) -> list[int]:
    """The innermost frame of the model's own code that Dynamo names in its message."""
    story = run.story(chosen)
    start = next((i for i in story if i > chosen and run.lines[i].strip() == "from user code:"), None)
    if start is None:
        return []
    end = next((i for i in range(start, story.stop) if "TORCHDYNAMO_VERBOSE" in run.lines[i]), story.stop)
    own = [i for i in range(start, end) if _FRAME.match(run.lines[i]) and "/lib/python" not in run.lines[i]]
    return own[-1:]
