"""*Graphs and recovery*: which plan runs, what failed, and how long it took to come back."""

from monitoring.dashboards.panels import BLUE, GREEN, MODEL, RED, YELLOW, Panel, Query, Row, number, series
from monitoring.dashboards.serving import limit, rule

TITLE, UID = "Hearth: Graphs and recovery", "hearth-recovery"
TEXT = "The graph plan wanted and in effect, failures (as annotations), restarts and recovery time."

NOW = Row(
    "Now",
    (
        number(
            "Plan",
            "The plan wanted, and the backends that are in effect.",
            Query(
                f"hearth_graph_plan_info{{{MODEL}}}",
                "{{wanted}}: prefill {{effective_prefill}}, decode {{effective_decode}}",
            ),
            width=8,
            by_name=True,
        ),
        number(
            "Steps down",
            "Steps below the wanted plan; for an hour: the alert Degraded.",
            Query(f"max by (host, model) (hearth_ladder_steps{{{MODEL}}})"),
            steps=((None, GREEN), (1, YELLOW)),
        ),
        number(
            "Silently switched off",
            "Axes on which the engine runs less than it was asked for.",
            Query(f"max by (host, model) (hearth_graph_plan_downgraded{{{MODEL}}})"),
            steps=((None, GREEN), (1, YELLOW)),
        ),
        number(
            "Restarts in an hour",
            "Restarts of the engine; three are the alert CrashLoop.",
            rule("hearth:engine_restarts:increase1h"),
            steps=((None, GREEN), (1, YELLOW), (3, RED)),
        ),
        number(
            "Recovery",
            "Mean time from a failure to serving again, last day.",
            rule("hearth:recovery_seconds:mean1d"),
            "s",
        ),
    ),
)
FAILURES = Row(
    "Failures",
    (
        Panel(
            "State",
            "The state that the supervisor was in.",
            (Query(f"max by (host, state) (hearth_state{{{MODEL}}})", "{{host}} {{state}}"),),
            kind="states",
            width=24,
            names=(("0", "no", "transparent"), ("1", "yes", BLUE)),
        ),
        series(
            "Restarts by kind of failure",
            "Restarts of the engine since the supervisor started.",
            Query(f"sum by (host, kind) (hearth_engine_restarts_total{{{MODEL}}}) > 0", "{{host}} {{kind}}"),
        ),
        series(
            "Steps down",
            "Each step: the axis, from what to what, and why.",
            Query(
                f"sum by (host, axis, from, to, kind) (hearth_fallbacks_total{{{MODEL}}})",
                "{{host}} {{axis}}: {{from}} to {{to}} ({{kind}})",
            ),
        ),
        series(
            "Moves between states",
            "How often the supervisor went from one state to another.",
            Query(f"sum by (from, to) (hearth_transitions_total{{{MODEL}}})", "{{from}} to {{to}}"),
        ),
        series(
            "Restarts in an hour",
            "Of the engine, of Hearth itself, and where CrashLoop begins.",
            rule("hearth:engine_restarts:increase1h", "{{host}} engine"),
            rule("hearth:supervisor_restarts:changes1h", "{{host}} Hearth"),
            limit("restarts_per_hour"),
        ),
        series(
            "Known answer",
            "1 while the known-answer request is answered right.",
            Query(f"max by (host, model) (hearth_canary_ok{{{MODEL}}})"),
            top=1,
        ),
        series(
            "Age of the watch",
            "Seconds since the supervisor last read the engine's metrics, while it serves.",
            rule("hearth:watch_age:seconds"),
            unit="s",
        ),
    ),
)
GRAPHS = Row(
    "Graphs and time",
    (
        Panel(
            "Last start by phase",
            "Where the time of the last start went.",
            (Query(f"max by (host, phase) (hearth_phase_seconds{{{MODEL}}})", "{{phase}} {{host}}"),),
            "s",
            "bars",
        ),
        series(
            "Recovery time",
            "From a failure to serving again, over the last day.",
            rule("hearth:recovery_seconds:mean1d", "{{host}} mean"),
            rule("hearth:recovery_seconds:p95_1d", "{{host}} 95%"),
            unit="s",
        ),
        series(
            "Share of passes in graphs",
            "By phase; a plan with graphs and a share of 0 is not in effect.",
            rule("hearth:graph_passes:ratio_rate5m", "{{host}} {{phase}}"),
            unit="percentunit",
            top=1,
        ),
        series(
            "Forward passes",
            "Per second, by mode.",
            Query(
                f"sum by (host, mode) (rate(hearth_graph_passes_total{{{MODEL}}}[5m]))", "{{host}} {{mode}}"
            ),
        ),
        series(
            "Compiled while serving",
            "Kernels that were compiled after READY; each is the alert RuntimeCompile.",
            Query(f"max by (host, model) (hearth_runtime_compiles_total{{{MODEL}}})"),
        ),
        series(
            "Ready",
            "1 while the engine serves and answers right.",
            rule("hearth:ready"),
            top=1,
        ),
    ),
)
ROWS = (NOW, FAILURES, GRAPHS)
