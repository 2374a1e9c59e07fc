"""Hearth's own metrics, and the few of the engine's that it exports under one name."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client import Histogram as PromHistogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hearth import __version__
from hearth.engine.samples import EngineSamples, Histogram
from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import GraphPlan
from hearth.states import State

TOKEN_KINDS = ("generation", "prefill", "prefill_cached")
_LIVE = (State.SERVING, State.DRAINING)
RECOVERY_BUCKETS = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)


class Growth:
    """What a counter of the engine grew by since the last look; the engine's restart is a new beginning."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def restart(self) -> None:
        self._last.clear()

    def since(self, now: Mapping[str, float]) -> dict[str, float]:
        """Growth by key. A counter that went down has started again from zero.

        A key that is missing once (a scrape may be short of one) goes on where it was.
        """
        grown = {}
        for key, value in now.items():
            last = self._last.get(key, 0.0)
            grown[key] = value - last if value >= last else value
        self._last.update(now)
        return grown


class _Latencies(Collector):
    """The engine's latency histograms under Hearth's names, as of the last scrape."""

    def __init__(self) -> None:
        self.samples: EngineSamples | None = None

    def collect(self) -> Iterator[Metric]:
        if self.samples is None:
            return
        yield _family(
            "hearth_ttft_seconds", "Time to first token, as the engine counts it.", self.samples.ttft
        )
        yield _family(
            "hearth_itl_seconds", "Time between two tokens, as the engine counts it.", self.samples.itl
        )


def _family(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text)
    if histogram.buckets:
        family.add_metric([], list(histogram.buckets.items()), sum_value=histogram.total)
    return family


class Metrics:
    """All of Hearth's metrics in a registry of their own."""

    def __init__(self, engine_version: str = "", image_digest: str = "") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._growth_tokens, self._growth_passes = Growth(), Growth()
        self._latencies = _Latencies()
        self.registry.register(self._latencies)
        self.gpu_fault: Gauge | None = None
        self._make_states(engine_version, image_digest)
        self._make_traffic()
        self._begin_at_zero()

    def _make_states(self, engine_version: str, image_digest: str) -> None:
        registry = self.registry
        info = Gauge(
            "hearth_build_info", "Versions.", ["version", "engine_version", "image_digest"], registry=registry
        )
        info.labels(__version__, engine_version, image_digest).set(1)
        started = Gauge("hearth_start_time_seconds", "When this supervisor started.", registry=registry)
        started.set(time.time())
        self.state = Gauge(
            "hearth_state", "1 for the state the supervisor is in.", ["state"], registry=registry
        )
        self.plan = Gauge(
            "hearth_graph_plan_info",
            "The plan asked for, and the backends in effect.",
            ["wanted", "effective_prefill", "effective_decode"],
            registry=registry,
        )
        self.plan_differs = Gauge(
            "hearth_graph_plan_downgraded",
            "Axes on which the engine runs less than the plan it was started with, without having said so.",
            registry=registry,
        )
        self.ladder_steps = Gauge("hearth_ladder_steps", "Steps below the wanted plan.", registry=registry)
        self.failures = Counter(
            "hearth_failures",
            "Failures of the engine by kind, those that ended the run among them.",
            ["kind"],
            registry=registry,
        )
        self.restarts = Counter(
            "hearth_engine_restarts", "Engine restarts by the failure's kind.", ["kind"], registry=registry
        )
        self.fallbacks = Counter(
            "hearth_fallbacks", "Steps down the ladder.", ["axis", "from", "to", "kind"], registry=registry
        )
        self.transitions = Counter(
            "hearth_transitions", "Moves between states.", ["from", "to"], registry=registry
        )
        self.phase_seconds = Gauge(
            "hearth_phase_seconds",
            "Seconds of each start-up phase, last start.",
            ["phase"],
            registry=registry,
        )
        self.recovery = PromHistogram(
            "hearth_recovery_seconds",
            "From a failure to serving again.",
            buckets=RECOVERY_BUCKETS,
            registry=registry,
        )

    def _make_traffic(self) -> None:
        registry = self.registry
        self.tokens = Counter("hearth_tokens", "Tokens, across engine restarts.", ["kind"], registry=registry)
        self.rate = Gauge(
            "hearth_tokens_per_second", "Tokens per second, last look.", ["kind"], registry=registry
        )
        self.running = Gauge("hearth_requests_running", "Requests being worked on.", registry=registry)
        self.queued = Gauge("hearth_requests_queued", "Requests waiting.", registry=registry)
        self.kv_usage = Gauge("hearth_kv_usage_ratio", "Share of the KV pool in use.", registry=registry)
        self.passes = Counter(
            "hearth_graph_passes", "Forward passes, across engine restarts.", ["mode"], registry=registry
        )
        self.canary_ok = Gauge(
            "hearth_canary_ok", "1 if the last known-answer request was right.", registry=registry
        )
        self.canary_seconds = Gauge(
            "hearth_canary_seconds", "Seconds of the last known-answer request.", registry=registry
        )
        self.last_token = Gauge(
            "hearth_last_token_timestamp_seconds", "When the engine last made a token.", registry=registry
        )
        self.watched = Gauge(
            "hearth_watch_timestamp_seconds", "When the engine's metrics were last read.", registry=registry
        )
        self.compiles = Counter("hearth_runtime_compiles", "Kernels compiled after READY.", registry=registry)

    def _begin_at_zero(self) -> None:
        """Counters that exist from the start: Prometheus can't see the first step of one that doesn't."""
        for failure in FailureKind:
            self.failures.labels(failure.value)
            self.restarts.labels(failure.value)
        for kind in TOKEN_KINDS:
            self.tokens.labels(kind)
        for state in State:
            self.state.labels(state.value)
        self._quiet()

    def _quiet(self) -> None:
        """No engine serves: what it was doing is no longer so."""
        for gauge in (self.running, self.queued, self.kv_usage):
            gauge.set(0)
        for kind in TOKEN_KINDS:
            self.rate.labels(kind).set(0)

    def set_state(self, previous: State, state: State) -> None:
        """Count a move between states; `previous` equal to `state` only shows it."""
        if state not in _LIVE:
            self._quiet()
        for each in State:
            self.state.labels(each.value).set(each is state)
        if previous is not state:
            self.transitions.labels(previous.value, state.value).inc()

    def set_plan(self, wanted: GraphPlan, effective: GraphPlan, steps: int, downgrades: int) -> None:
        """Show the plans wanted and in effect, steps down, and how many axes were silently switched off."""
        self.plan.clear()
        self.plan.labels(wanted.name, effective.prefill, effective.decode).set(1)
        self.ladder_steps.set(steps)
        self.plan_differs.set(downgrades)

    def count_fallback(self, upper: GraphPlan, lower: GraphPlan, failure: Failure) -> None:
        """Count a step down on the axis (or axes) on which the two plans differ."""
        for axis, before, after in (
            (Axis.PREFILL, upper.prefill, lower.prefill),
            (Axis.DECODE, upper.decode, lower.decode),
            (Axis.MEMORY, upper.decode_max_bs, lower.decode_max_bs),
        ):
            if before != after:
                self.fallbacks.labels(axis.value, str(before), str(after), failure.kind.value).inc()

    def watch_gpus(self, labels: Iterable[str]) -> None:
        """Export `hearth_gpu_fault` for these GPUs; it stays absent where nobody looks."""
        self.gpu_fault = Gauge(
            "hearth_gpu_fault",
            "1 once the driver reported an error (Xid) that needs a reset or a reboot.",
            ["gpu"],
            registry=self.registry,
        )
        for label in labels:
            self.gpu_fault.labels(label)

    def gpu_faulted(self, label: str) -> None:
        """A GPU reported an error that no restart can fix."""
        if self.gpu_fault is not None:
            self.gpu_fault.labels(label).set(1)

    def set_phases(self, seconds: Mapping[Phase, float]) -> None:
        """Seconds of each phase that this start has gone through."""
        self.phase_seconds.clear()
        for phase, value in seconds.items():
            self.phase_seconds.labels(phase.value).set(value)

    def engine_restarted(self) -> None:
        """The engine's counters begin at zero again."""
        self._growth_tokens.restart()
        self._growth_passes.restart()

    def take(self, samples: EngineSamples, seconds: float) -> dict[str, float]:
        """Take over one scrape, `seconds` after the one before; returns tokens per second by kind."""
        self._latencies.samples = samples
        self.watched.set_to_current_time()
        self.running.set(samples.running)
        self.queued.set(samples.queued)
        self.kv_usage.set(samples.kv_usage)
        for mode, grown in self._growth_passes.since(samples.passes).items():
            self.passes.labels(mode).inc(grown)
        return self._count_tokens(self._growth_tokens.since(samples.tokens), seconds)

    def _count_tokens(self, grown: Mapping[str, float], seconds: float) -> dict[str, float]:
        rates = dict.fromkeys(TOKEN_KINDS, 0.0)
        for kind, amount in grown.items():
            self.tokens.labels(kind).inc(amount)
            rates[kind] = round(amount / seconds, 2) if seconds > 0 else 0.0
        for kind, rate in rates.items():
            self.rate.labels(kind).set(rate)
        if grown.get("generation", 0.0) > 0:
            self.last_token.set_to_current_time()
        return rates

    def render(self) -> bytes:
        """The `/metrics` page, text format 0.0.4."""
        return generate_latest(self.registry)
