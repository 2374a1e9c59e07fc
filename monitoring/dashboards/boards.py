"""The three dashboards: rows of panels, variables, annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as schema

from monitoring.dashboards import gpus, recovery, serving
from monitoring.dashboards.panels import DATASOURCE, HOST, Panel, build

UID = "hearth-prometheus"
"""The data source that the provisioning files define; a dashboard imported by hand takes any Prometheus."""
BOARDS = {"serving": serving, "recovery": recovery, "gpus": gpus}

# Twice the step: increase() sees nothing between the last scrape of one range and the first of the next.
FAILED = f"sum by (host, kind) (increase(hearth_failures_total{{{HOST}}}[2m])) > 0"
STEPPED = (
    f"hearth_fallbacks_total{{{HOST}}} unless hearth_fallbacks_total{{{HOST}}} offset 1m "
    f"or increase(hearth_fallbacks_total{{{HOST}}}[1m]) > 0"
)


class Event(schema.AnnotationQuery):
    """An annotation from a Prometheus query, with the fields of that data source that the SDK lacks."""

    def __init__(self, name: str, expr: str, title: str, color: str) -> None:
        super().__init__(name=name, datasource=DATASOURCE, expr=expr, icon_color=color)
        self._title = title

    def to_json(self) -> dict[str, object]:
        """As Grafana reads it."""
        return {**super().to_json(), "titleFormat": self._title, "step": "60s", "useValueForTime": False}


class _Built:
    """What the dashboard builder asks for, around a value that is built already."""

    def __init__(self, value: schema.AnnotationQuery) -> None:
        self._value = value

    def build(self) -> schema.AnnotationQuery:
        """The value."""
        return self._value


def events() -> list[Event]:
    """Failures and steps down, shown on every panel."""
    return [
        Event("Failures", FAILED, "{{kind}} on {{host}}", "red"),
        Event("Steps down", STEPPED, "{{axis}}: {{from}} to {{to}} ({{kind}}) on {{host}}", "orange"),
    ]


def panels(name: str) -> Iterator[Panel]:
    """Every panel of a dashboard."""
    for row in BOARDS[name].ROWS:
        yield from row.panels


def make(name: str) -> str:
    """The dashboard's JSON text."""
    source = BOARDS[name]
    board = dashboard.Dashboard(source.TITLE).uid(source.UID).description(source.TEXT).tags(["hearth"])
    board = board.time("now-3h", "now").refresh("30s").timezone("browser").editable()
    board = board.tooltip(schema.DashboardCursorSync.CROSSHAIR).link(_others())
    for variable in _variables():
        board = board.with_variable(variable)
    for event in events():
        board = board.annotation(_Built(event))
    for row in source.ROWS:
        board = board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board = board.with_panel(build(panel))
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _others() -> Any:
    link = dashboard.DashboardLink("Hearth").type(schema.DashboardLinkType.DASHBOARDS).tags(["hearth"])
    return link.as_dropdown(False).keep_time(True).include_vars(True)


def _variables() -> Iterator[Any]:
    chosen = schema.VariableOption(text="Hearth", value=UID, selected=True)
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus").current(chosen)
    yield _query("host", "Host", "label_values(hearth_build_info, host)")
    yield _query("model", "Model", f"label_values(hearth_build_info{{{HOST}}}, model)")


def _query(name: str, label: str, query: str) -> Any:
    everything = schema.VariableOption(text=["All"], value=["$__all"], selected=True)
    variable = dashboard.QueryVariable(name).label(label).query(query).datasource(DATASOURCE)
    variable = variable.refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        schema.VariableSort.ALPHABETICAL_ASC
    )
    return variable.multi(True).include_all(True).all_value(".*").current(everything)
