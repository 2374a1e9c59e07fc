"""The ladder: from a graph plan and a failure to the next plan down. Values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hearth.failure import Axis, Failure, FailureKind, Phase

DISABLED = "disabled"
MAX_HALVINGS = 2

# What a lower plan can fix. For every other kind `degrade` has no answer.
STEPPABLE = frozenset(
    {
        FailureKind.GRAPH_CAPTURE,
        FailureKind.GRAPH_REPLAY,
        FailureKind.OOM,
        FailureKind.NUMERICS,
        FailureKind.HANG,
        FailureKind.ENGINE_KILLED,
        FailureKind.UNKNOWN,
    }
)
_BEFORE_GRAPHS = (Phase.SPAWN, Phase.INIT, Phase.LOAD, Phase.MEMORY, Phase.WARM)


@dataclass(frozen=True)
class GraphPlan:
    """Which CUDA-graph backend each phase uses, and the largest decode batch (sequences) captured.

    `decode_max_bs` of None leaves the engine's own default.
    """

    prefill: str
    decode: str
    decode_max_bs: int | None = None

    @property
    def name(self) -> str:
        """`piecewise`, `standard`, `eager`, or the two backends where none of the words fits."""
        if self.decode == "full" and self.prefill in ("tc_piecewise", "breakable"):
            return "piecewise"
        if self.prefill == DISABLED:
            return {"full": "standard", DISABLED: "eager"}.get(self.decode, f"{self.prefill},{self.decode}")
        return f"{self.prefill},{self.decode}"

    def to_json(self) -> dict[str, str | int | None]:
        """The shape that `hearth plan --json`, `hearth explain --json` and `/status` print."""
        return {"prefill": self.prefill, "decode": self.decode, "decode_max_bs": self.decode_max_bs}

    def __str__(self) -> str:
        size = "" if self.decode_max_bs is None else f",{self.decode_max_bs}"
        return f"{self.prefill},{self.decode}{size}"


@dataclass(frozen=True)
class Ladder:
    """The wanted plan and, for each axis, its backends in the order they are tried."""

    wanted: GraphPlan
    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    @classmethod
    def build(cls, wanted: GraphPlan, prefill: Sequence[str], decode: Sequence[str]) -> Ladder:
        """Order the backends that the dialect knows (`prefill`, `decode`) from the wanted one down.

        Prefill falls to the other piecewise kind, whichever was wanted; decode never goes up in `decode`.
        """
        below = decode[list(decode).index(wanted.decode) :] if wanted.decode in decode else decode
        return cls(wanted, _order(wanted.prefill, prefill), _order(wanted.decode, below))

    def below(self, axis: Axis, backend: str) -> str | None:
        """The next backend down on an axis, or None at its end."""
        order = self.prefill if axis is Axis.PREFILL else self.decode
        position = order.index(backend) if backend in order else len(order)
        return order[position + 1] if position + 1 < len(order) else None


def _order(wanted: str, known: Sequence[str]) -> tuple[str, ...]:
    """Wanted first, then the others as listed; a wanted `disabled` has nothing below."""
    if wanted == DISABLED:
        return (DISABLED,)
    rest = [name for name in known if name not in (wanted, DISABLED)]
    return (wanted, *rest, DISABLED)


def degrade(
    plan: GraphPlan, failure: Failure, ladder: Ladder, history: Sequence[Failure] = ()
) -> GraphPlan | None:
    """The next plan down after `failure`, or None where no plan can help.

    `history` holds the earlier failures that were stepped down for, oldest first: a plan without any graphs
    is reached early only when prefill and decode graphs each failed for themselves (running out of memory
    while capturing isn't that).
    """
    if failure.kind not in STEPPABLE or _no_plan_helps(failure):
        return None
    failed = {_axis(f) for f in (*history, failure) if f.kind is not FailureKind.OOM}
    for step in _steps(failure, plan):
        lower = _apply(step, plan, ladder)
        if lower is not None and not _too_early(lower, plan, ladder, failed):
            return lower
    return None


def _no_plan_helps(failure: Failure) -> bool:
    """An engine that dies, hangs or runs out of memory before any graph exists isn't the graphs' doing.

    Nor is running out of memory on no axis at all: that is the host's memory, not the GPUs'.
    """
    if failure.kind is FailureKind.OOM and failure.axis is Axis.NONE:
        return True
    about_graphs = failure.kind in (FailureKind.GRAPH_CAPTURE, FailureKind.GRAPH_REPLAY)
    return failure.phase in _BEFORE_GRAPHS and not about_graphs


def _axis(failure: Failure) -> Axis:
    if failure.axis in (Axis.PREFILL, Axis.DECODE):
        return failure.axis
    if failure.phase is Phase.CAPTURE_PREFILL:
        return Axis.PREFILL
    if failure.phase is Phase.CAPTURE_DECODE:
        return Axis.DECODE
    return failure.axis


def _steps(failure: Failure, plan: GraphPlan) -> tuple[Axis, ...]:
    """The axes to try, first to last: the one that failed, then whatever is cheapest."""
    axis = _axis(failure)
    cheap = (Axis.PREFILL, Axis.DECODE, Axis.MEMORY)
    if failure.kind is FailureKind.OOM:
        return (Axis.MEMORY, axis, *cheap)
    if axis is Axis.PREFILL and plan.prefill != DISABLED:
        return (Axis.PREFILL,)
    if axis is Axis.DECODE and plan.decode != DISABLED:
        return (Axis.DECODE, Axis.MEMORY)
    return cheap


def _apply(axis: Axis, plan: GraphPlan, ladder: Ladder) -> GraphPlan | None:
    if axis is Axis.PREFILL:
        lower = ladder.below(axis, plan.prefill)
        return None if lower is None else replace(plan, prefill=lower)
    if axis is Axis.DECODE:
        lower = ladder.below(axis, plan.decode)
        return None if lower is None else replace(plan, decode=lower)
    return _halve(plan, ladder) if axis is Axis.MEMORY else None


def _halve(plan: GraphPlan, ladder: Ladder) -> GraphPlan | None:
    """Half the decode batch, at most `MAX_HALVINGS` times, and only where decode has graphs."""
    size, wanted = plan.decode_max_bs, ladder.wanted.decode_max_bs
    if size is None or wanted is None or plan.decode == DISABLED or size < 2:
        return None
    if size // 2 < wanted >> MAX_HALVINGS:
        return None
    return replace(plan, decode_max_bs=size // 2)


def _too_early(lower: GraphPlan, plan: GraphPlan, ladder: Ladder, failed: set[Axis]) -> bool:
    """Whether `lower` has no graphs at all while a cheaper step is left."""
    if lower.prefill != DISABLED or lower.decode != DISABLED or {Axis.PREFILL, Axis.DECODE} <= failed:
        return False
    return _halve(plan, ladder) is not None
