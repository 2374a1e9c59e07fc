"""What is kept and told of a failure: a bundle on disk, a document to a webhook. Never stops a recovery."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hearth import __version__
from hearth.aside import in_thread
from hearth.board import Board
from hearth.bundle import Plans, Report, Snapshot, Story, bundle_files, utc
from hearth.bundlestore import FOLDER, BundleStore
from hearth.config import Config
from hearth.engine.redact import Redactor
from hearth.errors import HearthError
from hearth.failure import Failure, FailureKind
from hearth.notify import Notifier, read_target
from hearth.policy import Action, Decision, Event
from hearth.scrub import scrub, secret_variables
from hearth.snapshot import gpu_snapshot, kernel_text, versions
from hearth.stacks import stacks_text

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds that GPUs and kernel log have to answer before the kill; healthy ones take some milliseconds."""
WRITE_SECONDS = 15.0
"""Seconds that a slow disk may hold up the next start for a bundle."""
T = TypeVar("T")
_EVENTS = {Action.STEP_DOWN: "step_down", Action.STOP: "give_up"}


class Reporter:
    """Makes the bundle and the documents. Raises MissingError or ConfigError where `notify` can't be used."""

    def __init__(self, config: Config, secrets: Mapping[str, str]) -> None:
        target = read_target(config.notify)
        hidden = [*secrets.values(), *secret_variables(os.environ), *(target.secrets if target else ())]
        self.redact = Redactor(hidden)
        """Masks every secret that Hearth knows of."""
        self._config = config
        limits = config.failures
        self._store = BundleStore(config.paths.state / FOLDER, limits.keep, limits.max_mb * 1_000_000)
        self._notifier = Notifier(target)
        self._versions: dict[str, Any] = {}
        self._said = False
        self._last: Failure | None = None

    async def look(self, failure: Failure, pids: Sequence[int]) -> Snapshot:
        """What can only be seen while the engine is still there; `pids` are its processes."""
        at = time.time()
        hang = failure.kind is FailureKind.HANG
        stacks = stacks_text(pids, self._config.engine.python) if hang else _no_stacks()
        gpu, kernel, text = await asyncio.gather(
            _asked(gpu_snapshot, lambda why: {"gpus": [], "problem": f"NVML: {why}"}),
            _asked(kernel_text, lambda why: f"The kernel log can't be read here: {why}\n"),
            stacks,
        )
        return Snapshot(at, gpu, kernel, text)

    async def report(
        self,
        board: Board,
        failure: Failure,
        decision: Decision,
        events: Sequence[Event],
        seen: tuple[Snapshot, Story],
    ) -> str:
        """Keep a bundle and tell the webhook; the bundle's name, empty where it couldn't be written."""
        plans = Plans(board.wanted, board.plan, board.effective, tuple(board.downgrades))
        snapshot, story = seen
        report = Report(
            failure=failure,
            decision=decision,
            plans=plans,
            story=story,
            snapshot=snapshot,
            events=tuple(events),
            restarts=board.restarts,
            config=self._config.model_dump(mode="json"),
        )
        name = await self._keep(report)
        self._last = failure
        event = _EVENTS.get(decision.action)
        if event is not None:
            self._tell(event, decision_document(board, report, name))
        return name

    def ready_again(self, board: Board, downtime: float) -> None:
        """Tell that the engine serves again, `downtime` seconds after the first failure was seen."""
        failure, self._last = self._last, None
        self._tell("ready_again", ready_document(board, failure, downtime))

    async def close(self, hurry: bool) -> None:
        """Give what is unsent a moment, unless somebody is in a hurry."""
        await self._notifier.close(0.0 if hurry else None)

    def _tell(self, event: str, document: Mapping[str, Any]) -> None:
        if self._notifier.wants(event):
            whole = {"schema": 1, "event": event, **_sender(self._config), **document}
            self._notifier.post(scrub(whole, self.redact))

    async def _keep(self, report: Report) -> str:
        try:
            name = await in_thread(lambda: self._write(report), WRITE_SECONDS)
        except TimeoutError:
            self._say_once(f"{self._store.folder}: no failure bundle was written within {WRITE_SECONDS:g} s")
        except HearthError as error:
            self._say_once(str(error))
        except Exception:
            log.exception("A failure bundle could not be made")
        else:
            self._said = False
            log.info("Failure bundle: %s (hearth failures 1)", self._store.folder / name)
            return name
        return ""

    def _write(self, report: Report) -> str:
        """In a thread of its own: disks and interpreters may be slow."""
        if not self._versions:
            self._versions = {**versions(self._config.engine.python), **_configured(self._config)}
        full = replace(report, versions=self._versions)
        return self._store.write(
            report.snapshot.at, report.failure.kind.value, bundle_files(full, self.redact)
        ).name

    def _say_once(self, problem: str) -> None:
        """A full disk is told at its first failure, not at each one."""
        if not self._said:
            log.warning("%s; the recovery goes on without", problem)
        self._said = True


def decision_document(board: Board, report: Report, bundle: str) -> dict[str, Any]:
    """What a webhook is told of a step down or a give-up."""
    decision, failure = report.decision, report.failure
    end = decision.plan is None
    return {
        "text": f"{_what(decision)}: {failure.sentence}",
        **_when(report.snapshot.at),
        "failure": failure.to_json(),
        "done": decision.sentence,
        "plan": {
            "wanted": board.wanted.to_json(),
            "failed": board.plan.to_json(),
            "next": None if decision.plan is None else decision.plan.to_json(),
        },
        "exit_code": decision.exit_code.value if end else None,
        "exit_meaning": decision.exit_code.meaning if end else None,
        "restarts": board.restarts,
        "downtime_seconds": None,
        "bundle": bundle or None,
    }


def ready_document(board: Board, failure: Failure | None, downtime: float) -> dict[str, Any]:
    """What a webhook is told when the engine serves again."""
    return {
        "text": f"Serving again after {downtime:.0f} s with {board.plan}",
        **_when(time.time()),
        "failure": None if failure is None else failure.to_json(),
        "done": None,
        "plan": {"wanted": board.wanted.to_json(), "failed": None, "next": board.plan.to_json()},
        "exit_code": None,
        "exit_meaning": None,
        "restarts": board.restarts,
        "downtime_seconds": round(downtime, 1),
        "bundle": None,
    }


def _what(decision: Decision) -> str:
    return "Given up" if decision.plan is None else f"Stepped down to {decision.plan}"


def _when(at: float) -> dict[str, Any]:
    return {"at": at, "time": utc(at)}


def _sender(config: Config) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "model": config.model.served_name,
        "hearth_version": __version__,
        "engine_version": config.engine.version,
    }


def _configured(config: Config) -> dict[str, Any]:
    return {
        "engine": config.engine.version,
        "model": str(config.model.path),
        "model_revision": config.model.revision,
        "image_digest": config.image_digest,
    }


async def _no_stacks() -> str:
    return ""


async def _asked(question: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """An answer from the machine, or why there is none: whatever it is, recovery goes on."""
    try:
        return await in_thread(question, LOOK_SECONDS)
    except TimeoutError:
        return otherwise(f"no answer within {LOOK_SECONDS:g} s")
    except Exception as error:
        return otherwise(f"{type(error).__name__}: {error}")
