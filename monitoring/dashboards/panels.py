"""What a panel is, as data, and how it becomes a Grafana panel (schema of Grafana 11.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as schema

DATASOURCE = schema.DataSourceRef(type_val="prometheus", uid="${datasource}")
HOST = 'host=~"$host"'
MODEL = 'host=~"$host", model=~"$model"'
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
Step = tuple[float | None, str]


@dataclass(frozen=True)
class Query:
    """A PromQL expression and how its series are named."""

    expr: str
    legend: str = "{{host}}"


@dataclass(frozen=True)
class Panel:
    """One panel: `kind` is series, stat, states or bars; sizes in Grafana's grid (24 wide)."""

    title: str
    text: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "series"
    width: int = 8
    height: int = 8
    steps: tuple[Step, ...] = ((None, GREEN),)
    top: float | None = None
    names: tuple[tuple[str, str, str], ...] = ()
    """Words and colours for values: (value, word, colour)."""
    by_name: bool = False
    """A stat shows the name of the series, not its value."""


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


def series(title: str, text: str, *queries: Query, unit: str = "short", **more: Any) -> Panel:
    """Lines over time."""
    return Panel(title, text, queries, unit, **more)


def number(title: str, text: str, query: Query, unit: str = "short", **more: Any) -> Panel:
    """One large number for each series, as it is now."""
    return Panel(title, text, (query,), unit, "stat", **{"width": 4, "height": 4, **more})


def build(panel: Panel) -> Any:
    """The builder of a Grafana panel."""
    built = _BUILDERS[panel.kind](panel)
    built = built.title(panel.title).description(panel.text).datasource(DATASOURCE).unit(panel.unit)
    built = built.span(panel.width).height(panel.height).thresholds(_thresholds(panel.steps))
    if panel.top is not None:
        built = built.max(panel.top).min(0)
    if panel.names:
        built = built.mappings([_words(panel.names)])
    for index, query in enumerate(panel.queries):
        built = built.with_target(_target(query, "ABCDEFGH"[index], instant=panel.kind in ("stat", "bars")))
    return built


def _target(query: Query, name: str, instant: bool) -> Any:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(name)
    return target.datasource(DATASOURCE).instant() if instant else target.datasource(DATASOURCE).range()


def _thresholds(steps: tuple[Step, ...]) -> Any:
    made = [schema.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(schema.ThresholdsMode.ABSOLUTE).steps(made)


def _words(names: tuple[tuple[str, str, str], ...]) -> schema.ValueMap:
    options = {
        value: schema.ValueMappingResult(text=word, color=color, index=index)
        for index, (value, word, color) in enumerate(names)
    }
    return schema.ValueMap(options=options)


def _series(_: Panel) -> Any:
    legend = common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.LIST)
    legend = legend.placement(kinds.LegendPlacement.BOTTOM).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI)
    return timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).fill_opacity(10).axis_soft_min(0)


def _stat(panel: Panel) -> Any:
    text = kinds.BigValueTextMode.NAME if panel.by_name else kinds.BigValueTextMode.AUTO
    return stat.Panel().reduce_options(_last()).text_mode(text).graph_mode(kinds.BigValueGraphMode.NONE)


def _states(_: Panel) -> Any:
    return statetimeline.Panel().merge_values(True).show_value(kinds.VisibilityMode.NEVER).row_height(0.9)


def _bars(_: Panel) -> Any:
    return bargauge.Panel().reduce_options(_last()).orientation(kinds.VizOrientation.HORIZONTAL)


def _last() -> Any:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


_BUILDERS = {"series": _series, "stat": _stat, "states": _states, "bars": _bars}
