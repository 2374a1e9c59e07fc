"""What went wrong, as a value: kind, phase, axis, evidence, hint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Where in its life the engine is, in the usual order (engines before 0.5.14 capture decode first)."""

    SPAWN = "spawn"
    INIT = "init"
    LOAD = "load"
    MEMORY = "memory"
    WARM = "warm"
    CAPTURE_PREFILL = "capture_prefill"
    CAPTURE_DECODE = "capture_decode"
    BIND = "bind"
    WARMUP = "warmup"
    SERVING = "serving"
    DRAIN = "drain"

    @property
    def capturing(self) -> bool:
        """Whether CUDA graphs are being captured."""
        return self in (Phase.CAPTURE_PREFILL, Phase.CAPTURE_DECODE)


class Axis(StrEnum):
    """The part of a graph plan that a failure speaks against."""

    PREFILL = "prefill"
    DECODE = "decode"
    MEMORY = "memory"
    NONE = "none"


class FailureKind(StrEnum):
    """The kinds of DESIGN's failure table."""

    CONFIG = "config"
    PORT_IN_USE = "port_in_use"
    MISSING_ARTIFACT = "missing_artifact"
    MISSING_COMPILER = "missing_compiler"
    UNSUPPORTED = "unsupported"
    GRAPH_CAPTURE = "graph_capture"
    GRAPH_REPLAY = "graph_replay"
    OOM = "oom"
    NUMERICS = "numerics"
    COMM = "comm"
    HANG = "hang"
    ENGINE_KILLED = "engine_killed"
    GPU_FAULT = "gpu_fault"
    GPU_DETACHED = "gpu_detached"
    HOST_MISMATCH = "host_mismatch"
    DISK = "disk"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Failure:
    """A classified crash, hang or refusal.

    `evidence` holds the log lines that say so, first cause first; `source` says where the rule that
    recognised it comes from (a signature's id, or the supervisor's own observation such as a deadline).
    """

    kind: FailureKind
    phase: Phase
    axis: Axis = Axis.NONE
    evidence: tuple[str, ...] = ()
    hint: str = ""
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """The shape that `hearth explain --json` and `/status` print."""
        return {
            "kind": self.kind.value,
            "phase": self.phase.value,
            "axis": self.axis.value,
            "evidence": list(self.evidence),
            "hint": self.hint,
            "source": self.source,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Failure:
        """Read what `to_json` wrote. Raises KeyError or ValueError on anything else."""
        return cls(
            kind=FailureKind(data["kind"]),
            phase=Phase(data["phase"]),
            axis=Axis(data["axis"]),
            evidence=tuple(str(line) for line in data["evidence"]),
            hint=str(data["hint"]),
            source=str(data["source"]),
        )

    @property
    def sentence(self) -> str:
        """One line for a person."""
        where = f"{self.kind.value} in {self.phase.value}"
        return f"{where}: {self.evidence[0][:200]}" if self.evidence else where
