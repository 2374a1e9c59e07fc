"""The pulse: what counts as a hang, a wrong answer, or nothing to worry about."""

import pytest

from hearth.engine.probe import CanaryResult
from hearth.engine.samples import EngineSamples
from hearth.failure import FailureKind, Phase
from hearth.pulse import CANARY_TRIES, Pulse, numerics, unanswered

STALL = 60.0
OK = CanaryResult("ok", 0.1, "4")
WRONG = CanaryResult("wrong", 0.1, "answered '!!!!', expected '4'")
SILENT = CanaryResult("timeout", 60.0, "no answer in 60 s")
BROKEN = CanaryResult("error", 0.1, "HTTP 500")


def samples(tokens: float, running: float) -> EngineSamples:
    return EngineSamples(tokens={"generation": tokens}, running=running)


@pytest.fixture
def pulse() -> Pulse:
    return Pulse(STALL, last_progress=0.0)


def test_running_requests_without_a_token_are_a_hang_at_the_limit_and_not_before(pulse):
    pulse.observe(samples(100, running=3), now=0.0)
    pulse.observe(samples(100, running=3), now=59.0)
    assert pulse.stalled(59.9) is None
    failure = pulse.stalled(60.0)
    assert failure is not None
    assert (failure.kind, failure.phase) == (FailureKind.HANG, Phase.SERVING)
    assert failure.evidence == ("3 requests running and no token for 60 s",)


def test_every_token_starts_the_clock_again(pulse):
    for second in range(0, 600, 50):
        pulse.observe(samples(second, running=1), now=second)
        assert pulse.stalled(second + 50) is None


def test_an_idle_engine_never_stalls_and_its_first_request_gets_the_whole_limit(pulse):
    pulse.observe(samples(5, running=0), now=0.0)
    assert pulse.stalled(10_000.0) is None
    pulse.observe(samples(5, running=0), now=10_000.0)
    pulse.observe(samples(5, running=1), now=10_001.0)
    assert pulse.stalled(10_059.0) is None
    assert pulse.stalled(10_061.0) is not None


def test_a_metrics_page_that_is_missing_is_no_progress(pulse):
    pulse.observe(samples(5, running=1), now=0.0)
    pulse.observe(None, now=59.0)
    assert pulse.stalled(61.0) is not None


def test_a_restarted_counter_counts_as_progress(pulse):
    pulse.observe(samples(500, running=1), now=0.0)
    pulse.observe(samples(2, running=1), now=50.0)
    assert pulse.stalled(100.0) is None


def test_a_wrong_answer_is_a_verdict_at_once(pulse):
    failure = pulse.canary(WRONG)
    assert failure is not None
    assert failure.kind is FailureKind.NUMERICS
    assert "!!!!" in failure.evidence[0]


@pytest.mark.parametrize(("result", "kind"), [(SILENT, FailureKind.HANG), (BROKEN, FailureKind.UNKNOWN)])
def test_silence_and_errors_count_only_when_they_repeat(pulse, result, kind):
    for _ in range(CANARY_TRIES - 1):
        assert pulse.canary(result) is None
    failure = pulse.canary(result)
    assert failure is not None
    assert failure.kind is kind
    assert len(failure.evidence) == CANARY_TRIES


def test_a_right_answer_or_other_progress_forgives(pulse):
    pulse.observe(samples(1, running=1), now=0.0)
    assert pulse.canary(SILENT) is None
    assert pulse.canary(OK) is None
    assert pulse.canary(SILENT) is None
    pulse.observe(samples(2, running=1), now=1.0)
    assert pulse.canary(SILENT) is None


def test_the_same_words_serve_before_ready():
    assert numerics(WRONG, Phase.WARMUP).phase is Phase.WARMUP
    assert unanswered([SILENT, BROKEN], Phase.WARMUP).kind is FailureKind.UNKNOWN
