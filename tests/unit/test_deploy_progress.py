"""Ansible's events, to what a person sees: progress, the failing task's message, the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.deploy.progress import Done, Progress, message_of
from hearth.deploy.report import Outcome, duration, exit_code, render
from hearth.errors import ExitCode


def event(kind: str, host: str = "gpu1", **data: Any) -> dict[str, Any]:
    """One event as ansible-runner hands it over."""
    return {"event": kind, "event_data": {"host": host, "role": "image", "task": "Build", **data}}


def outcome(status: str, dry: bool = False) -> Outcome:
    return Outcome("deploy", ("gpu1",), status, 200.0, dry, Path("/r"), Path("/r/log"))


ROLLED_BACK = {
    "ok": False,
    "id": "B",
    "reason": "smoke: prompt 1: 'x' is not 4",
    "rolled_back": True,
    "rolled_back_to": "A",
    "downtime_s": 41.26,
}


def test_a_task_from_start_to_end() -> None:
    progress = Progress(0.0)
    assert progress.take(event("runner_on_start"), 10.0) is None
    assert progress.now["gpu1"].since == 10.0
    done = progress.take(event("runner_on_ok", res={"changed": True}), 14.0)
    assert done == Done("gpu1", "image", "Build", "changed", 4.0)
    assert progress.now == {}
    assert progress.changed("gpu1") == [done]
    assert progress.changed("gpu2") == []


@pytest.mark.parametrize(
    ("kind", "data", "status"),
    [
        ("runner_on_ok", {}, "ok"),
        ("runner_on_skipped", {}, "skipped"),
        ("runner_on_failed", {"res": {"msg": "x"}}, "failed"),
        ("runner_on_failed", {"res": {"msg": "x"}, "ignore_errors": True}, "ok"),
        ("runner_on_unreachable", {"res": {"msg": "x"}}, "unreachable"),
    ],
)
def test_ends(kind: str, data: dict[str, Any], status: str) -> None:
    done = Progress(0.0).take(event(kind, **data), 1.0)
    assert done is not None
    assert done.status == status


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"msg": "7 of 8 GPUs"}, "7 of 8 GPUs"),
        (
            {"msg": "non-zero return code", "stderr": "a\nhearth: x: no such file (make it)\n"},
            "x: no such file (make it)",
        ),
        (
            {"msg": "non-zero return code", "stderr": "one\nE: no space left\n"},
            "non-zero return code: E: no space left",
        ),
        ({"msg": "All items", "results": [{"msg": "fine"}, {"failed": True, "msg": "second"}]}, "second"),
        ({"msg": {"a": 1}}, '{"a": 1}'),
        ({}, "no reason given"),
        (
            {
                "cmd": ["/opt/hearth/bin/hearth", "release"],
                "stdout": json.dumps(ROLLED_BACK),
                "msg": "non-zero",
            },
            "release B doesn't serve: smoke: prompt 1: 'x' is not 4; A serves again; downtime 41.3 s",
        ),
    ],
)
def test_why_a_task_failed(result: dict[str, Any], message: str) -> None:
    assert message_of(result) == message


@given(
    st.dictionaries(
        st.sampled_from(["msg", "stderr", "stdout", "cmd", "results"]), st.none() | st.text(max_size=30)
    )
)
def test_any_result_has_a_message(result: dict[str, Any]) -> None:
    result.pop("results", None)
    assert isinstance(message_of(result), str)


def test_a_report_begins_with_what_failed() -> None:
    progress = Progress(0.0)
    progress.take(event("runner_on_failed", res={"msg": "no space"}), 3.0)
    lines = render(outcome("failed"), progress).splitlines()
    assert lines[:3] == ["deploy FAILED after 3 min 20 s", "gpu1: no space [image: Build]", "log: /r/log"]
    assert exit_code(outcome("failed"), progress) is ExitCode.CHECK_FAILED


def test_a_report_of_what_was_done() -> None:
    progress = Progress(0.0)
    facts = {"ok": True, "id": "B", "downtime_s": 12.3, "ready_s": 40.0, "changed": True}
    result = {"changed": True, "cmd": "hearth release activate", "stdout": json.dumps(facts)}
    progress.take(event("runner_on_ok", res=result, duration=75.0), 3.0)
    said = render(outcome("successful"), progress)
    for part in (
        "deploy ok",
        "gpu1: changed 1",
        "release B serves, READY after 40 s, downtime 12.3 s",
        "1 min 15 s",
        "next:",
    ):
        assert part in said
    assert exit_code(outcome("successful"), progress) is ExitCode.OK
    assert "would change 1" in render(outcome("successful", dry=True), progress)


def test_exit_codes() -> None:
    lost = Progress(0.0)
    lost.take(event("runner_on_unreachable", res={"msg": "gone"}), 1.0)
    assert exit_code(outcome("failed"), lost) is ExitCode.UNREACHABLE
    assert exit_code(outcome("canceled"), Progress(0.0)) is ExitCode.RETRY
    assert exit_code(outcome("failed"), Progress(0.0)) is ExitCode.BUG


def test_durations() -> None:
    assert [duration(each) for each in (0.25, 42, 200, 4320)] == ["0.2 s", "42 s", "3 min 20 s", "1 h 12 min"]
