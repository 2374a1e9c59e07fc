"""SGLang's `/metrics` page as values, whichever of its two spellings (`sglang:x`, `sglang_x`) it uses.

Names and labels as in SGLang 0.5.9 to 0.5.23 (observability/metrics_collector.py). Reads the Prometheus text
format and OpenMetrics; a page may be anything, what can't be a sample is left out.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
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
_LINE = re.compile(
    rf"(sglang[:_])((?:{'|'.join(_WANTED)})(?:_bucket|_sum|_count)?)"  # prefix, name
    r"[ \t]*(\{.*\})?[ \t]+([-+.0-9eE]+)(?:[ \t].*)?"  # labels, value; then a time or an exemplar
)
_TOKEN_KINDS = {"decode": "generation", "prefill_compute": "prefill", "prefill_cache": "prefill_cached"}
_PASS_MODES = ("decode_cuda_graph", "decode_none", "prefill_cuda_graph", "prefill_none")
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")
_LONGEST_LINE, _MOST_BUCKETS = 4096, 256


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
    """Forward passes by mode: decode_cuda_graph, decode_none, prefill_cuda_graph, prefill_none, other."""
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
    """Read a `/metrics` page; whatever isn't SGLang's or can't be read is left out. Never raises."""
    by_name = _read(page)
    return EngineSamples(
        tokens=_tokens(by_name),
        passes=_by_label(by_name["cuda_graph_passes_total"], "mode", _PASS_MODES),
        running=_total(_all_priorities(by_name["num_running_reqs"])),
        queued=_total(_all_priorities(by_name["num_queue_reqs"])),
        kv_usage=min(1.0, max((s.value for s in by_name["token_usage"]), default=0.0)),
        ttft=_histogram(by_name, "time_to_first_token_seconds"),
        itl=_histogram(by_name, "inter_token_latency_seconds"),
    )


def _read(page: str) -> dict[str, list[Sample]]:
    """Samples by name without its prefix; of a page that has both spellings, `sglang:`."""
    spellings: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for line in page.split("\n"):
        match = _LINE.fullmatch(line.strip()) if len(line) <= _LONGEST_LINE else None
        if match is not None:
            prefix, name, labels, value = match.groups()
            spellings[name][prefix].extend(_samples(f"{name}{labels or ''} {value}\n"))
    by_name: dict[str, list[Sample]] = defaultdict(list)
    for name, found in spellings.items():
        by_name[name] = _one_rank(found.get("sglang:") or found["sglang_"])
    return by_name


def _samples(line: str) -> Iterator[Sample]:
    """The sample in a line, if it is a number that a counter or size can have."""
    try:
        samples = [s for family in text_string_to_metric_families(line) for s in family.samples]
    except (ValueError, IndexError, KeyError, AttributeError):
        return
    yield from (s for s in samples if math.isfinite(s.value) and s.value >= 0)


def _one_rank(samples: Iterable[Sample]) -> list[Sample]:
    """Ranks that work on the same batch report the same (`--enable-metrics-for-all-schedulers`): keep one.

    Data-parallel ranks have work of their own and are all kept.
    """
    kept: dict[tuple[tuple[str, str], ...], Sample] = {}
    for sample in samples:
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in _RANKS))
        if labels not in kept or sample.value > kept[labels].value:
            kept[labels] = sample
    return list(kept.values())


def _all_priorities(samples: list[Sample]) -> list[Sample]:
    """With priority scheduling the total is under priority "", beside one sample for each priority."""
    return [s for s in samples if not s.labels.get("priority")] or samples


def _tokens(by_name: dict[str, list[Sample]]) -> dict[str, float]:
    """Live counters where the engine has them; else those that move only when a request finishes."""
    live = _by_label(by_name["realtime_tokens_total"], "mode", _TOKEN_KINDS)
    if live:
        return {_TOKEN_KINDS[mode]: value for mode, value in live.items() if mode in _TOKEN_KINDS}
    finished = {
        "generation": by_name["generation_tokens_total"],
        "prefill": by_name["prompt_tokens_total"],
        "prefill_cached": by_name["cached_tokens_total"],
    }
    return {kind: _total(samples) for kind, samples in finished.items() if samples}


def _total(samples: list[Sample]) -> float:
    return math.fsum(sample.value for sample in samples)


def _by_label(samples: list[Sample], label: str, known: Iterable[str] = ()) -> dict[str, float]:
    """Totals by the value of a label; values that aren't `known`, if any are, go under `other`."""
    totals: dict[str, float] = defaultdict(float)
    for sample in samples:
        value = sample.labels.get(label, "")
        totals[value if not known or value in known else "other"] += sample.value
    return dict(totals)


def _histogram(by_name: dict[str, list[Sample]], name: str) -> Histogram:
    """Empty where the page has no whole one (no `+Inf`, or a bound that is no number)."""
    buckets = _by_label(by_name[f"{name}_bucket"], "le")
    if "+Inf" not in buckets or len(buckets) > _MOST_BUCKETS or not all(map(_is_bound, buckets)):
        return Histogram()
    ordered = dict(sorted(buckets.items(), key=lambda item: float(item[0])))
    return Histogram(ordered, _total(by_name[f"{name}_sum"]))


def _is_bound(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
