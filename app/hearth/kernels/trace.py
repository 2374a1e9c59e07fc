"""The trace gate: which FP4 functions can `torch.compile(fullgraph=True)` trace, and what stops the others?

Runs without a GPU, on fake CUDA tensors of a pretended SM120 (trace_device), with FlashInfer's libraries
looking installed. `check` is what `hearth trace` prints, and what an image build runs.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hearth.kernels import trace_device
from hearth.kernels.trace_cases import Attempt, Case, attempts, cases, load_engine
from hearth.kernels.trace_peel import Frame, Obstacle, peel

# Files of torch that stand in the traced stack for the interpreter's own work.
_MACHINERY = "torch/_dynamo/polyfills/"


@dataclass(frozen=True)
class Row:
    """One traced call. `frame`, `call` and `reason` are empty if it is traceable.

    `frame` is `file:line function` relative to site-packages: the innermost one of FlashInfer's or the
    engine's own code. `inside` is the innermost of all (often in the standard library).
    """

    op: str
    traceable: bool
    required: bool = False
    frame: str = ""
    call: str = ""
    inside: str = ""
    reason: str = ""
    obstacles: tuple[Row, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The shape that `hearth trace --json` prints for one op."""
        return {
            "op": self.op,
            "traceable": self.traceable,
            "required": self.required,
            "frame": self.frame,
            "call": self.call,
            "inside": self.inside,
            "reason": self.reason,
            "obstacles": [
                {"frame": o.frame, "call": o.call, "inside": o.inside, "reason": o.reason}
                for o in self.obstacles
            ],
        }


@dataclass(frozen=True)
class Report:
    """What the gate found. `versions` names flashinfer, torch and sglang ("" if not installed)."""

    versions: dict[str, str]
    ops: tuple[Row, ...]
    attempts: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that the installed engine will trace can be traced."""
        return all(row.traceable for row in self.ops if row.required)

    def to_json(self) -> dict[str, Any]:
        """The shape that `hearth trace --json` prints."""
        return {
            "ok": self.ok,
            "versions": self.versions,
            "ops": [row.to_json() for row in self.ops],
            "attempts": [row.to_json() for row in self.attempts],
        }


def check(everything: bool = False) -> Report:
    """Trace the FP4 ops; with `everything` also each layout, other FP4 functions, and the known attempts.

    Raises MissingError if torch or flashinfer isn't installed.
    """
    trace_device.prepare_environment()
    problem = load_engine()
    with trace_device.pretend():
        plan = cases(everything, problem)
        rows = tuple(_row(case) for case in plan.cases)
        tried = tuple(_attempt(attempt) for attempt in attempts()) if everything else ()
    return Report(plan.versions, rows, tried)


def trace_once(call: Callable[[], Any]) -> Obstacle | None:
    """Compile and run one call with `fullgraph=True, backend="eager"`; what stopped it, or None."""
    import torch

    torch._dynamo.reset()
    try:
        torch.compile(call, fullgraph=True, backend="eager")()
    except Exception as error:
        return _obstacle(error)
    return None


def _row(case: Case) -> Row:
    if case.missing:
        return Row(case.op, False, case.required, reason=case.missing)
    found = peel(case.call, trace_once, _owned) if case.deep else [*filter(None, [trace_once(case.call)])]
    if not found:
        return Row(case.op, True, case.required)
    rows = tuple(_describe(case, obstacle) for obstacle in found)
    first = rows[0]
    return Row(case.op, False, case.required, first.frame, first.call, first.inside, first.reason, rows)


def _attempt(attempt: Attempt) -> Row:
    with attempt.around() as call:
        found = trace_once(call)
    case = Case(attempt.name, call)
    return Row(attempt.name, True) if found is None else _describe(case, found)


def _describe(case: Case, obstacle: Obstacle) -> Row:
    inner = obstacle.stack[-1:]
    outer = tuple(frame for frame in obstacle.stack if _owned(frame.file))[-1:] or inner
    return Row(
        case.op,
        False,
        case.required,
        frame=_show(outer[0]) if outer else "",
        call=outer[0].code if outer else "",
        inside=f"{_show(inner[0])}: {inner[0].code}" if inner and inner != outer else "",
        reason=obstacle.reason,
    )


def _owned(file: str) -> bool:
    """Whether a file belongs to FlashInfer, its binding, or the engine."""
    return re.search(r"site-packages/(flashinfer|tvm_ffi|sglang)/", file) is not None


def _show(frame: Frame) -> str:
    return f"{relative(frame.file)}:{frame.line} {frame.name}"


def relative(file: str) -> str:
    """A path as seen from site-packages, or from the standard library's folder."""
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in file:
            return file.rpartition(marker)[2]
    return re.sub(r"^.*/lib/python3\.\d+/", "", file)


def _obstacle(error: Exception) -> Obstacle:
    stack = getattr(error, "real_stack", None) or traceback.StackSummary()
    frames = [Frame(f.filename, f.lineno or 0, f.name, (f.line or "").strip()) for f in stack]
    inside = [
        f for f in frames if _MACHINERY not in f.file and not f.file.endswith("hearth/kernels/trace_cases.py")
    ]
    return Obstacle(_reason(error), tuple(inside))


def _reason(error: Exception) -> str:
    """One line: Dynamo's explanation where there is one, else the first line of the message."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(error)).strip()
    inner = re.search(r"got (\w+)\([\"'](.+?)(?:\.|[\"']\))", text)
    if inner:
        return f"{inner[1]}: {inner[2]}"
    explained = re.search(r"^\s*Explanation: (.+?)(?: This function is either.*)?$", text, re.MULTILINE)
    if explained:
        return explained[1].strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
