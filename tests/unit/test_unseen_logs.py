"""Logs that the rules were not written for: `hearth explain` names the right kind, phase, axis and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hearth.engine.classify import classify

LOGS = Path(__file__).parents[1] / "fixtures" / "logs" / "unseen"
INDEX: list[dict[str, Any]] = yaml.safe_load((LOGS / "INDEX.yaml").read_text(encoding="utf-8"))


def allowed(row: dict[str, Any], key: str) -> list[Any]:
    """What the index takes as right: one value, or a list of them."""
    value = row[key]
    return value if isinstance(value, list) else [value]


def lines_of(row: dict[str, Any]) -> list[str]:
    return (LOGS / row["log"]).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("row", INDEX, ids=[row["log"] for row in INDEX])
def test_named_as_expected(row: dict[str, Any]) -> None:
    failure = classify(lines_of(row), None)
    if row["kind"] is None:
        assert failure is None
        return
    assert failure is not None
    assert failure.kind.value in allowed(row, "kind"), failure
    for key in ("phase", "axis"):
        assert key not in row or failure.to_json()[key] in allowed(row, key), failure
    assert "evidence" not in row or any(row["evidence"] in line for line in failure.evidence), failure
    assert failure.hint
    assert failure.source


def test_every_log_is_listed() -> None:
    assert sorted(row["log"] for row in INDEX) == sorted(path.name for path in LOGS.glob("*.log"))


def test_a_traceback_at_the_end_is_no_hang() -> None:
    start = "[2026-09-14 02:11:07] server_args=ServerArgs(model_path='/m')"
    trace = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "OddError: who knows"]
    ended = classify([start, *trace], None)
    assert ended is not None
    assert (ended.kind.value, ended.evidence[0]) == ("unknown", "OddError: who knows")
    went_on = classify([start, *trace, "[2026-09-14 02:11:09 TP0] Init torch distributed begin."], None)
    assert went_on is not None
    assert went_on.kind.value == "hang"
