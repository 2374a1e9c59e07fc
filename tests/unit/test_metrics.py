"""Hearth's metrics page: names, units, counters across engine restarts, and nothing unbounded."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from hearth.engine.samples import EngineSamples, Histogram, parse_samples
from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import GraphPlan
from hearth.metrics import Growth, Metrics
from hearth.states import State

WANTED, LOWER = GraphPlan("breakable", "full", 32), GraphPlan("disabled", "full", 16)
FAILURE = Failure(FailureKind.GRAPH_CAPTURE, Phase.CAPTURE_PREFILL, Axis.PREFILL)

# DESIGN's list: name -> (type, labels). `hearth_gpu_fault` needs a GPU and comes with the host part.
DESIGN = {
    "hearth_build_info": ("gauge", {"version", "engine_version", "image_digest"}),
    "hearth_state": ("gauge", {"state"}),
    "hearth_graph_plan_info": ("gauge", {"wanted", "effective_prefill", "effective_decode"}),
    "hearth_ladder_steps": ("gauge", set()),
    "hearth_engine_restarts_total": ("counter", {"kind"}),
    "hearth_fallbacks_total": ("counter", {"axis", "from", "to", "kind"}),
    "hearth_phase_seconds": ("gauge", {"phase"}),
    "hearth_recovery_seconds": ("histogram", {"le"}),
    "hearth_tokens_total": ("counter", {"kind"}),
    "hearth_tokens_per_second": ("gauge", {"kind"}),
    "hearth_requests_running": ("gauge", set()),
    "hearth_requests_queued": ("gauge", set()),
    "hearth_ttft_seconds": ("histogram", {"le"}),
    "hearth_itl_seconds": ("histogram", {"le"}),
    "hearth_kv_usage_ratio": ("gauge", set()),
    "hearth_graph_passes_total": ("counter", {"mode"}),
    "hearth_canary_ok": ("gauge", set()),
    "hearth_canary_seconds": ("gauge", set()),
    "hearth_last_token_timestamp_seconds": ("gauge", set()),
    "hearth_runtime_compiles_total": ("counter", set()),
}


def samples(tokens=0.0, passes=0.0, **facts):
    seconds = Histogram({"0.1": 1.0, "+Inf": 2.0}, 0.7)
    return EngineSamples(
        {"generation": tokens}, {"decode_cuda_graph": passes}, ttft=seconds, itl=seconds, **facts
    )


@pytest.fixture
def metrics():
    return Metrics("0.5.23", "sha256:abc")


def used(metrics):
    """Everything has happened once."""
    metrics.set_state(State.IDLE, State.STARTING)
    metrics.set_state(State.STARTING, State.SERVING)
    metrics.set_plan(WANTED, LOWER, 2, 1)
    metrics.count_fallback(WANTED, LOWER, FAILURE)
    metrics.restarts.labels("hang").inc()
    metrics.recovery.observe(12)
    metrics.set_phases({Phase.LOAD: 3.5})
    metrics.take(samples(100, 10, running=2.0, queued=1.0, kv_usage=0.5), 5.0)
    return metrics


def families(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels)


def exposed(name):
    """The family's name in the parser: without a counter's _total."""
    return name.removesuffix("_total")


@pytest.mark.parametrize("name", DESIGN)
def test_the_names_types_and_labels_of_the_design(metrics, name):
    kind, labels = DESIGN[name]
    family = families(used(metrics))[exposed(name)]
    assert family.type == kind
    assert family.samples, "no sample although everything has happened"
    assert {label for sample in family.samples for label in sample.labels} == labels


def test_what_promtool_would_say_about_the_page(metrics):
    page = used(metrics).render().decode()
    for name, family in families(metrics).items():
        assert re.fullmatch(r"hearth_[a-z0-9_]+", name), name
        assert family.documentation.endswith("."), f"{name} has no help"
        assert not re.search(r"_(milliseconds|ms|minutes|percent|kilobytes|megabytes)(_|$)", name)
        assert not (family.type == "gauge" and name.endswith(("_total", "_count", "_sum", "_bucket")))
        for sample in family.samples:
            assert family.type != "counter" or sample.name == f"{name}_total"
    assert "_created" not in page
    keys = [(s.name, tuple(sorted(s.labels.items()))) for f in families(metrics).values() for s in f.samples]
    assert len(keys) == len(set(keys)), "a series is there twice"


def test_counters_are_there_before_they_count(metrics):
    """`increase()` can't see the step from absent to 1."""
    for kind in FailureKind:
        assert value(metrics, "hearth_engine_restarts_total", kind=kind.value) == 0
        assert value(metrics, "hearth_failures_total", kind=kind.value) == 0
    for kind in ("generation", "prefill", "prefill_cached"):
        assert value(metrics, "hearth_tokens_total", kind=kind) == 0
    assert value(metrics, "hearth_runtime_compiles_total") == 0


def test_exactly_one_state_is_1(metrics):
    metrics.set_state(State.IDLE, State.STARTING)
    states = {s.value: value(metrics, "hearth_state", state=s.value) for s in State}
    assert {name for name, number in states.items() if number} == {"starting"}
    assert len(states) == len(State)


def test_one_plan_is_shown_and_fallbacks_by_axis(metrics):
    metrics.set_plan(WANTED, WANTED, 0, 0)
    used(metrics)
    family = families(metrics)["hearth_graph_plan_info"]
    assert [s.labels for s in family.samples] == [
        {"wanted": "piecewise", "effective_prefill": "disabled", "effective_decode": "full"}
    ]
    fell = {
        tuple(s.labels[name] for name in ("axis", "from", "to", "kind"))
        for s in families(metrics)["hearth_fallbacks"].samples
    }
    assert fell == {
        ("prefill", "breakable", "disabled", "graph_capture"),
        ("memory", "32", "16", "graph_capture"),
    }


def test_counters_go_on_across_restarts_of_the_engine(metrics):
    metrics.take(samples(100, 10), 5.0)
    metrics.take(samples(150, 15), 5.0)
    metrics.engine_restarted()
    metrics.take(samples(30, 3), 5.0)
    assert value(metrics, "hearth_tokens_total", kind="generation") == 180
    assert value(metrics, "hearth_graph_passes_total", mode="decode_cuda_graph") == 18
    metrics.take(samples(20, 2), 5.0)  # it restarted and nobody said so
    assert value(metrics, "hearth_tokens_total", kind="generation") == 200
    metrics.engine_restarted()
    metrics.take(samples(500, 2), 5.0)  # the new engine is already beyond the old one
    assert value(metrics, "hearth_tokens_total", kind="generation") == 700


def test_a_counter_that_is_missing_once_is_not_counted_again(metrics):
    metrics.take(samples(100), 5.0)
    metrics.take(EngineSamples(), 5.0)
    metrics.take(samples(110), 5.0)
    assert value(metrics, "hearth_tokens_total", kind="generation") == 110


def test_rates_are_tokens_per_second(metrics):
    metrics.take(samples(100), 5.0)
    assert metrics.take(samples(350), 5.0)["generation"] == 50.0
    assert value(metrics, "hearth_tokens_per_second", kind="generation") == 50.0
    assert metrics.take(samples(350), 0.0)["generation"] == 0.0
    assert metrics.take(samples(999), -1.0)["generation"] == 0.0


def test_the_last_token_moves_only_with_tokens(metrics):
    assert value(metrics, "hearth_last_token_timestamp_seconds") == 0
    metrics.take(samples(5), 5.0)
    metrics.last_token.set(1.0)
    metrics.take(samples(5), 5.0)
    assert value(metrics, "hearth_last_token_timestamp_seconds") == 1.0


@pytest.mark.parametrize("state", [State.RECOVERING, State.BACKOFF, State.STARTING, State.GAVE_UP])
def test_an_engine_that_is_gone_does_no_work(metrics, state):
    used(metrics)
    metrics.set_state(State.SERVING, state)
    names = ("hearth_requests_running", "hearth_requests_queued", "hearth_kv_usage_ratio")
    assert [value(metrics, name) for name in names] == [0, 0, 0]
    assert value(metrics, "hearth_tokens_per_second", kind="generation") == 0
    assert value(metrics, "hearth_tokens_total", kind="generation") == 100


def test_phases_of_an_earlier_start_leave(metrics):
    metrics.set_phases({Phase.LOAD: 3.0, Phase.CAPTURE_PREFILL: 9.0})
    metrics.set_phases({Phase.LOAD: 4.0})
    assert value(metrics, "hearth_phase_seconds", phase="load") == 4.0
    assert value(metrics, "hearth_phase_seconds", phase="capture_prefill") is None


def test_latencies_are_the_engines_own_histograms(metrics):
    metrics.take(samples(), 5.0)
    assert value(metrics, "hearth_ttft_seconds_bucket", le="0.1") == 1.0
    assert value(metrics, "hearth_itl_seconds_count") == 2.0
    assert value(metrics, "hearth_itl_seconds_sum") == 0.7
    metrics.take(EngineSamples(), 5.0)
    assert value(metrics, "hearth_ttft_seconds_bucket", le="0.1") is None


def test_an_engines_page_cannot_make_labels_without_end(metrics):
    page = "".join(f'sglang:cuda_graph_passes_total{{mode="m{n}"}} 1\n' for n in range(500))
    page += "".join(f'sglang:realtime_tokens_total{{mode="m{n}"}} 1\n' for n in range(500))
    before = metrics.render().count(b"\n")
    metrics.take(parse_samples(page), 5.0)
    assert metrics.render().count(b"\n") < before + 20


LINES = st.builds(
    'sglang:{}{{mode="{}",le="{}"}} {}'.format,
    st.sampled_from(["realtime_tokens_total", "cuda_graph_passes_total", "num_running_reqs", "token_usage"]),
    st.sampled_from(["decode", "decode_none", "x"]),
    st.sampled_from(["1", "+Inf", "x"]),
    st.floats() | st.integers(-5, 10**20),
)


@given(st.lists(st.lists(LINES, max_size=5), max_size=6))
def test_no_page_stops_the_counters(pages):
    metrics, last = Metrics(), 0.0
    for page in pages:
        metrics.take(parse_samples("\n".join(page)), 1.0)
        now = value(metrics, "hearth_tokens_total", kind="generation")
        assert math.isfinite(now)
        assert now >= last
        last = now
    assert list(text_string_to_metric_families(metrics.render().decode()))


@given(st.lists(st.floats(0, 1e12), min_size=1))
def test_growth_is_never_negative_and_sums_up(values):
    growth = Growth()
    grown = [growth.since({"a": number})["a"] for number in values]
    assert all(number >= 0 for number in grown)
    if values == sorted(values):
        assert sum(grown) == pytest.approx(values[-1])
