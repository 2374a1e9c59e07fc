"""Metrics for alerts: when the supervisor started, when it last looked; and an older engine's page."""

import time

from prometheus_client.parser import text_string_to_metric_families

from hearth.engine.samples import EngineSamples, parse_samples
from hearth.metrics import Metrics
from tests.monitoring.standin import PAGES


def value(metrics, name):
    families = text_string_to_metric_families(metrics.render().decode())
    return next(sample.value for family in families for sample in family.samples if sample.name == name)


def test_the_start_is_told_once():
    before = time.time()
    metrics = Metrics()
    started = value(metrics, "hearth_start_time_seconds")
    assert before <= started <= time.time()
    metrics.engine_restarted()
    assert value(metrics, "hearth_start_time_seconds") == started


def test_each_look_at_the_engine_is_a_turn_of_the_watch():
    metrics = Metrics()
    assert value(metrics, "hearth_watch_timestamp_seconds") == 0
    before = time.time()
    metrics.take(EngineSamples(), 1.0)
    assert value(metrics, "hearth_watch_timestamp_seconds") >= before


def test_the_page_of_an_older_engine_is_read():
    metrics = Metrics()
    metrics.take(parse_samples((PAGES / "engine-0.5.21.txt").read_text()), 1.0)
    read = metrics.registry.get_sample_value
    assert read("hearth_tokens_total", {"kind": "generation"}) == 1448
    assert read("hearth_tokens_total", {"kind": "prefill_cached"}) == 304
    assert read("hearth_graph_passes_total", {"mode": "decode_none"}) == 736
    assert read("hearth_ttft_seconds_count", {}) == 37
    assert read("hearth_itl_seconds_bucket", {"le": "+Inf"}) == 702
