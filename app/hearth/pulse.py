"""Whether a serving engine is alive, judged by its tokens and by the canary. Values in, values out."""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.engine.probe import CanaryResult
from hearth.engine.samples import EngineSamples
from hearth.failure import Failure, FailureKind, Phase

CANARY_TRIES = 2
"""Unanswered canaries in a row, with no other progress, before the engine counts as hung or broken."""


@dataclass
class Pulse:
    """Follows one serving engine; times are monotonic seconds."""

    stall: float
    """Seconds with requests running and no progress that make a hang."""
    last_progress: float
    progress: float = -1.0
    running: float = 0.0
    _bad: list[CanaryResult] = field(default_factory=list)

    def observe(self, samples: EngineSamples | None, now: float) -> None:
        """Take in one scrape, or that the engine gave none."""
        if samples is None:
            return
        if samples.progress != self.progress or samples.running == 0:
            self.last_progress = now
        if samples.progress != self.progress:
            self._bad.clear()
        self.progress, self.running = samples.progress, samples.running

    def stalled(self, now: float) -> Failure | None:
        """A hang: requests are running and nothing has moved for `stall` seconds."""
        quiet = now - self.last_progress
        if self.running == 0 or quiet < self.stall:
            return None
        text = f"{self.running:g} requests running and no token for {quiet:.0f} s"
        return Failure(
            FailureKind.HANG,
            Phase.SERVING,
            evidence=(text,),
            hint="a kernel or a collective hangs; if it comes back, look at P2P and IOMMU (hearth doctor)",
            source="hearth: token progress",
        )

    def canary(self, result: CanaryResult) -> Failure | None:
        """Take in a canary's end; a wrong answer is a verdict at once, silence only when it repeats."""
        if result.ok:
            self._bad.clear()
            return None
        if result.verdict == "wrong":
            return numerics(result, Phase.SERVING)
        self._bad.append(result)
        return unanswered(self._bad, Phase.SERVING) if len(self._bad) >= CANARY_TRIES else None


def numerics(result: CanaryResult, phase: Phase) -> Failure:
    """The engine answers, but not with what it must."""
    return Failure(
        FailureKind.NUMERICS,
        phase,
        evidence=(f"known-answer request: {result.detail}",),
        hint="the engine computes wrong numbers; try another FP4 GEMM or attention backend",
        source="hearth: canary",
    )


def unanswered(results: list[CanaryResult], phase: Phase) -> Failure:
    """Known-answer requests that got no answer (a hang) or only errors."""
    hung = results[-1].verdict == "timeout"
    return Failure(
        FailureKind.HANG if hung else FailureKind.UNKNOWN,
        phase,
        evidence=tuple(f"known-answer request: {r.detail}" for r in results),
        hint="the engine takes requests and doesn't answer them" if hung else "see the engine's log",
        source="hearth: canary",
    )
