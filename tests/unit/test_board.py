"""The board's document, and the hour of rates."""

import json

from hypothesis import given
from hypothesis import strategies as st

from hearth.board import HISTORY_SECONDS, HISTORY_STEP, Board, Incident, RateHistory
from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import GraphPlan
from hearth.states import State

WANTED, LOWER = GraphPlan("breakable", "full", 32), GraphPlan("disabled", "full", 32)
FAILURE = Failure(
    FailureKind.GRAPH_CAPTURE, Phase.CAPTURE_PREFILL, Axis.PREFILL, ("Unsupported",), "hint", "sig"
)


def board(state=State.SERVING, **facts):
    found = Board(wanted=WANTED, plan=LOWER, state=state, **facts)
    found.rates, found.running, found.queued, found.kv_usage = (
        {"generation": 40.0, "prefill": 9.0},
        3.0,
        1.0,
        0.5,
    )
    return found


def test_the_contract_of_status_json():
    """DESIGN: {"state", "phase", "plan": {"wanted", "effective"}, "tokens_per_second", "restarts", ...}."""
    status = board()
    status.incidents.append(Incident(1.0, FAILURE, WANTED, "stepped down"))
    document = json.loads(json.dumps(status.to_json(), allow_nan=False))
    assert {"state", "phase", "plan", "tokens_per_second", "restarts", "failures", "sentence"} <= set(
        document
    )
    assert document["plan"]["wanted"] == {
        "prefill": "breakable",
        "decode": "full",
        "decode_max_bs": 32,
        "name": "piecewise",
    }
    assert document["plan"]["effective"]["name"] == "standard"
    assert document["plan"]["known"] is False
    assert document["tokens_per_second"] == {"generation": 40.0, "prefill": 9.0}
    (failure,) = document["failures"]
    assert failure == {
        "at": 1.0,
        "kind": "graph_capture",
        "phase": "capture_prefill",
        "axis": "prefill",
        "evidence": ["Unsupported"],
        "hint": "hint",
        "source": "sig",
        "plan": {"prefill": "breakable", "decode": "full", "decode_max_bs": 32},
        "done": "stepped down",
    }


def test_ready_is_serving_and_a_right_answer():
    for state in State:
        for canary in (True, False):
            assert board(state, canary_ok=canary).ready == (state is State.SERVING and canary)


def test_an_engine_that_is_gone_does_no_work():
    for state in State:
        document = board(state).to_json()
        live = state in (State.SERVING, State.DRAINING)
        assert (document["tokens_per_second"]["generation"] > 0) == live
        assert (document["requests"]["running"] > 0) == live
        assert (document["kv_usage"] > 0) == live


def test_a_point_is_the_mean_of_its_ten_seconds():
    history = RateHistory()
    for at, rate in ((1000.0, 10), (1005.0, 20), (1010.0, 40)):
        history.add(at, rate, rate * 2)
    assert history.points() == [(1000.0, 15.0, 30.0), (1010.0, 40.0, 80.0)]


def test_points_before_a_long_pause_leave_with_the_hour():
    history = RateHistory()
    history.add(1000.0, 1, 1)
    history.add(1500.0, 2, 2)
    history.add(1500.0 + HISTORY_SECONDS - HISTORY_STEP, 3, 3)
    assert [point[1] for point in history.points()] == [2.0, 3.0]


def test_a_clock_set_back_leaves_no_points_in_the_future():
    history = RateHistory()
    for at in (1000.0, 1010.0, 1020.0, 1030.0, 1012.0):
        history.add(at, at, 0)
    assert [point[0] for point in history.points()] == [1000.0, 1010.0]


@given(st.lists(st.floats(0, 2e4), max_size=400))
def test_points_are_in_order_and_within_an_hour(times):
    history = RateHistory()
    for at in times:
        history.add(at, 1.0, 1.0)
    moments = [point[0] for point in history.points()]
    assert moments == sorted(set(moments))
    assert not moments or moments[-1] - moments[0] < HISTORY_SECONDS
    assert bool(moments) == bool(times)


def test_failures_kept_are_bounded():
    status = board()
    for number in range(1000):
        status.incidents.append(Incident(float(number), FAILURE, WANTED, "done"))
    assert [f["at"] for f in status.to_json()["failures"]] == list(map(float, range(950, 1000)))
