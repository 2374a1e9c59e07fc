"""Reads the rule files: for the tests, which need them with short durations, and for what they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "prometheus"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+)([smhd])")
# What isn't a metric in an expression: text, labels to match or to group by, ranges, words of PromQL.
_NOT_METRICS = (
    re.compile(r'"[^"]*"'),
    re.compile(r"\{[^}]*\}"),
    re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"),
    re.compile(r"\[[^\]]*\]"),
)
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_NAME = re.compile(r"(?<![\w:.$])([a-zA-Z_:][\w:]*)(?!\s*\()(?![\w:])")


def files() -> list[Path]:
    """Every file of recording rules and alerts."""
    return sorted([*(FOLDER / "rules").glob("*.yml"), *(FOLDER / "alerts").glob("*.yml")])


def rules() -> Iterator[dict[str, Any]]:
    """Every recording rule and alert, as written."""
    for path in files():
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def metrics_in(expression: str) -> set[str]:
    """The names of the metrics that a PromQL expression reads."""
    for pattern in _NOT_METRICS:
        expression = pattern.sub(" ", expression)
    return {name for name in _NAME.findall(expression) if name not in _WORDS}


def seconds(duration: str) -> int:
    """A duration as Prometheus writes it (`90s`, `5m`, `1h`) in seconds."""
    found = _DURATION.fullmatch(duration)
    if found is None:
        raise ValueError(f"no duration: {duration}")
    return int(found[1]) * _UNITS[found[2]]


def shortened(text: str, ranges: int, waits: int, limits: dict[str, float]) -> str:
    """A rule file with its ranges (`[5m]`) and its waits (`for:`) so many times shorter, and other limits."""
    document = yaml.safe_load(text)
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(
                r"\[(\d+[smhd])\]", lambda m: f"[{max(5, seconds(m[1]) // ranges)}s]", rule["expr"]
            )
            if "for" in rule:
                rule["for"] = f"{seconds(rule['for']) // waits}s"
            name = rule.get("labels", {}).get("limit")
            if name in limits:
                rule["expr"] = f"vector({limits[name]})"
    return yaml.safe_dump(document)
