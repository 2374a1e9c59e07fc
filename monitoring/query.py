"""Asks a Prometheus, and fills in what Grafana fills in."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any


class QueryError(Exception):
    """Prometheus refused a query; the message is its own."""


@dataclass(frozen=True)
class Series:
    """One series of an answer: labels, and (Unix seconds, value) pairs without NaN."""

    labels: dict[str, str]
    points: list[tuple[float, float]] = field(default_factory=list)

    def name(self, legend: str) -> str:
        """As Grafana writes it: `{{label}}` replaced."""
        for label, value in self.labels.items():
            legend = legend.replace(f"{{{{{label}}}}}", value)
        return legend


class Prometheus:
    """A Prometheus at a URL. Every method raises QueryError or OSError."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an API answer."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(f"{parameters}: {error.read().decode(errors='replace')}") from error

    def at(self, expression: str, when: float) -> list[Series]:
        """The series of an instant query at a time (Unix seconds)."""
        result = self.get("query", query=expression, time=str(when))["result"]
        found = [_series(each["metric"], [each["value"]]) for each in result]
        return [series for series in found if series.points]

    def over(self, expression: str, begin: float, end: float, step: float = 1.0) -> list[Series]:
        """The series of a range query; `begin` and `end` in Unix seconds."""
        result = self.get("query_range", query=expression, start=str(begin), end=str(end), step=str(step))
        found = [_series(each["metric"], each["values"]) for each in result["result"]]
        return [series for series in found if series.points]


def _series(labels: dict[str, str], values: list[tuple[float, str]]) -> Series:
    numbers = [(float(at), float(value)) for at, value in values]
    return Series(labels, [(at, value) for at, value in numbers if math.isfinite(value)])


def fill_in(expression: str, host: str, model: str = ".*") -> str:
    """An expression of a dashboard for a host and a model (regular expressions)."""
    return expression.replace("$host", host).replace("$model", model)
