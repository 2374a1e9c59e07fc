"""What a running playbook is doing, from Ansible's events. Pure: `take` is told the time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hearth.deploy.facts import last_json

SLOW = 20.0
"""Seconds after which a task counts as slow: it is then named in the plain view, too."""
_ENDS = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
    "runner_on_skipped": "skipped",
}


@dataclass(frozen=True)
class Done:
    """One task on one host, ended. `status`: ok, changed, failed, unreachable, skipped."""

    host: str
    role: str
    task: str
    status: str
    seconds: float
    message: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What `hearth` itself reported as JSON, e.g. of an activation."""

    @property
    def place(self) -> str:
        """`role: task`."""
        return f"{self.role}: {self.task}" if self.role else self.task


@dataclass
class Now:
    """What a host is doing now."""

    role: str
    task: str
    since: float


@dataclass
class Progress:
    """Everything seen so far. `started` in the same clock as the `now` of `take`."""

    started: float
    now: dict[str, Now] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def take(self, event: Mapping[str, Any], now: float) -> Done | None:
        """Take one event of ansible-runner; the task that ended with it, if one did."""
        kind, data = str(event.get("event", "")), event.get("event_data") or {}
        host = str(data.get("host", ""))
        if kind == "runner_on_start" and host:
            self.now[host] = Now(str(data.get("role", "")), str(data.get("task", "")), now)
            return None
        if kind in ("error", "warning", "verbose"):
            self._note(str(event.get("stdout", "")))
            return None
        if kind not in _ENDS or not host:
            return None
        return self._end(host, _ENDS[kind], data, now)

    def failed(self) -> list[Done]:
        """What stopped the run: failures that nobody ignored."""
        return [each for each in self.done if each.status in ("failed", "unreachable")]

    def changed(self, host: str | None = None) -> list[Done]:
        """What was changed, on one host or all."""
        return [d for d in self.done if d.status == "changed" and host in (None, d.host)]

    def slowest(self, count: int = 5) -> list[Done]:
        """The tasks that took longest, and at least a second."""
        long = [each for each in self.done if each.seconds >= 1]
        return sorted(long, key=lambda each: -each.seconds)[:count]

    def _end(self, host: str, status: str, data: Mapping[str, Any], now: float) -> Done | None:
        result = data.get("res") or {}
        if status == "failed" and data.get("ignore_errors"):
            status = "ok"
        if status == "ok" and result.get("changed"):
            status = "changed"
        current = self.now.pop(host, None)
        seconds = float(data.get("duration") or (now - current.since if current else 0.0))
        message = message_of(result) if status in ("failed", "unreachable") else ""
        task, role = str(data.get("task", "")), str(data.get("role", ""))
        done = Done(host, role, task, status, seconds, message, facts_of(result))
        self.done.append(done)
        return done

    def _note(self, text: str) -> None:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
        if "WARNING" in plain or "ERROR" in plain:
            self.warnings.append(plain[:500])


def facts_of(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a command of ours printed as JSON; empty for anything else."""
    command = result.get("cmd") or ""
    text = " ".join(map(str, command)) if isinstance(command, list) else str(command)
    return last_json(str(result.get("stdout") or "")) if "hearth" in text else {}


def message_of(result: Mapping[str, Any]) -> str:
    """Why a task failed, in one line where its tool said it in one."""
    facts = facts_of(result)
    if facts.get("reason"):
        return activation(facts)
    for key in ("stderr", "module_stderr", "stdout", "module_stdout"):
        lines = [line.strip() for line in str(result.get(key) or "").splitlines() if line.strip()]
        ours = [line.removeprefix("hearth: ") for line in lines if line.startswith("hearth: ")]
        if ours:
            return ours[-1]
        if lines and key.endswith("stderr"):
            return f"{_msg(result)}: {lines[-1]}"[:1000]
    failed = [message_of(item) for item in result.get("results") or [] if item.get("failed")]
    return failed[0] if failed else _msg(result)


def _msg(result: Mapping[str, Any]) -> str:
    said = result.get("msg", "no reason given")
    text = said if isinstance(said, str) else json.dumps(said)
    return " ".join(text.split())[:1000]


def activation(facts: Mapping[str, Any]) -> str:
    """An activation's JSON as a sentence."""
    after = "nothing serves now"
    if facts.get("rolled_back"):
        after = f"{facts.get('rolled_back_to')} serves again"
    down = facts.get("downtime_s")
    tail = f"; downtime {down:.1f} s" if isinstance(down, (int, float)) else ""
    return f"release {facts.get('id')} doesn't serve: {facts.get('reason')}; {after}{tail}"
