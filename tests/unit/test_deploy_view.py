"""The progress view: plain lines without a terminal, a table with one, and what the service itself says."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from hearth.deploy import view as viewing
from hearth.deploy.progress import Progress
from hearth.deploy.view import View, line, watched


def event(kind: str, task: str = "Build", **data: Any) -> dict[str, Any]:
    return {"event": kind, "event_data": {"host": "gpu1", "role": "image", "task": task, **data}}


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120), out


def test_without_a_terminal_only_what_matters_is_a_line() -> None:
    shown, out = console()
    with View(Progress(0.0), shown) as view:
        view.event(event("runner_on_start"))
        view.event(event("runner_on_ok", duration=0.1))
        view.event(event("runner_on_ok", duration=0.1, res={"changed": True}))
        view.event(event("runner_on_ok", duration=45.0))
        view.event(event("runner_on_failed", duration=1.0, res={"msg": "no [space] left"}))
    lines = out.getvalue().splitlines()
    assert [text.split()[0] for text in lines] == ["changed", "ok", "failed"]
    assert "no [space] left" in lines[-1]


def test_with_a_terminal_the_running_task_is_shown() -> None:
    shown, out = console(terminal=True)
    with View(Progress(0.0), shown) as view:
        view.event(event("runner_on_start"))
        shown.print(view._table())
    assert "gpu1" in out.getvalue()
    assert "Build" in out.getvalue()


def test_the_service_is_asked_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "_LOOK", 0.01)
    said = iter(["loading 10%", "loading 10%", "loading 50%"])
    shown, out = console()
    asked: list[str] = []

    def look(host: str) -> str:
        asked.append(host)
        return next(said, "")

    with View(Progress(0.0), shown, look) as view:
        view.event(event("runner_on_start", task="Build"))
        view.event(event("runner_on_start", task=viewing.WATCHED[0]))
        while len(asked) < 3:
            view._stop.wait(0.01)
    assert [text for text in out.getvalue().splitlines() if "loading" in text] == [
        "... gpu1  loading 10%",
        "... gpu1  loading 50%",
    ]


def test_which_hosts_are_asked() -> None:
    progress = Progress(0.0)
    progress.take(event("runner_on_start"), 1.0)
    assert watched(progress) == []
    progress.take(event("runner_on_start", task=viewing.WATCHED[0]), 1.0)
    assert watched(progress) == ["gpu1"]


def test_a_line() -> None:
    done = Progress(0.0).take(event("runner_on_failed", duration=75.0, res={"msg": "x"}), 1.0)
    assert done is not None
    assert line(done) == "failed      gpu1  image: Build (1 min 15 s): x"
