"""What the launcher tells systemd and how it ends: values in, values out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.config import Limits, PhaseLimit
from hearth.errors import ExitCode
from hearth.failure import Phase
from hearth.host.launch_plan import (
    BOOT_GRACE,
    MARGIN,
    RECREATE_COUNT,
    RECREATE_WINDOW,
    Gone,
    Look,
    Recreations,
    Watch,
    allowance,
    ending,
    sentence,
    told,
)
from hearth.states import State

LIMITS = Limits(phases={Phase.LOAD: PhaseLimit(deadline=600), Phase.WARM: PhaseLimit(deadline=None)})
LOADING = {
    "state": "starting",
    "phase": "load",
    "progress": "shard 1/9",
    "restarts": 0,
    "sentence": "Starting.",
}
SERVING = {"state": "serving", "phase": "serving", "progress": "", "restarts": 0, "sentence": "Serving x."}


def starts(messages: list[str], word: str) -> bool:
    return any(message.startswith(word) for message in messages)


def test_a_start_in_order():
    watch = Watch(LIMITS, 0)
    assert watch.tick(Look(), 1) == ["WATCHDOG=1"]
    loading = watch.tick(Look(alive=True, document=LOADING), 5)
    assert starts(loading, "EXTEND_TIMEOUT_USEC=60000000")
    assert "STATUS=Starting. Phase load: shard 1/9." in loading
    assert not starts(watch.tick(Look(alive=True, document=LOADING), 7), "STATUS")  # said once
    serving = watch.tick(Look(alive=True, ready=True, document=SERVING), 60)
    assert serving == ["WATCHDOG=1", "READY=1", "STATUS=Serving x."]
    assert watch.tick(Look(alive=True, ready=True, document=SERVING), 62) == ["WATCHDOG=1"]


def test_ready_is_sent_once_in_a_launchers_life():
    watch = Watch(LIMITS, 0, ready_sent=True)
    assert "READY=1" not in watch.tick(Look(alive=True, ready=True, document=SERVING), 60)


@pytest.mark.parametrize("answered", [True, False])
def test_a_silent_supervisor_gets_no_watchdog(answered):
    watch = Watch(LIMITS, 0)
    if answered:
        watch.tick(Look(alive=True, document=LOADING), 1)
    silent = watch.tick(Look(), 2 if answered else BOOT_GRACE + 1)
    assert silent == []


def test_a_start_beyond_the_supervisors_own_limit_gets_no_more_time():
    watch = Watch(LIMITS, 0)
    look = Look(alive=True, document=LOADING)
    assert starts(watch.tick(look, 1), "EXTEND")
    assert starts(watch.tick(look, 600 + MARGIN), "EXTEND")
    assert not starts(watch.tick(look, 602 + MARGIN), "EXTEND")
    moved = Look(alive=True, document={**LOADING, "progress": "shard 2/9"})
    assert starts(watch.tick(moved, 605 + MARGIN), "EXTEND")


def test_a_status_without_a_turning_loop_buys_no_time():
    watch = Watch(LIMITS, 0)
    assert not starts(watch.tick(Look(alive=False, document=LOADING), 1), "EXTEND")


def test_the_allowance_is_the_supervisors_own_limit():
    assert allowance(LIMITS, LOADING) == 600 + MARGIN
    assert allowance(LIMITS, {**LOADING, "phase": "warm"}) == float("inf")
    assert allowance(LIMITS, {"state": "backoff", "phase": "spawn"}) == LIMITS.backoff_max * 1.2 + MARGIN
    assert allowance(LIMITS, {"state": "recovering", "phase": "load"}) > LIMITS.memory_free + LIMITS.kill
    assert allowance(LIMITS, {"state": "of a later version", "phase": "load"}) == MARGIN


@given(
    st.dictionaries(
        st.sampled_from(["state", "phase", "progress", "sentence", "restarts"]), st.none() | st.text()
    )
)
def test_any_status_can_be_taken_in(document):
    look = Look(alive=True, document=document)
    assert all("\n" not in message for message in Watch(LIMITS, 0).tick(look, 1))
    assert isinstance(sentence(look), str)


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_code_of_the_table_has_its_end(code):
    end = ending(Gone(code.value), asked=False)
    expected = ExitCode.RETRY if code is ExitCode.OK else code
    assert end.code is expected
    assert end.recreate is (code is ExitCode.RECREATE)
    assert end.sentence.endswith(".")


@pytest.mark.parametrize(
    ("code", "expected", "word"),
    [
        (137, ExitCode.RETRY, "killed from outside"),
        (143, ExitCode.RETRY, "stopped from outside"),
        (139, ExitCode.BUG, "SIGSEGV"),
        (134, ExitCode.BUG, "SIGABRT"),
        (127, ExitCode.MISSING, "image is damaged"),
        (126, ExitCode.MISSING, "image is damaged"),
        (42, ExitCode.BUG, "42"),
        (255, ExitCode.BUG, "255"),
    ],
)
def test_codes_that_hearth_does_not_use_are_mapped(code, expected, word):
    end = ending(Gone(code), asked=False)
    assert end.code is expected
    assert word in end.sentence


@given(st.integers(0, 255), st.booleans(), st.booleans())
def test_no_code_falls_through(code, oom, asked):
    assert isinstance(ending(Gone(code, oom), asked).code, ExitCode)


def test_a_kill_for_memory_is_named():
    assert "lack of memory" in ending(Gone(137, oom=True), asked=False).sentence
    assert ending(Gone(137, oom=True), asked=False).code.restartable
    # The supervisor lived on and named its own cause: that counts.
    assert ending(Gone(ExitCode.GAVE_UP.value, oom=True), asked=False).code is ExitCode.GAVE_UP


def test_a_container_that_is_gone_is_made_again_unless_a_stop_was_asked_for():
    assert ending(Gone(None), asked=False).recreate
    assert not ending(Gone(None), asked=True).recreate


@pytest.mark.parametrize("code", [None, 0, 137, 143])
def test_a_stop_that_was_asked_for_is_a_good_end(code):
    assert ending(Gone(code), asked=True).code is ExitCode.OK


def test_a_failure_during_a_stop_is_still_one():
    assert ending(Gone(70), asked=True).code is ExitCode.GAVE_UP


@pytest.mark.parametrize(
    ("last", "named"),
    [
        ({"state": "gave_up", "sentence": "Stopped for good: hang."}, True),
        ({"state": "host_action_required", "sentence": "Xid 79."}, True),
        ({"state": "serving", "sentence": "Serving x."}, False),
        ({"state": "gave_up"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_the_supervisors_own_cause_comes_first(last, named):
    end = ending(Gone(70), asked=False)
    seen = told(end, last)
    assert seen.code is end.code
    assert (seen.sentence != end.sentence) is named
    assert seen.sentence.endswith(end.sentence)


def test_new_containers_are_limited_within_the_window():
    made = Recreations()
    assert [made.allow(float(at)) for at in range(RECREATE_COUNT + 1)] == [True] * RECREATE_COUNT + [False]
    assert made.allow(RECREATE_WINDOW * 2)
    assert made.count == 1


def test_every_state_has_an_allowance():
    assert all(allowance(LIMITS, {"state": state.value, "phase": "load"}) >= MARGIN for state in State)
