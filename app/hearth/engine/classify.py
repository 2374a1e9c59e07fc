"""From an engine's last lines and its exit status to one named Failure. Pure.

The first fatal line by time wins over the noise that follows it, but not over the cause that stands in the
same exception chain: an out-of-memory can surface as a failed graph backend. What the lines mean is data
(`signatures.yaml`); this module only weighs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hearth.engine.evidence import Match, Run, evidence, read, survived
from hearth.engine.phases import Overdue, PhaseTracker
from hearth.engine.signatures import Tier, is_fatal_hint, live_signature
from hearth.failure import Axis, Failure, FailureKind, Phase

__all__ = ["classify", "hang_failure", "is_fatal_hint", "live_signature"]

_SERVED = (Phase.WARMUP, Phase.SERVING, Phase.DRAIN)
_ASKED_TO_STOP = frozenset({None, 0, -15, -9, -2, 143, 137, 130})
# What a cause found elsewhere in the log may be, to explain an earlier symptom. The others are echoes: when
# one rank fails, the rest lose their connections, time out or are killed.
_EXPLAINS = frozenset(
    {
        FailureKind.OOM,
        FailureKind.MISSING_COMPILER,
        FailureKind.MISSING_ARTIFACT,
        FailureKind.UNSUPPORTED,
        FailureKind.DISK,
        FailureKind.GPU_FAULT,
        FailureKind.HOST_MISMATCH,
        FailureKind.GPU_DETACHED,
    }
)
# Peers may print their lost connection before the rank that broke it tells why: anything explains that, but
# what can be its effect.
_NOT_ECHOES = frozenset(FailureKind) - {FailureKind.COMM, FailureKind.HANG, FailureKind.ENGINE_KILLED}


@dataclass(frozen=True)
class _Rule:
    """What an end without a word means."""

    id: str
    kind: FailureKind
    hint: str


_STOPS = _Rule(
    "log-stops",
    FailureKind.HANG,
    "the log stops here without an error and without READY: still starting, or hung; give it the phase's "
    "deadline, then kill it and look at the disk (loading), compilers (warm), graphs (capture), peer-to-peer",
)
_NOTHING = _Rule("no-cause", FailureKind.UNKNOWN, "no known cause in these lines: read the ones shown")
_KILLED = _Rule(
    "killed-by-signal",
    FailureKind.ENGINE_KILLED,
    "killed by a signal: SIGKILL is mostly the kernel's out-of-memory killer or a person "
    "(`journalctl -k | grep -i oom`), SIGBUS a full /dev/shm, SIGSEGV and SIGABRT a crash in native code",
)
_USAGE = _Rule("exit-2", FailureKind.CONFIG, "the engine refused its arguments: compare with `hearth plan`")
_NOT_FOUND = _Rule(
    "exit-127",
    FailureKind.MISSING_ARTIFACT,
    "the engine's program could not be run: check engine.python and the image",
)
_CAPTURE_HINT = (
    "an error that isn't known, while graphs were captured: a step down on this axis; `hearth explain` shows "
    "the exception"
)
_HANG_HINT = (
    "the engine made no progress in this phase: a step down where graphs are captured; else look at the disk "
    "(loading), compilers (warm-up), peer-to-peer (`hearth doctor`)"
)
_GRAPHS = (FailureKind.GRAPH_CAPTURE, FailureKind.GRAPH_REPLAY)
_AXED = (*_GRAPHS, FailureKind.HANG, FailureKind.ENGINE_KILLED, FailureKind.UNKNOWN)
_ADVICE = "--cuda-graph-backend-prefill="
"""In SGLang's suggestions after a failed capture, which name backends that had no part in it."""
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def classify(lines: Sequence[str], exit_status: int | None, phase: Phase | None = None) -> Failure | None:
    """Name what went wrong, or None: READY (or stopped as asked), nothing fatal, no bad exit.

    `exit_status` is the engine's: negative for a signal, 128+N as shells and docker say it, None if unknown
    or still running. `phase` is where the engine was, if the caller knows; else the lines tell. In a log of
    several starts the last one counts, unless it tells nothing yet and an earlier one failed.
    """
    runs = read(lines, phase)
    run = runs[-1]
    failure = _classify_run(run, exit_status, phase)
    if failure is None or exit_status is not None or not _inconclusive(failure, run):
        return failure
    earlier = (_classify_run(r, None, phase) for r in reversed(runs[:-1]))
    return next((f for f in earlier if f is not None and f.source != _STOPS.id), failure)


def hang_failure(overdue: Overdue, lines: Sequence[str]) -> Failure:
    """The Failure for a phase that passed its limit; a cause that the lines name comes first."""
    run = read(lines, overdue.phase)[-1]
    chosen = _choose(run, [m for m in run.matches if not survived(run, m)])
    if chosen is not None and chosen.signature.tier <= Tier.CAUSE:
        return _failure(run, chosen, overdue.phase)
    told = (overdue.sentence, *_tail(run, 4))
    axis = _axis_of_phase(overdue.phase)
    return Failure(FailureKind.HANG, overdue.phase, axis, told, _HANG_HINT, f"limit:{overdue.why}")


def _classify_run(run: Run, status: int | None, known: Phase | None) -> Failure | None:
    live = [m for m in run.matches if not survived(run, m) and not _stopping(run, m)]
    chosen = _choose(run, live)
    if chosen is not None and not _only_echo(chosen, status):
        return _failure(run, chosen, known or _phase_of(run, chosen))
    if run.drained is not None and status in _ASKED_TO_STOP:
        return None
    if run.ready and status in (None, 0):
        return None
    return _from_exit(run, status, known or run.phase)


def _choose(run: Run, matches: Sequence[Match]) -> Match | None:
    """The match that names the failure."""
    first = {tier: next((m for m in matches if m.signature.tier is tier), None) for tier in Tier}
    verdict, cause, symptom = first[Tier.VERDICT], first[Tier.CAUSE], first[Tier.SYMPTOM]
    if verdict is not None:
        return verdict
    told = [m for m in matches if m.signature.tier is Tier.CAUSE]
    if cause is not None and (symptom is None or cause.index <= symptom.index):
        return _beneath(run, cause, told) if cause.signature.kind is FailureKind.COMM else cause
    if symptom is None:
        return _weak(run, matches)
    story = run.story(symptom.index)
    near = next((m for m in told if m.index in story and m.rank == symptom.rank), None)
    explains = _NOT_ECHOES if symptom.signature.kind is FailureKind.COMM else _EXPLAINS
    return near or next((m for m in told if m.signature.kind in explains), symptom)


def _only_echo(match: Match, status: int | None) -> bool:
    """Whether a lost connection is all that the log tells of an engine that a signal killed."""
    weak = match.signature.tier is Tier.WEAK and match.signature.kind is FailureKind.COMM
    return weak and status is not None and (status < 0 or status > 128)


def _beneath(run: Run, cause: Match, told: Sequence[Match]) -> Match:
    """What broke the connection, where the same message says so (NCCL reports a full /dev/shm as its own)."""
    story = run.story(cause.index)
    same = (m for m in told if m.index in story and m.rank == cause.rank)
    return next((m for m in same if m.signature.kind in _EXPLAINS), cause)


def _weak(run: Run, matches: Sequence[Match]) -> Match | None:
    """Among death notices and echoes: the first exception, unless something before or in it has a kind."""
    if not matches:
        return None
    end = matches[-1].phase
    named = [m for m in matches if m.signature.kind is not FailureKind.UNKNOWN and m.phase is end]
    told = next((m for m in matches if any(run.exception_at(i) for i in run.story(m.index))), None)
    if told is None:
        return named[0] if named else matches[0]
    story = run.story(told.index)
    inside = (m for m in named if m.index in story and m.rank == told.rank)
    before = (m for m in named if m.index < story.start and m.signature.kind is not FailureKind.COMM)
    return next(inside, None) or next(before, told)


def _stopping(run: Run, match: Match) -> bool:
    """Whether this is the normal noise of an engine that was asked to stop."""
    if run.drained is None or match.index < run.drained:
        return False
    line = run.lines[match.index]
    killed = match.signature.kind is FailureKind.ENGINE_KILLED
    return match.signature.tier is Tier.WEAK or (killed and ("code -15" in line or "code -9" in line))


# A capture that fails before it has said "begin" still failed there.
_CAPTURES = {Axis.PREFILL: Phase.CAPTURE_PREFILL, Axis.DECODE: Phase.CAPTURE_DECODE}


def _failure(run: Run, match: Match, phase: Phase) -> Failure:
    row = match.signature
    if row.kind is FailureKind.UNKNOWN:
        return _unknown(run, match, phase)
    kind = row.serving_kind if row.serving_kind is not None and phase in _SERVED else row.kind
    axis = _axis(run, match, kind, phase)
    if kind is FailureKind.GRAPH_REPLAY and row.axis is None and _eager(run, match):
        kind, axis = FailureKind.UNKNOWN, Axis.NONE
    if kind is FailureKind.GRAPH_CAPTURE and not phase.capturing:
        phase = _CAPTURES.get(axis, phase)
    return Failure(kind, phase, axis, evidence(run, match.index), row.hint, row.id)


def _unknown(run: Run, match: Match, phase: Phase) -> Failure:
    """An exception that no row knows. Within a capture it speaks against the graphs all the same."""
    told = [i for i in run.story(match.index) if run.exception_at(i)]
    lines = evidence(run, told[0] if told else match.index)
    if phase.capturing:
        axis = _frames(run, match) or _axis_of_phase(phase)
        return Failure(FailureKind.GRAPH_CAPTURE, phase, axis, lines, _CAPTURE_HINT, "exception-in-capture")
    return Failure(FailureKind.UNKNOWN, phase, Axis.NONE, lines, match.signature.hint, match.signature.id)


def _axis(run: Run, match: Match, kind: FailureKind, phase: Phase) -> Axis:
    """The part of the plan that failed: frames know best, then the row, then the phase."""
    row = match.signature
    if kind in _GRAPHS:
        framed = _frames(run, match)
        if framed is not None:
            return framed
        # SGLang 0.5.17 says "for prefill runner" of decode graphs as well: the phase knows better.
        if phase.capturing:
            return _axis_of_phase(phase)
        if row.axis is not None:
            return row.axis
        if phase in _SERVED:
            return _served_axis(run, match)
    if row.axis is not None:
        return row.axis
    if kind is FailureKind.OOM:
        return Axis.MEMORY
    return _axis_of_phase(phase) if kind in _AXED else Axis.NONE


def _frames(run: Run, match: Match) -> Axis | None:
    """The axis that the traceback's frames name."""
    told = run.text(match.index).split("\n")
    text = "\n".join(line for line in told if _ADVICE not in line)
    if any(name in text for name in ("prefill_cuda_graph_runner", "piecewise_cuda_graph", "tc_piecewise")):
        return Axis.PREFILL
    if any(
        name in text for name in ("decode_cuda_graph_runner", "/cuda_graph_runner.py", "draft_cuda_graph")
    ):
        return Axis.DECODE
    return None


def _served_axis(run: Run, match: Match) -> Axis:
    """While serving: what the last batch before the line was, as far as that kind of batch has graphs."""
    before = [(axis, graph) for index, axis, graph in run.batches if index < match.index]
    graphed = [axis for axis, graph in before if graph]
    if before and before[-1][1]:
        return before[-1][0]
    prefill, decode = run.visited(Phase.CAPTURE_PREFILL), run.visited(Phase.CAPTURE_DECODE)
    if prefill and not decode:
        return Axis.PREFILL
    return graphed[-1] if graphed else Axis.DECODE


def _eager(run: Run, match: Match) -> bool:
    """Whether the log proves that no graph was there to be replayed."""
    if _frames(run, match) is not None or any(graph for _, _, graph in run.batches):
        return False
    if run.visited(Phase.CAPTURE_PREFILL) or run.visited(Phase.CAPTURE_DECODE):
        return False
    return run.visited(Phase.BIND) or bool(run.batches)


def _axis_of_phase(phase: Phase) -> Axis:
    return {Phase.CAPTURE_PREFILL: Axis.PREFILL, Phase.CAPTURE_DECODE: Axis.DECODE}.get(phase, Axis.NONE)


def _phase_of(run: Run, match: Match) -> Phase:
    """Where the failing rank was; ranks aren't in step while graphs are captured."""
    if not match.rank or not match.phase.capturing:
        return match.phase
    tracker = PhaseTracker({}, 0.0)
    for line, rank in zip(run.lines[: match.index + 1], run.ranks, strict=False):
        if rank in ("", match.rank):
            tracker.observe(line, 0.0)
    return tracker.phase if tracker.phase.capturing else match.phase


def _from_exit(run: Run, status: int | None, phase: Phase) -> Failure:
    """No line says why: the exit status, or the silence, is all there is."""
    axis = _axis_of_phase(phase)
    row = _NOTHING if status is None and run.ends_in_exception else _by_status(status, phase)
    told = (_status_text(status), *_tail(run, 6)) if status is not None else _tail(run, 6)
    shown = Failure(row.kind, phase, axis if row.kind in _AXED else Axis.NONE, told, row.hint, row.id)
    exceptions = [i for i in range(len(run.lines)) if run.exception_at(i)]
    if row.kind is FailureKind.UNKNOWN and exceptions:
        lines = tuple(run.lines[i].strip()[:500] for i in exceptions[-3:][::-1])
        shown = replace(shown, evidence=lines)
        if phase.capturing:
            return replace(
                shown, kind=FailureKind.GRAPH_CAPTURE, hint=_CAPTURE_HINT, source="exception-in-capture"
            )
    return shown


def _by_status(status: int | None, phase: Phase) -> _Rule:
    if status is None:
        return _STOPS if phase is not Phase.SPAWN else _NOTHING
    if status < 0 or status > 128:
        return _KILLED
    if status == 2 and phase is Phase.SPAWN:
        return _USAGE
    return _NOT_FOUND if status in (126, 127) else _NOTHING


def _status_text(status: int) -> str:
    number = -status if status < 0 else status - 128
    if status < 0 or status > 128:
        return f"(exit status {status}: killed by {_SIGNALS.get(number, f'signal {number}')})"
    return f"(exit status {status})"


def _tail(run: Run, count: int) -> tuple[str, ...]:
    """The last lines that say something."""
    return tuple(line.strip()[:300] for line in run.lines if line.strip())[-count:]


def _inconclusive(failure: Failure, run: Run) -> bool:
    return failure.source in (_STOPS.id, _NOTHING.id) and not run.ready
