"""Metrics that only alerts need: when the supervisor started, and when it last looked at the engine."""

import time

from prometheus_client.parser import text_string_to_metric_families

from hearth.engine.samples import EngineSamples
from hearth.metrics import Metrics


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
