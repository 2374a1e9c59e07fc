"""A failure bundle: what tells why an engine failed, as the text of a few files. Values in, values out.

failure.json   what went wrong and what was done about it
log.txt        the engine's lines, by phase
phases.json    seconds in each phase
plan.json      the graph plan wanted, started, in effect, next; earlier failures; the command line
versions.json  Hearth, engine, torch, driver, ...
config.yaml    the configuration with its defaults, without secrets
gpu.json       what NVML said just before the kill
kernel.txt     the kernel's last lines
stacks.txt     stacks of the engine's processes (hangs)
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

from hearth.engine.redact import Redactor
from hearth.failure import Failure, Phase
from hearth.ladder import GraphPlan
from hearth.policy import Decision, Event
from hearth.scrub import scrub, shown_address

SCHEMA = 1
FAILURE_FILE = "failure.json"


@dataclass(frozen=True)
class Snapshot:
    """What was seen of machine and processes between the failure and the kill."""

    at: float
    """When the failure was seen, Unix seconds."""
    gpu: Mapping[str, Any] = field(default_factory=dict)
    kernel: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class Story:
    """What one life of the engine left: its lines by phase, seconds in each, and how long it was silent."""

    sections: Sequence[tuple[str, Sequence[str]]] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    phase: Phase = Phase.SPAWN
    progress: str = ""
    silent: float = 0.0
    """Seconds from the last output to the failure."""
    argv: Sequence[str] = ()


@dataclass(frozen=True)
class Plans:
    """The graph plan as wanted, as started, and as the engine says it runs (None: not known)."""

    wanted: GraphPlan
    started: GraphPlan
    effective: GraphPlan | None = None
    downgrades: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """All that a bundle is made of."""

    failure: Failure
    decision: Decision
    plans: Plans
    story: Story
    snapshot: Snapshot
    events: Sequence[Event] = ()
    """Earlier failures, oldest first."""
    restarts: int = 0
    """Restarts before this failure."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def bundle_files(report: Report, redact: Redactor) -> dict[str, str]:
    """The bundle's files by name; `redact` takes the secrets out of each."""
    documents = {
        FAILURE_FILE: failure_document(report),
        "phases.json": phases_document(report),
        "plan.json": plan_document(report),
        "versions.json": report.versions,
        "gpu.json": report.snapshot.gpu,
    }
    texts = {
        "log.txt": log_text(report.story),
        "config.yaml": config_text(report.config, redact),
        "kernel.txt": report.snapshot.kernel,
        "stacks.txt": report.snapshot.stacks,
    }
    files = {name: _json(scrub(document, redact)) for name, document in documents.items()}
    return files | {name: redact(text) for name, text in texts.items() if text}


def failure_document(report: Report) -> dict[str, Any]:
    """failure.json."""
    decision = report.decision
    return {
        "schema": SCHEMA,
        "at": report.snapshot.at,
        "time": utc(report.snapshot.at),
        **report.failure.to_json(),
        "sentence": report.failure.sentence,
        "action": decision.action.value,
        "done": decision.sentence,
        "plan": report.plans.started.to_json(),
        "next_plan": None if decision.plan is None else decision.plan.to_json(),
        "wait_seconds": decision.delay,
        "exit_code": None if decision.plan is not None else decision.exit_code.value,
        "exit_meaning": None if decision.plan is not None else decision.exit_code.meaning,
        "restarts_before": report.restarts,
    }


def phases_document(report: Report) -> dict[str, Any]:
    """phases.json: seconds, rounded to milliseconds."""
    story = report.story
    return {
        "seconds": {name: round(seconds, 3) for name, seconds in story.seconds.items()},
        "last_phase": story.phase.value,
        "progress": story.progress,
        "silent_seconds": round(story.silent, 3),
    }


def plan_document(report: Report) -> dict[str, Any]:
    """plan.json."""
    plans, following = report.plans, report.decision.plan
    return {
        "wanted": _plan(plans.wanted),
        "started": _plan(plans.started),
        "effective": None if plans.effective is None else _plan(plans.effective),
        "downgrades": list(plans.downgrades),
        "next": None if following is None else _plan(following),
        "history": [_event(event) for event in report.events],
        "command": shlex.join(report.story.argv),
    }


def log_text(story: Story) -> str:
    """log.txt: each phase's first and last lines under a header."""
    parts = []
    for phase, lines in story.sections:
        spent = f", {story.seconds[phase]:.1f} s" if phase in story.seconds else ""
        parts += [f"== {phase or 'before the first phase'}{spent}", *lines, ""]
    return "\n".join(parts) if parts else "The engine was not started, or wrote nothing.\n"


def config_text(config: Mapping[str, Any], redact: Redactor) -> str:
    """config.yaml: the checked configuration, defaults included; of a webhook's address only the host."""
    shown = dict(config)
    notify = shown.get("notify")
    if isinstance(notify, Mapping) and notify.get("url"):
        shown["notify"] = {**notify, "url": shown_address(str(notify["url"]))}
    return yaml.safe_dump(scrub(shown, redact), sort_keys=False, allow_unicode=True, width=110)


def utc(at: float) -> str:
    """Unix seconds as `2026-11-29T21:47:00.123Z`."""
    return f"{datetime.fromtimestamp(at, UTC).strftime('%Y-%m-%dT%H:%M:%S')}.{int(at * 1000) % 1000:03d}Z"


def _plan(plan: GraphPlan) -> dict[str, Any]:
    return {**plan.to_json(), "name": plan.name}


def _event(event: Event) -> dict[str, Any]:
    failure = event.failure
    return {
        "kind": failure.kind.value,
        "phase": failure.phase.value,
        "axis": failure.axis.value,
        "plan": event.plan.to_json(),
        "stepped_down": event.stepped,
    }


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
