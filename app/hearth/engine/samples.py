"""SGLang's `/metrics` page as values, whichever of its two spellings (`sglang:x`, `sglang_x`) it uses."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_WANTED = (
    "realtime_tokens_total",
    "generation_tokens_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "num_running_reqs",
    "num_queue_reqs",
    "token_usage",
    "cuda_graph_passes_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
)
_PREFIX = re.compile(r"^sglang[:_]")
_LINE = re.compile(rf"^sglang[:_](?:{'|'.join(_WANTED)})(?:_bucket|_sum|_count)?[{{ ]")
_MODES = {"decode": "generation", "prefill_compute": "prefill", "prefill_cache": "prefill_cached"}


@dataclass
class Histogram:
    """Cumulative counts by upper bound in seconds (as text, `+Inf` last), and the sum in seconds."""

    buckets: dict[str, float] = field(default_factory=dict)
    total: float = 0.0


@dataclass
class EngineSamples:
    """One scrape of the engine. Counters count since the engine's start."""

    tokens: dict[str, float] = field(default_factory=dict)
    """generation, prefill (computed) and prefill_cached tokens."""
    passes: dict[str, float] = field(default_factory=dict)
    """Forward passes by mode: decode_cuda_graph, decode_none, prefill_cuda_graph, prefill_none."""
    running: float = 0.0
    queued: float = 0.0
    kv_usage: float = 0.0
    """Share of the KV pool in use, 0 to 1."""
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)

    @property
    def progress(self) -> float:
        """Grows whenever any work was done."""
        return sum(self.tokens.values()) + sum(self.passes.values())


def parse_samples(page: str) -> EngineSamples:
    """Read a `/metrics` page; whatever isn't SGLang's or can't be read is left out."""
    lines = [line for line in page.splitlines() if _LINE.match(line)]
    by_name: dict[str, list[Sample]] = defaultdict(list)
    for line in lines:
        for sample in _samples(line):
            by_name[_PREFIX.sub("", sample.name)].append(sample)
    return EngineSamples(
        tokens=_tokens(by_name),
        passes=_by_label(by_name["cuda_graph_passes_total"], "mode"),
        running=_total(by_name["num_running_reqs"]),
        queued=_total(by_name["num_queue_reqs"]),
        kv_usage=max((s.value for s in by_name["token_usage"]), default=0.0),
        ttft=_histogram(by_name, "time_to_first_token_seconds"),
        itl=_histogram(by_name, "inter_token_latency_seconds"),
    )


def _samples(line: str) -> list[Sample]:
    try:
        return [s for family in text_string_to_metric_families(line + "\n") for s in family.samples]
    except (ValueError, IndexError, KeyError):
        return []


def _tokens(by_name: dict[str, list[Sample]]) -> dict[str, float]:
    """Live counters where the engine has them; else those that move only when a request finishes."""
    live = _by_label(by_name["realtime_tokens_total"], "mode")
    if live:
        return {_MODES.get(mode, mode): value for mode, value in live.items() if mode in _MODES}
    finished = {
        "generation": by_name["generation_tokens_total"],
        "prefill": by_name["prompt_tokens_total"],
        "prefill_cached": by_name["cached_tokens_total"],
    }
    return {kind: _total(samples) for kind, samples in finished.items() if samples}


def _total(samples: list[Sample]) -> float:
    return sum(sample.value for sample in samples)


def _by_label(samples: list[Sample], label: str) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for sample in samples:
        totals[sample.labels.get(label, "")] += sample.value
    return dict(totals)


def _histogram(by_name: dict[str, list[Sample]], name: str) -> Histogram:
    buckets = _by_label(by_name[f"{name}_bucket"], "le")
    ordered = dict(sorted(buckets.items(), key=lambda item: float(item[0])))
    return Histogram(ordered, _total(by_name[f"{name}_sum"]))
