"""The ladder always ends, never repeats a plan, and never steps for what no plan can fix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import DISABLED, STEPPABLE, GraphPlan, Ladder, degrade

WANTED = GraphPlan("breakable", "full", 32)
LADDER = Ladder.build(WANTED, ("breakable", "tc_piecewise", DISABLED), ("full", "breakable", DISABLED))


def failure(kind: FailureKind, phase: Phase, axis: Axis = Axis.NONE) -> Failure:
    return Failure(kind, phase, axis)


PREFILL = failure(FailureKind.GRAPH_CAPTURE, Phase.CAPTURE_PREFILL, Axis.PREFILL)
DECODE = failure(FailureKind.GRAPH_CAPTURE, Phase.CAPTURE_DECODE, Axis.DECODE)
OOM = failure(FailureKind.OOM, Phase.CAPTURE_DECODE, Axis.MEMORY)
KILLED = failure(FailureKind.ENGINE_KILLED, Phase.SERVING)


def walk(failures, ladder=LADDER):
    """The plans that a sequence of failures leads through."""
    plan, plans, history = ladder.wanted, [ladder.wanted], []
    for happened in failures:
        lower = degrade(plan, happened, ladder, history)
        if lower is None:
            break
        plan = lower
        plans.append(plan)
        history.append(happened)
    return plans


def test_prefill_goes_through_the_other_piecewise_kind_to_disabled():
    assert [p.prefill for p in walk([PREFILL, PREFILL])] == ["breakable", "tc_piecewise", DISABLED]
    assert {p.decode for p in walk([PREFILL, PREFILL])} == {"full"}


def test_prefill_wanted_tc_piecewise_goes_to_breakable_next():
    ladder = Ladder.build(
        GraphPlan("tc_piecewise", "full"), ("breakable", "tc_piecewise", DISABLED), ("full", DISABLED)
    )
    assert [p.prefill for p in walk([PREFILL, PREFILL], ladder)] == ["tc_piecewise", "breakable", DISABLED]


def test_decode_goes_through_breakable_to_disabled_and_leaves_prefill_alone():
    plans = walk([DECODE, DECODE])
    assert [p.decode for p in plans] == ["full", "breakable", DISABLED]
    assert {p.prefill for p in plans} == {"breakable"}


def test_oom_in_capture_halves_twice_then_steps_down():
    plans = walk([OOM, OOM, OOM])
    assert [p.decode_max_bs for p in plans] == [32, 16, 8, 8]
    assert plans[-1].decode == "breakable"


def test_both_axes_failing_for_themselves_reach_eager_without_halving():
    plans = walk([PREFILL, PREFILL, DECODE, DECODE])
    assert plans[-1] == GraphPlan(DISABLED, DISABLED, 32)


def test_an_unexplained_death_reaches_eager_only_after_every_cheaper_step():
    assert walk([KILLED] * 20) == [
        GraphPlan("breakable", "full", 32),
        GraphPlan("tc_piecewise", "full", 32),
        GraphPlan(DISABLED, "full", 32),
        GraphPlan(DISABLED, "breakable", 32),
        GraphPlan(DISABLED, "breakable", 16),
        GraphPlan(DISABLED, "breakable", 8),
        GraphPlan(DISABLED, DISABLED, 8),
    ]


def test_a_wanted_standard_plan_never_gains_prefill_graphs():
    ladder = Ladder.build(
        GraphPlan(DISABLED, "full", 8), ("breakable", DISABLED), ("full", "breakable", DISABLED)
    )
    assert {p.prefill for p in walk([KILLED] * 9, ladder)} == {DISABLED}


def test_decode_never_steps_up():
    ladder = Ladder.build(GraphPlan("breakable", "breakable", 8), ("breakable", DISABLED), LADDER.decode)
    assert "full" not in {p.decode for p in walk([DECODE, KILLED, DECODE, KILLED], ladder)[1:]}


def test_a_backend_that_the_dialect_does_not_list_has_all_others_below_it():
    ladder = Ladder.build(GraphPlan("full", "tc_piecewise", 8), LADDER.prefill, LADDER.decode)
    assert ladder.decode == ("tc_piecewise", "full", "breakable", DISABLED)
    assert ladder.prefill == ("full", "breakable", "tc_piecewise", DISABLED)


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - STEPPABLE))
def test_no_step_for_a_kind_that_no_plan_can_fix(kind):
    assert all(degrade(WANTED, failure(kind, phase), LADDER) is None for phase in Phase)


@pytest.mark.parametrize("phase", [Phase.SPAWN, Phase.INIT, Phase.LOAD, Phase.MEMORY, Phase.WARM])
@pytest.mark.parametrize("kind", [FailureKind.OOM, FailureKind.HANG, FailureKind.UNKNOWN])
def test_no_step_for_what_happens_before_any_graph(kind, phase):
    assert degrade(WANTED, failure(kind, phase), LADDER) is None


BACKENDS = st.sampled_from(["tc_piecewise", "breakable", DISABLED])
FAILURES = st.builds(failure, st.sampled_from(FailureKind), st.sampled_from(Phase), st.sampled_from(Axis))
LADDERS = st.builds(
    lambda prefill, decode, size, known_p, known_d: Ladder.build(
        GraphPlan(prefill, decode, size), known_p, known_d
    ),
    BACKENDS,
    st.sampled_from(["full", "breakable", DISABLED]),
    st.none() | st.integers(1, 512),
    st.permutations(["breakable", "tc_piecewise", DISABLED]),
    st.permutations(["full", "breakable", DISABLED]),
)


@given(LADDERS, st.lists(FAILURES, max_size=60))
def test_it_always_ends_and_never_repeats_a_plan(ladder, failures):
    plans = walk(failures, ladder)
    assert len(plans) == len(set(plans)) <= 1 + 2 + 2 + 2


@given(LADDERS, st.lists(FAILURES, max_size=60))
def test_every_step_changes_one_axis_downwards(ladder, failures):
    for upper, lower in zip(plans := walk(failures, ladder), plans[1:], strict=False):
        changed = [
            upper.prefill != lower.prefill,
            upper.decode != lower.decode,
            upper.decode_max_bs != lower.decode_max_bs,
        ]
        assert changed.count(True) == 1
        assert lower.decode_max_bs == upper.decode_max_bs or lower.decode_max_bs == upper.decode_max_bs // 2


@given(LADDERS, st.lists(FAILURES, max_size=60))
def test_eager_is_last_unless_both_axes_failed_for_themselves(ladder, failures):
    plans = walk(failures, ladder)
    if len(plans) < 2 or plans[-1].name != "eager":
        return
    taken = failures[: len(plans) - 1]
    blamed = {f.axis for f in taken} | {
        Axis.PREFILL if f.phase is Phase.CAPTURE_PREFILL else Axis.DECODE for f in taken if f.phase.capturing
    }
    last_decode = [p for p in plans if p.decode != DISABLED]
    smallest = last_decode[-1] if last_decode else None
    wanted_size = ladder.wanted.decode_max_bs
    if {Axis.PREFILL, Axis.DECODE} <= blamed or smallest is None or wanted_size is None:
        return
    if plans[-2].decode != DISABLED:
        assert smallest.decode_max_bs // 2 < max(1, wanted_size >> 2) or smallest.decode_max_bs == 1
