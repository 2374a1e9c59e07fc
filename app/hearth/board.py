"""The board: what the supervisor knows right now, for `/status`, the page and `hearth status`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hearth import __version__
from hearth.failure import Failure, Phase
from hearth.host.xid import Xid
from hearth.ladder import GraphPlan
from hearth.states import State

HISTORY_SECONDS = 3600.0
HISTORY_STEP = 10.0
_FAILURES_KEPT = 50
_LIVE = (State.SERVING, State.DRAINING)


@dataclass(frozen=True)
class Incident:
    """A failure, when it was seen (Unix seconds), under which plan, and what was done about it."""

    at: float
    failure: Failure
    plan: GraphPlan
    done: str
    bundle: str = ""
    """Name of the failure bundle; empty where none could be written."""

    def to_json(self) -> dict[str, Any]:
        """One entry of `failures` in `/status`."""
        return {
            "at": self.at,
            **self.failure.to_json(),
            "plan": self.plan.to_json(),
            "done": self.done,
            **({"bundle": self.bundle} if self.bundle else {}),
        }


class RateHistory:
    """Tokens per second over the last hour, one point for each `HISTORY_STEP` seconds (their mean)."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float]] = deque(maxlen=int(HISTORY_SECONDS / HISTORY_STEP))
        self._bucket: list[tuple[float, float]] = []
        self._bucket_at = 0.0

    def add(self, at: float, generation: float, prefill: float) -> None:
        """`at` in Unix seconds, rates in tokens per second."""
        slot = at - at % HISTORY_STEP
        if slot < self._bucket_at:
            self._go_back_to(slot)
        if self._bucket and slot != self._bucket_at:
            self._points.append(self._mean())
            self._bucket.clear()
        self._bucket_at = slot
        self._bucket.append((generation, prefill))

    def points(self) -> list[tuple[float, float, float]]:
        """(Unix seconds, generation, prefill), oldest first; none older than an hour before the newest."""
        points = [*self._points, self._mean()] if self._bucket else list(self._points)
        return [point for point in points if point[0] > points[-1][0] - HISTORY_SECONDS]

    def _go_back_to(self, slot: float) -> None:
        """The clock was set back: what it called the future has not happened yet."""
        self._bucket.clear()
        while self._points and self._points[-1][0] >= slot:
            self._points.pop()

    def _mean(self) -> tuple[float, float, float]:
        count = len(self._bucket)
        generation = sum(rate[0] for rate in self._bucket) / count
        prefill = sum(rate[1] for rate in self._bucket) / count
        return self._bucket_at, round(generation, 2), round(prefill, 2)


@dataclass
class Board:
    """Facts that the supervisor writes and everybody else reads, all on one event loop."""

    wanted: GraphPlan
    plan: GraphPlan
    """The plan that the engine was last started with."""
    engine_version: str = ""
    model: str = ""
    endpoint: str = ""
    """Where clients reach the engine."""
    effective: GraphPlan | None = None
    """What the engine says it runs; None until it was asked."""
    downgrades: list[str] = field(default_factory=list)
    """One sentence for each axis on which the engine silently runs something else."""
    state: State = State.IDLE
    state_since: float = field(default_factory=time.time)
    phase: Phase = Phase.SPAWN
    phase_seconds: dict[str, float] = field(default_factory=dict)
    progress: str = ""
    sentence: str = "Nothing has been started yet."
    restarts: int = 0
    ladder_steps: int = 0
    canary_ok: bool = False
    canary_detail: str = ""
    rates: dict[str, float] = field(default_factory=lambda: {"generation": 0.0, "prefill": 0.0})
    running: float = 0.0
    queued: float = 0.0
    kv_usage: float = 0.0
    passes: dict[str, float] = field(default_factory=dict)
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=_FAILURES_KEPT))
    gpu_fault: Xid | None = None
    """The first error of the driver that no restart can fix."""
    history: RateHistory = field(default_factory=RateHistory)
    loop_turned_at: float = field(default_factory=time.monotonic)
    """When the supervisor's loop last turned (monotonic seconds)."""

    @property
    def ready(self) -> bool:
        """Whether the engine serves and its last known-answer request was answered right."""
        return self.state is State.SERVING and self.canary_ok

    def say(self, sentence: str) -> None:
        """Set the one sentence that tells what goes on."""
        self.sentence = sentence

    def to_json(self) -> dict[str, Any]:
        """The `/status` document; `hearth status --json` prints it as it is."""
        effective = self.effective or self.plan
        live = self.state in _LIVE
        return {
            "version": __version__,
            "state": self.state.value,
            "state_since": self.state_since,
            "ready": self.ready,
            "phase": self.phase.value,
            "phase_seconds": {name: round(s, 2) for name, s in self.phase_seconds.items()},
            "progress": self.progress,
            "sentence": self.sentence,
            "engine_version": self.engine_version,
            "model": self.model,
            "endpoint": self.endpoint,
            "plan": {
                "wanted": {**self.wanted.to_json(), "name": self.wanted.name},
                "started": {**self.plan.to_json(), "name": self.plan.name},
                "effective": {**effective.to_json(), "name": effective.name},
                "known": self.effective is not None,
                "downgrades": self.downgrades,
            },
            "ladder_steps": self.ladder_steps,
            "tokens_per_second": self.rates if live else dict.fromkeys(self.rates, 0.0),
            "requests": {
                "running": self.running if live else 0.0,
                "queued": self.queued if live else 0.0,
            },
            "kv_usage": self.kv_usage if live else 0.0,
            "graph_passes": self.passes,
            "canary": {"ok": self.canary_ok, "detail": self.canary_detail},
            "restarts": self.restarts,
            "failures": [incident.to_json() for incident in self.incidents],
            "history": self.history.points(),
        }
