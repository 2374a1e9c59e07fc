"""What to do about a failure: DESIGN's failure table as a function. Values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hearth.errors import ExitCode
from hearth.failure import Failure, FailureKind
from hearth.ladder import DISABLED, GraphPlan, Ladder, degrade


class Action(StrEnum):
    RESTART = "restart"
    STEP_DOWN = "step_down"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """What to do next: the plan to start (None: stop) after `delay` seconds, and the sentence to say."""

    action: Action
    plan: GraphPlan | None
    delay: float
    exit_code: ExitCode
    sentence: str


@dataclass(frozen=True)
class Event:
    """A failure at `at` (monotonic seconds) under `plan`, and whether the plan changed for it."""

    at: float
    failure: Failure
    plan: GraphPlan
    stepped: bool


@dataclass(frozen=True)
class Rules:
    """The numbers of the decision: seconds, counts, and what may be given up."""

    window: float = 3600.0
    count: int = 4
    backoff: float = 5.0
    backoff_max: float = 120.0
    ladder_enabled: bool = True
    allow_eager: bool = True


STOPS = {
    FailureKind.CONFIG: ExitCode.CONFIG,
    FailureKind.UNSUPPORTED: ExitCode.CONFIG,
    FailureKind.PORT_IN_USE: ExitCode.PORT_IN_USE,
    FailureKind.MISSING_ARTIFACT: ExitCode.MISSING,
    FailureKind.MISSING_COMPILER: ExitCode.MISSING,
    FailureKind.DISK: ExitCode.DISK,
    FailureKind.GPU_FAULT: ExitCode.HOST_ACTION,
    FailureKind.HOST_MISMATCH: ExitCode.HOST_ACTION,
    FailureKind.GPU_DETACHED: ExitCode.RECREATE,
}
_AT_ONCE = frozenset({FailureKind.GRAPH_CAPTURE, FailureKind.GRAPH_REPLAY, FailureKind.OOM})
_ONCE_MORE = frozenset({FailureKind.NUMERICS, FailureKind.COMM, FailureKind.HANG})


def decide(
    failure: Failure, plan: GraphPlan, ladder: Ladder, events: Sequence[Event], rules: Rules, now: float
) -> Decision:
    """The next move after `failure` under `plan`; `events` are the earlier ones, oldest first."""
    if failure.kind in STOPS:
        return _stop(STOPS[failure.kind], f"{failure.kind}: no graph plan can fix it")
    if failure.kind in _AT_ONCE or (failure.kind is FailureKind.HANG and failure.phase.capturing):
        return _step(failure, plan, ladder, events, rules)
    in_window = [e for e in events if now - e.at <= rules.window]
    recent = [e for e in in_window if e.plan == plan]
    if failure.kind in _ONCE_MORE:
        about = in_window if failure.kind is FailureKind.COMM else recent
        return _once_more(failure, plan, ladder, events, about, rules)
    if len(recent) + 1 >= rules.count:
        return _step(failure, plan, ladder, events, rules)
    return _restart(plan, _backoff(len(recent), rules), f"{failure.kind}: start again on the same plan")


def _once_more(
    failure: Failure,
    plan: GraphPlan,
    ladder: Ladder,
    events: Sequence[Event],
    recent: Sequence[Event],
    rules: Rules,
) -> Decision:
    """numerics, comm, hang: one restart on the same plan; the same again is a verdict.

    `recent` are the events in the window: those of this plan, for comm (no plan's doing) those of any.
    """
    if not any(e.failure.kind is failure.kind for e in recent):
        return _restart(plan, 0.0, f"{failure.kind}: once is tolerated; same plan again")
    if failure.kind is FailureKind.COMM:
        return _stop(ExitCode.HOST_ACTION, "comm failed twice: look at P2P, IOMMU and ACS (hearth doctor)")
    return _step(failure, plan, ladder, events, rules)


def _step(
    failure: Failure, plan: GraphPlan, ladder: Ladder, events: Sequence[Event], rules: Rules
) -> Decision:
    lower = _lower(failure, plan, ladder, [e.failure for e in events if e.stepped], rules)
    if lower is not None:
        return Decision(
            Action.STEP_DOWN, lower, 0.0, ExitCode.OK, f"{failure.kind}: step down from {plan} to {lower}"
        )
    if failure.kind is FailureKind.OOM:
        return _stop(ExitCode.OOM, "out of memory, and no smaller plan is left")
    why = f"no step is left below {plan}" if rules.ladder_enabled else "graphs.ladder.enabled is false"
    return _stop(ExitCode.GAVE_UP, f"{failure.kind}: {why}")


def _lower(
    failure: Failure, plan: GraphPlan, ladder: Ladder, stepped: Sequence[Failure], rules: Rules
) -> GraphPlan | None:
    """The next plan down that the rules allow."""
    if not rules.ladder_enabled:
        return None
    lower = degrade(plan, failure, ladder, stepped)
    if rules.allow_eager or lower is None or not _eager(lower):
        return lower
    # Both axes failed, so eager was next; where it isn't allowed, the cheaper steps come first after all.
    lower = degrade(plan, failure, ladder)
    return None if lower is None or _eager(lower) else lower


def _eager(plan: GraphPlan) -> bool:
    return plan.prefill == plan.decode == DISABLED


def _backoff(deaths: int, rules: Rules) -> float:
    return float(min(rules.backoff_max, rules.backoff * 2 ** min(deaths, 30)))


def _restart(plan: GraphPlan, delay: float, sentence: str) -> Decision:
    return Decision(Action.RESTART, plan, delay, ExitCode.OK, sentence)


def _stop(code: ExitCode, sentence: str) -> Decision:
    return Decision(Action.STOP, None, 0.0, code, sentence)
