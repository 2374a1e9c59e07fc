"""DESIGN's failure table, row by row, and what holds for every sequence of failures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import ExitCode
from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import DISABLED, GraphPlan, Ladder
from hearth.policy import STOPS, Action, Event, Rules, decide

PREFILL, DECODE = ("breakable", "tc_piecewise", DISABLED), ("full", "breakable", DISABLED)
WANTED = GraphPlan("breakable", "full", 32)
LADDER = Ladder.build(WANTED, PREFILL, DECODE)
EAGER = GraphPlan(DISABLED, DISABLED, 8)
RULES = Rules(window=100.0, count=3, backoff=2.0, backoff_max=5.0)
NOW = 1000.0


def fail(kind, phase=Phase.SERVING, axis=Axis.NONE):
    return Failure(FailureKind(kind), Phase(phase), Axis(axis))


def event(failure, ago=0.0, plan=WANTED, stepped=False):
    return Event(NOW - ago, failure, plan, stepped)


def after(failure, *events, plan=WANTED, rules=RULES, ladder=LADDER):
    return decide(failure, plan, ladder, events, rules, NOW)


# What DESIGN's table says: a failure on the wanted plan, nothing before it -> action, next plan, exit code.
STOP, STEP, AGAIN = Action.STOP, Action.STEP_DOWN, Action.RESTART
NO_PREFILL, LOWER_DECODE = GraphPlan("tc_piecewise", "full", 32), GraphPlan("breakable", "breakable", 32)
HALF = GraphPlan("breakable", "full", 16)
TABLE = [
    ("graph_capture", "capture_prefill", "prefill", STEP, NO_PREFILL, ExitCode.OK),
    ("graph_capture", "capture_decode", "decode", STEP, LOWER_DECODE, ExitCode.OK),
    ("graph_replay", "warmup", "prefill", STEP, NO_PREFILL, ExitCode.OK),
    ("graph_replay", "serving", "decode", STEP, LOWER_DECODE, ExitCode.OK),
    ("hang", "capture_prefill", "prefill", STEP, NO_PREFILL, ExitCode.OK),
    ("hang", "capture_decode", "none", STEP, LOWER_DECODE, ExitCode.OK),
    ("oom", "capture_prefill", "memory", STEP, HALF, ExitCode.OK),
    ("oom", "capture_decode", "memory", STEP, HALF, ExitCode.OK),
    ("oom", "load", "memory", STOP, None, ExitCode.OOM),
    ("oom", "memory", "memory", STOP, None, ExitCode.OOM),
    ("config", "spawn", "none", STOP, None, ExitCode.CONFIG),
    ("missing_artifact", "load", "none", STOP, None, ExitCode.MISSING),
    ("missing_compiler", "warm", "none", STOP, None, ExitCode.MISSING),
    ("unsupported", "load", "none", STOP, None, ExitCode.CONFIG),
    ("port_in_use", "bind", "none", STOP, None, ExitCode.PORT_IN_USE),
    ("disk", "load", "none", STOP, None, ExitCode.DISK),
    ("numerics", "serving", "none", AGAIN, WANTED, ExitCode.OK),
    ("comm", "serving", "none", AGAIN, WANTED, ExitCode.OK),
    ("hang", "serving", "none", AGAIN, WANTED, ExitCode.OK),
    ("engine_killed", "serving", "none", AGAIN, WANTED, ExitCode.OK),
    ("unknown", "serving", "none", AGAIN, WANTED, ExitCode.OK),
    ("gpu_fault", "serving", "none", STOP, None, ExitCode.HOST_ACTION),
    ("host_mismatch", "init", "none", STOP, None, ExitCode.HOST_ACTION),
    ("gpu_detached", "serving", "none", STOP, None, ExitCode.RECREATE),
]


@pytest.mark.parametrize(("kind", "phase", "axis", "action", "plan", "code"), TABLE)
def test_the_table(kind, phase, axis, action, plan, code):
    decision = after(fail(kind, phase, axis))
    assert (decision.action, decision.plan, decision.exit_code) == (action, plan, code)
    assert decision.sentence.startswith(kind) or kind == "oom"


def test_the_table_has_every_kind():
    assert {row[0] for row in TABLE} == set(FailureKind)


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row[3] is STOP], ids=lambda row: f"{row[0]}-{row[1]}"
)
def test_systemd_restarts_after_no_stop_but_for_the_container_to_be_made_again(row):
    assert row[5].restartable == (row[0] == "gpu_detached")


@pytest.mark.parametrize(
    ("kind", "action", "code"),
    [("numerics", STEP, ExitCode.OK), ("comm", STOP, ExitCode.HOST_ACTION), ("hang", STEP, ExitCode.OK)],
)
def test_the_second_time_within_the_window_is_a_verdict(kind, action, code):
    again = fail(kind)
    assert (after(again, event(again, 99)).action, after(again, event(again, 99)).exit_code) == (action, code)
    assert after(again, event(again, 101)).action is AGAIN
    assert after(again, event(fail("engine_killed"), 1)).action is AGAIN


def test_a_second_comm_failure_stops_on_whatever_plan_the_first_was():
    earlier = event(fail("comm"), 50, GraphPlan("breakable", "full", 64))
    assert after(fail("comm"), earlier).exit_code is ExitCode.HOST_ACTION


def test_numerics_gets_its_one_restart_on_every_plan():
    assert after(fail("numerics"), event(fail("numerics"), 5, HALF, stepped=True)).action is AGAIN


@pytest.mark.parametrize("kind", ["engine_killed", "unknown"])
def test_an_unexplained_death_backs_off_then_steps_then_gives_up(kind):
    death = fail(kind)
    deaths = [event(death, 30), event(death, 20)]
    assert [after(death, *deaths[:n]).delay for n in (0, 1)] == [2.0, 4.0]
    assert after(death, *deaths).action is STEP
    on_eager = [event(death, 30, EAGER), event(death, 20, EAGER)]
    last = after(death, *on_eager, plan=EAGER)
    assert (last.action, last.exit_code) == (STOP, ExitCode.GAVE_UP)
    early = fail(kind, Phase.LOAD)
    assert after(early, event(early), event(early)).exit_code is ExitCode.GAVE_UP


@pytest.mark.parametrize("count", [10, 100_000])
def test_the_wait_has_an_end_however_many_deaths(count):
    death = fail("unknown")
    rules = Rules(window=1e9, count=100_000, backoff=2.0, backoff_max=5.0)
    assert after(death, *[event(death)] * min(count, 5000), rules=rules).delay == 5.0


def test_out_of_memory_halves_twice_then_steps_down():
    plan, events, seen = WANTED, [], []
    oom = fail("oom", "capture_decode", "memory")
    while (decision := after(oom, *events, plan=plan)).plan is not None:
        events.append(event(oom, 0, plan, stepped=True))
        plan = decision.plan
        seen.append(str(plan))
    assert seen[:3] == ["breakable,full,16", "breakable,full,8", "breakable,breakable,8"]
    assert decision.exit_code is ExitCode.OOM


def test_out_of_memory_in_both_captures_is_no_reason_to_drop_all_graphs():
    plan = GraphPlan(DISABLED, "breakable", 16)
    both = [
        event(fail("oom", phase, "memory"), stepped=True) for phase in ("capture_prefill", "capture_decode")
    ]
    hang = fail("hang", "capture_decode", "decode")
    assert after(hang, *both, plan=plan).plan == GraphPlan(DISABLED, "breakable", 8)


def test_where_eager_is_not_allowed_the_cheaper_steps_are_still_taken():
    plan = GraphPlan(DISABLED, "breakable", 32)
    both = [event(fail("graph_capture", "capture_prefill", "prefill"), stepped=True)] * 2
    decode = fail("graph_capture", "capture_decode", "decode")
    strict = Rules(allow_eager=False)
    assert after(decode, *both, plan=plan).plan == GraphPlan(DISABLED, DISABLED, 32)
    assert after(decode, *both, plan=plan, rules=strict).plan == GraphPlan(DISABLED, "breakable", 16)
    last = after(decode, *both, plan=GraphPlan(DISABLED, "breakable", 8), rules=strict)
    assert last.exit_code is ExitCode.GAVE_UP


def test_a_switched_off_ladder_stops_and_says_so():
    decision = after(fail("graph_capture", "capture_prefill", "prefill"), rules=Rules(ladder_enabled=False))
    assert (decision.action, decision.exit_code) == (STOP, ExitCode.GAVE_UP)
    assert "graphs.ladder.enabled" in decision.sentence


FAILURES = st.builds(Failure, st.sampled_from(FailureKind), st.sampled_from(Phase), st.sampled_from(Axis))
WANTS = st.builds(
    GraphPlan, st.sampled_from(PREFILL), st.sampled_from(DECODE), st.none() | st.integers(1, 512)
)
RULESETS = st.builds(Rules, count=st.integers(1, 8), ladder_enabled=st.booleans(), allow_eager=st.booleans())


def run(wanted, failures, rules):
    """All decisions until a stop; every failure at the same moment."""
    ladder, plan, events = Ladder.build(wanted, PREFILL, DECODE), wanted, []
    for failure in failures:
        decision = decide(failure, plan, ladder, events, rules, NOW)
        yield failure, plan, decision
        if decision.plan is None:
            return
        events.append(Event(NOW, failure, plan, decision.action is STEP))
        plan = decision.plan


@given(WANTS, st.lists(FAILURES, max_size=80), RULESETS)
def test_a_stop_kind_never_steps_and_no_decision_contradicts_itself(wanted, failures, rules):
    for failure, plan, decision in run(wanted, failures, rules):
        if failure.kind in STOPS:
            assert (decision.action, decision.exit_code) == (STOP, STOPS[failure.kind])
        assert (decision.plan is None) == (decision.action is STOP) == (decision.exit_code is not ExitCode.OK)
        assert (decision.plan == plan) == (decision.action is AGAIN)
        assert 0 <= decision.delay <= rules.backoff_max
        assert "\n" not in decision.sentence
        if decision.action is STEP:
            assert rules.ladder_enabled
            assert rules.allow_eager or decision.plan.name != "eager"


@given(WANTS, st.lists(FAILURES, min_size=1, max_size=6), RULESETS)
def test_any_failures_that_go_on_within_a_window_end(wanted, failures, rules):
    bound = 7 * (rules.count + 3)  # plans, and restarts on each
    decisions = [decision for _, _, decision in run(wanted, failures * bound, rules)]
    assert len(decisions) <= bound
    assert decisions[-1].action is STOP
