"""*Serving*: what users get, how fast, and how full the engine is."""

from monitoring.dashboards.panels import GREEN, MODEL, RED, YELLOW, Panel, Query, Row, number, series

TITLE, UID = "Hearth: Serving", "hearth-serving"
TEXT = "Tokens per second, latency, queue and KV pool of the engines that Hearth keeps."


def limit(name: str) -> Query:
    """A line for a limit that an alert compares with."""
    return Query(f'hearth:limit{{limit="{name}"}}', "limit")


def rule(name: str, legend: str = "{{host}}", more: str = "") -> Query:
    """A recording rule, for the chosen hosts and models."""
    return Query(f"{name}{{{MODEL}{more}}}", legend)


ROWS = (
    Row(
        "Now",
        (
            number(
                "Ready",
                "Whether the engine serves and its last known-answer request was right.",
                rule("hearth:ready"),
                names=(("1", "ready", GREEN), ("0", "not ready", RED)),
            ),
            number("Generation", "Tokens made per second.", rule("hearth:generation_tokens:rate5m"), "short"),
            number("Running", "Requests being worked on.", rule("hearth:requests_running")),
            number(
                "Waiting",
                "Requests in the queue.",
                rule("hearth:requests_queued"),
                steps=((None, GREEN), (1, YELLOW), (16, RED)),
            ),
            number(
                "KV pool",
                "Share of the KV pool in use.",
                rule("hearth:kv_usage:ratio"),
                "percentunit",
                steps=((None, GREEN), (0.8, YELLOW), (0.95, RED)),
            ),
            number(
                "Availability",
                "Share of the last day in which the engine was ready.",
                rule("hearth:availability:avg1d"),
                "percentunit",
                steps=((None, RED), (0.99, YELLOW), (0.999, GREEN)),
            ),
        ),
    ),
    Row(
        "What users see",
        (
            series(
                "Time to first token",
                "From a request's arrival to its first token.",
                rule("hearth:ttft_seconds:p50_5m", "{{host}} half"),
                rule("hearth:ttft_seconds:p95_5m", "{{host}} 95%"),
                unit="s",
            ),
            series(
                "Time between tokens",
                "Inter-token latency; its reverse is the speed a single user sees.",
                rule("hearth:itl_seconds:p50_5m", "{{host}} half"),
                rule("hearth:itl_seconds:p95_5m", "{{host}} 95%"),
                unit="s",
            ),
            series(
                "Whole requests",
                "From arrival to the last token, as the engine counts it.",
                rule("hearth:engine_e2e_seconds:p50_5m", "{{host}} half"),
                rule("hearth:engine_e2e_seconds:p95_5m", "{{host}} 95%"),
                unit="s",
            ),
            series(
                "Requests",
                "Finished and aborted requests per second.",
                rule("hearth:engine_requests:rate5m", "{{host}} finished"),
                rule("hearth:engine_aborted_requests:rate5m", "{{host}} aborted"),
                unit="reqps",
            ),
            series(
                "Late answers",
                "Share of first tokens and of gaps between tokens beyond the bound, and the budget for them.",
                rule("hearth:latency_errors:ratio_rate5m", "{{host}} {{sli}}"),
                limit("latency_budget"),
                unit="percentunit",
                top=1,
            ),
            series(
                "Known-answer request",
                "Seconds that it took; its failure is the alert CanaryFailing.",
                Query(f"max by (host, model) (hearth_canary_seconds{{{MODEL}}})"),
                unit="s",
            ),
        ),
    ),
    Row(
        "Throughput and load",
        (
            series(
                "Tokens",
                "Tokens per second by kind: made, read, and read from the cache.",
                Query(f"hearth:tokens:rate1m{{{MODEL}}}", "{{host}} {{kind}}"),
            ),
            series(
                "Generation against the floor",
                "A busy engine below the floor is the alert ThroughputLow.",
                rule("hearth:generation_tokens:rate5m"),
                limit("generation_floor"),
            ),
            series(
                "Generation per GPU",
                "Tokens per second divided by the GPUs that the driver shows.",
                rule("hearth:generation_tokens_per_gpu:rate5m"),
            ),
            series(
                "Prefill",
                "Prompt tokens computed per second, by Hearth's count and by the engine's.",
                rule("hearth:prefill_tokens:rate5m", "{{host}} computed"),
                rule("hearth:engine_prompt_tokens:rate5m", "{{host}} in finished requests"),
            ),
            series(
                "Generation in finished requests",
                "The engine counts these when a request ends: they come in jumps.",
                rule("hearth:engine_generation_tokens:rate5m"),
            ),
            series(
                "Running and waiting",
                "Requests in the engine.",
                rule("hearth:requests_running", "{{host}} running"),
                rule("hearth:requests_queued", "{{host}} waiting"),
            ),
            series(
                "Time in the queue",
                "Slowest 5% of requests.",
                rule("hearth:engine_queue_seconds:p95_5m"),
                unit="s",
            ),
            series(
                "KV pool",
                "Share in use, and where KVNearFull begins.",
                rule("hearth:kv_usage:ratio"),
                limit("kv_usage"),
                unit="percentunit",
                top=1,
            ),
            series(
                "Prefix cache",
                "Share of prompt tokens found in the cache.",
                rule("hearth:engine_cache_hit:ratio"),
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Size of the KV pool",
                "Tokens that fit.",
                (rule("hearth:engine_kv_tokens"),),
                "short",
                "stat",
                8,
                4,
            ),
        ),
    ),
)
