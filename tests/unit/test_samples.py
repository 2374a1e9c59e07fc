"""SGLang's metrics page in both spellings and formats, and pages that are anything else."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as PromHistogram
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from hearth.engine.samples import EngineSamples, Histogram, parse_samples

# Lines as SGLang 0.5.23 prints them.
LABELS = 'engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
PAGE = f"""
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{{LABELS}}} 2.0
sglang:num_queue_reqs{{{LABELS}}} 5.0
sglang:token_usage{{{LABELS}}} 0.25
sglang:full_token_usage{{{LABELS}}} 0.9
sglang:num_running_reqs_offline_batch{{{LABELS}}} 99.0
sglang:realtime_tokens_total{{{LABELS},mode="decode"}} 1349.0
sglang:realtime_tokens_total{{{LABELS},mode="prefill_compute"}} 55.0
sglang:realtime_tokens_total{{{LABELS},mode="prefill_cache"}} 34.0
sglang:dp_cooperation_realtime_tokens_total{{{LABELS},mode="decode"}} 7.0
sglang:generation_tokens_total{{engine_type="unified",is_streaming="false",model_name="tiny"}} 1000.0
sglang:cuda_graph_passes_total{{{LABELS},mode="decode_none"}} 460.0
sglang:cuda_graph_passes_total{{{LABELS},mode="prefill_cuda_graph"}} 11.0
sglang:time_to_first_token_seconds_sum{{is_streaming="false",model_name="tiny"}} 4.0
sglang:time_to_first_token_seconds_bucket{{is_streaming="false",le="0.1",model_name="tiny"}} 1.0
sglang:time_to_first_token_seconds_bucket{{is_streaming="false",le="+Inf",model_name="tiny"}} 13.0
sglang:time_to_first_token_seconds_bucket{{is_streaming="false",le="10.0",model_name="tiny"}} 12.0
sglang:time_to_first_token_seconds_count{{is_streaming="false",model_name="tiny"}} 13.0
sglang:time_to_first_token_seconds_bucket{{is_streaming="true",le="0.1",model_name="tiny"}} 0.0
sglang:time_to_first_token_seconds_bucket{{is_streaming="true",le="10.0",model_name="tiny"}} 1.0
sglang:time_to_first_token_seconds_bucket{{is_streaming="true",le="+Inf",model_name="tiny"}} 1.0
sglang:time_to_first_token_seconds_sum{{is_streaming="true",model_name="tiny"}} 0.5
process_cpu_seconds_total 3.0
"""
READ = EngineSamples(
    tokens={"generation": 1349.0, "prefill": 55.0, "prefill_cached": 34.0},
    passes={"decode_none": 460.0, "prefill_cuda_graph": 11.0},
    running=2.0,
    queued=5.0,
    kv_usage=0.25,
    ttft=Histogram({"0.1": 1.0, "10.0": 13.0, "+Inf": 14.0}, 4.5),
)
UNDERSCORE = PAGE.replace("sglang:", "sglang_")


@pytest.mark.parametrize(
    "page",
    [
        PAGE,
        UNDERSCORE,
        PAGE + UNDERSCORE,
        PAGE.replace("\n", "\r\n"),
        PAGE.replace(".0\n", ".0 1700000000000\n"),
        PAGE.replace("} ", "}\t "),
        UNDERSCORE.replace(".0\n", '.0 # {trace_id="a"} 0.07 1700000000.1\n') + "# EOF\n",
    ],
    ids=["colon", "underscore", "both", "crlf", "times", "tabs", "exemplars"],
)
def test_both_spellings_and_formats(page):
    assert parse_samples(page) == READ


def client_page(render, colon=":"):
    """A page that prometheus_client itself writes."""
    registry = CollectorRegistry()
    Gauge(f"sglang{colon}num_running_reqs", "R", ["model_name"], registry=registry).labels("a } b").set(3)
    Counter(f"sglang{colon}realtime_tokens", "T", ["mode"], registry=registry).labels("decode").inc(7)
    seconds = PromHistogram(
        f"sglang{colon}inter_token_latency_seconds", "L", buckets=(0.1, 1), registry=registry
    )
    seconds.observe(0.5, {"trace": 'a"b'} if render is generate_openmetrics else None)
    return render(registry).decode()


@pytest.mark.parametrize("render", [generate_latest, generate_openmetrics])
@pytest.mark.parametrize("colon", [":", "_"])
def test_pages_of_the_real_client(render, colon):
    page = client_page(render, colon)
    samples = parse_samples(page)
    assert (samples.running, samples.tokens) == (3.0, {"generation": 7.0}), page
    assert samples.itl == Histogram({"0.1": 0.0, "1.0": 1.0, "+Inf": 1.0}, 0.5)


def test_an_older_engine_counts_tokens_only_when_a_request_is_done():
    page = """
sglang:prompt_tokens_total{model_name="m"} 9.0
sglang:generation_tokens_total{model_name="m",is_streaming="true"} 4.0
sglang:generation_tokens_total{model_name="m",is_streaming="false"} 6.0
sglang:cached_tokens_total{model_name="m",cache_source="device"} 1.0
sglang:cached_tokens_total{model_name="m",cache_source="host"} 2.0
"""
    assert parse_samples(page).tokens == {"prefill": 9.0, "generation": 10.0, "prefill_cached": 3.0}


def test_eight_ranks_that_report_the_same_work_count_once_and_data_parallel_ranks_add_up():
    line = 'sglang:num_running_reqs{{dp_rank="{}",tp_rank="{}"}} {}\n'
    ranks = "".join(line.format(rank // 4, rank, 3 if rank < 4 else 5) for rank in range(8))
    assert parse_samples(ranks).running == 8.0


def test_the_total_over_priorities_is_not_added_to_its_parts():
    line = 'sglang:num_queue_reqs{{priority="{}"}} {}\n'
    assert parse_samples(line.format("", 5) + line.format(1, 2) + line.format(2, 3)).queued == 5.0
    assert parse_samples(line.format(1, 2) + line.format(2, 3)).queued == 5.0


def test_modes_that_nobody_knows_make_no_labels_of_their_own():
    page = "".join(f'sglang:cuda_graph_passes_total{{mode="new{n}"}} 1.0\n' for n in range(100))
    assert parse_samples(page).passes == {"other": 100.0}
    assert parse_samples("sglang:cuda_graph_passes_total 2.0\n").passes == {"other": 2.0}


TTFT = "sglang:time_to_first_token_seconds"
HOSTILE = [
    "",
    "\0" * 1000,
    "<html>500</html>",
    "sglang:num_running_reqs",
    "sglang:num_running_reqs ",
    "sglang:num_running_reqs{",
    "sglang:num_running_reqs{} ",
    "sglang:num_running_reqs NaN",
    "sglang:num_running_reqs +Inf",
    "sglang:num_running_reqs -1",
    "sglang:num_running_reqs 1e999",
    "sglang:num_running_reqs ١",
    'sglang:num_running_reqs{a="b} 1',
    'sglang:num_running_reqs{a=b"} 1',
    "sglang:num_running_reqs_bucket 1",
    "sglang:num_running_reqs 1_0x",
    "num_running_reqs 1",
    "xsglang:num_running_reqs 1",
    "# sglang:num_running_reqs 1",
    "sglang:num_running_reqs" + " " * 100_000 + "1",
    'sglang:num_running_reqs{a="' + "b" * 1_000_000 + '"} 1',
    f'{TTFT}_bucket{{le="much"}} 1\n{TTFT}_bucket{{le="+Inf"}} 1',
    f'{TTFT}_bucket{{le="nan"}} 1\n{TTFT}_bucket{{le="+Inf"}} 1',
    "sglang:time_to_first_token_seconds_bucket 1",
    'sglang:time_to_first_token_seconds_bucket{le="1.0"} 1',
    "".join(f'sglang:inter_token_latency_seconds_bucket{{le="{n}"}} 1\n' for n in [*range(1000), "+Inf"]),
]


@pytest.mark.parametrize("page", HOSTILE, ids=lambda page: repr(page[:40]))
def test_what_cannot_be_read_is_left_out(page):
    assert parse_samples(page) == EngineSamples()


def test_one_bad_line_costs_no_other():
    assert parse_samples("\n".join([*HOSTILE, PAGE])).running == 2.0
    assert parse_samples(PAGE.replace("} 34.0", "} NaN")).tokens == {"generation": 1349.0, "prefill": 55.0}


def test_a_large_page_takes_little_time():
    page = "".join(f'other_metric{{n="{n}"}} {n}\n' for n in range(200_000)) + PAGE
    begun = time.process_time()
    assert parse_samples(page) == READ
    assert time.process_time() - begun < 2


LINE = st.builds(
    "{}{}{} {}".format,
    st.sampled_from(
        ["sglang:num_queue_reqs", "sglang_token_usage", "sglang:time_to_first_token_seconds_bucket"]
    ),
    st.sampled_from(["", "{}", '{le="+Inf"}', '{le="', "{,}", '{a="\\"}']) | st.text(max_size=8),
    st.text(max_size=4),
    st.floats().map(str) | st.text(max_size=6),
)


@given(st.lists(LINE | st.text(max_size=40)))
def test_no_page_makes_it_fail_or_gives_a_number_that_poisons_a_counter(lines):
    samples = parse_samples("\n".join(lines))
    numbers = [samples.running, samples.queued, *samples.tokens.values(), *samples.passes.values()]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert 0 <= samples.kv_usage <= 1
    assert not samples.ttft.buckets or list(samples.ttft.buckets)[-1] == "+Inf"


def test_progress_grows_with_any_work():
    assert EngineSamples().progress == 0.0
    assert READ.progress == 1349 + 55 + 34 + 460 + 11
