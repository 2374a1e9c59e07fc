"""Draws the dashboards from a live Prometheus, so that a reader sees what they get where Grafana can't run.

    python -m monitoring.gallery URL FOLDER [SECONDS]     (the last SECONDS, 900 if not said)

One PNG for each dashboard: the answers to the panels' own queries. The look isn't Grafana's.
"""

from __future__ import annotations

import itertools
import math
import sys
import textwrap
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.dates import DateFormatter, date2num
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter

from monitoring.dashboards.boards import BOARDS, events
from monitoring.dashboards.panels import Panel
from monitoring.query import Prometheus, Series, fill_in

INK, PAPER, GRID = "#d8d9da", "#181b1f", "#2c3235"
COLORS = ["#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0"]
MOST = 12
_NAMED = {"green": "#73bf69", "yellow": "#f2cc0c", "red": "#f2495c", "blue": "#8ab8ff"}
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class View:
    """Where from, which time (Unix seconds) and which hosts."""

    source: Prometheus
    begin: float
    end: float
    host: str = ".*"

    @property
    def step(self) -> float:
        """Seconds between two points."""
        return max(1.0, (self.end - self.begin) / 300)

    def ask(self, panel: Panel) -> list[tuple[str, Series]]:
        """The panel's series, each with its name."""
        found = []
        for query in panel.queries:
            answer = self._answer(fill_in(query.expr, self.host), panel.kind in ("stat", "bars"))
            found += [(series.name(query.legend), series) for series in answer]
        return sorted(found, key=lambda pair: pair[0])

    def _answer(self, expression: str, instant: bool) -> list[Series]:
        if instant:
            return self.source.at(expression, self.end)
        return self.source.over(expression, self.begin, self.end, self.step)

    def marks(self) -> list[tuple[float, str]]:
        """When failures and steps down happened, and their colour."""
        found = []
        for event in events():
            for series in self.source.over(fill_in(event.expr or "", self.host), self.begin, self.end, 5.0):
                found.append((series.points[0][0], "#f2495c" if event.icon_color == "red" else "#ff780a"))
        return found


def human(value: float, unit: str) -> str:
    """A number for a person."""
    if unit == "percentunit":
        return f"{value:.1%}"
    for size, letter in _SCALES:
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}" + (" s" if unit == "s" else "")


def with_gaps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, with a NaN where the series was away, so that no line is drawn across."""
    step = min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=0.0)
    whole: list[tuple[float, float]] = []
    for point in points:
        if whole and point[0] - whole[-1][0] > 2 * step:
            whole.append((whole[-1][0] + step, math.nan))
        whole.append(point)
    return whole


def draw(name: str, view: View, target: Path) -> None:
    """One dashboard to one PNG file."""
    rows = _lines(name)
    heights = [0.35 if isinstance(row, str) else max(panel.height for panel in row) / 4 for row in rows]
    tall = 1.25 * sum(heights) + 1
    figure = plt.figure(figsize=(19, tall), facecolor=PAPER)
    figure.suptitle(BOARDS[name].TITLE, color="white", fontsize=17, x=0.03, y=1 - 0.2 / tall, ha="left")
    grid = GridSpec(
        len(rows),
        24,
        figure,
        height_ratios=heights,
        hspace=0.75,
        wspace=2.2,
        left=0.03,
        right=0.99,
        top=1 - 0.6 / tall,
    )
    marks = view.marks()
    for index, row in enumerate(rows):
        if isinstance(row, str):
            _heading(figure.add_subplot(grid[index, :]), row)
            continue
        left = 0
        for panel in row:
            axes = figure.add_subplot(grid[index, left : left + panel.width])
            _panel(axes, panel, view, marks)
            left += panel.width
    figure.savefig(target, dpi=70, facecolor=PAPER, bbox_inches="tight")
    plt.close(figure)


def _lines(name: str) -> list[Any]:
    """Headings, and panels as they stand beside each other."""
    lines: list[Any] = []
    for row in BOARDS[name].ROWS:
        lines += [row.title, []]
        for panel in row.panels:
            if sum(each.width for each in lines[-1]) + panel.width > 24:
                lines.append([])
            lines[-1].append(panel)
    return lines


def _heading(axes: Any, text: str) -> None:
    axes.axis("off")
    axes.text(0, 0.1, text, color="white", fontsize=13)


def _panel(axes: Any, panel: Panel, view: View, marks: list[tuple[float, str]]) -> None:
    series = view.ask(panel)
    axes.set_facecolor("#111217")
    axes.set_title(panel.title, color=INK, fontsize=10, loc="left")
    axes.tick_params(colors=INK, labelsize=7)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    if not series:
        axes.text(0.5, 0.5, "No data", color="#7b8087", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    {"stat": _stat, "states": _states, "bars": _bars, "series": _series}[panel.kind](axes, panel, series)
    if panel.kind in ("series", "states"):
        _times(axes, view, marks)


def _times(axes: Any, view: View, marks: list[tuple[float, str]]) -> None:
    for at, color in marks:
        axes.axvline(_day(at), color=color, linewidth=0.9, linestyle="--")
    axes.set_xlim(_day(view.begin), _day(view.end))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    axes.locator_params(axis="x", nbins=5)


def _day(at: float) -> float:
    return float(date2num(datetime.fromtimestamp(at, UTC)))


def _stat(axes: Any, panel: Panel, series: list[tuple[str, Series]]) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    words = {value: (word, _NAMED.get(color, INK)) for value, word, color in panel.names}
    for index, (name, each) in enumerate(series[:2]):
        value = each.points[-1][1]
        text, color = words.get(f"{value:g}", (human(value, panel.unit), _color(panel, value)))
        text = "\n".join(textwrap.wrap(name, 34)) if panel.by_name else text
        size = 11 if panel.by_name else 17
        height = 0.5 if len(series) == 1 else 0.72 - 0.45 * index
        axes.text(
            0.5, height, text, color=color, fontsize=size, ha="center", va="center", transform=axes.transAxes
        )


def _color(panel: Panel, value: float) -> str:
    chosen = [color for at, color in panel.steps if at is None or value >= at][-1]
    return _NAMED[chosen]


def _states(axes: Any, panel: Panel, series: list[tuple[str, Series]]) -> None:
    seen = [(name, each) for name, each in series if any(value > 0 for _, value in each.points)]
    for index, (_, each) in enumerate(seen):
        times = [_day(at) for at, value in each.points if value > 0]
        axes.scatter(times, [index] * len(times), marker="s", s=60, color=COLORS[index % len(COLORS)])
    axes.set_yticks(range(len(seen)), [name for name, _ in seen])
    axes.set_ylim(-0.7, len(seen) - 0.3)


def _bars(axes: Any, panel: Panel, series: list[tuple[str, Series]]) -> None:
    values = [each.points[-1][1] for _, each in series]
    axes.barh(range(len(series)), values, color=COLORS[0])
    axes.set_yticks(range(len(series)), [name for name, _ in series])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value, panel.unit)))


def _series(axes: Any, panel: Panel, series: list[tuple[str, Series]]) -> None:
    for index, (name, each) in enumerate(series[:MOST]):
        points = with_gaps(each.points)
        times, values = [_day(at) for at, _ in points], [value for _, value in points]
        style = "--" if name == "limit" else "-"
        color = "#f2495c" if name == "limit" else COLORS[index % len(COLORS)]
        axes.plot(
            times, values, style, color=color, linewidth=1.2, label=name, marker="." if len(times) < 3 else ""
        )
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_ylim(0, panel.top * 1.05 if panel.top else None)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value, panel.unit)))
    axes.legend(
        fontsize=6.5, loc="upper left", labelcolor=INK, facecolor=PAPER, edgecolor=GRID, framealpha=0.6
    )


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    if len(arguments) not in (2, 3):
        print("usage: python -m monitoring.gallery URL FOLDER [SECONDS]", file=sys.stderr)
        return 2
    end = time.time()
    begin = end - float(arguments[2] if len(arguments) == 3 else 900)
    for name in BOARDS:
        draw(name, View(Prometheus(arguments[0]), begin, end), Path(arguments[1]) / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
