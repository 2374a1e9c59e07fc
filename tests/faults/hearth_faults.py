"""Test stand-in: faults inside a real SGLang engine, by its own plugin mechanism. Never part of the wheel.

Put this folder on the engine's PYTHONPATH and choose by HEARTH_FAULT:

    none                 nothing
    capture_prefill      Dynamo's real `Unsupported`, if prefill graphs are asked for
    capture_decode       a CUDA error in decode capture, if full decode graphs are asked for
    capture_oom          out of memory in decode capture, if its largest batch is above 8 (or not set)
    capture_hang         prefill capture never ends, if prefill graphs are asked for
    decode_crash:N       "an illegal memory access was encountered" at the N-th decode step
    decode_hang:N        the N-th decode step never ends
    decode_kill:N        the scheduler kills itself (SIGKILL) at the N-th decode step
    decode_nan[:N]       from the N-th decode step on (1), all logits are NaN

`once:FAULT` lets it happen only while the file named by HEARTH_FAULT_MARKER doesn't exist, and makes that
file as it happens. A CPU has no CUDA graphs: what is asked for is read from the engine's arguments, and
the lines and wrappings around a fault are those of SGLang's own capture code (cuda_graph_setup.py and
prefill_/decode_cuda_graph_runner.py, 0.5.21 and 0.5.23). The server's warm-up request counts as steps too.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import NamedTuple

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
CAPTURE_LOG = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
OOM_ABOVE = 8
ILLEGAL_ACCESS = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 94.97 GiB of which "
    "1.31 GiB is free. Process has 93.65 GiB memory in use."
)
CAPTURING = "CUDA error: operation not permitted when stream is capturing"


def parse(text: str) -> tuple[str, int, bool]:
    """Split `[once:]NAME[:N]` into (name, n, once). Exits with a clear line on anything else."""
    rest = text.removeprefix("once:")
    name, _, number = rest.partition(":")
    known = name == "none" or name in CAPTURE or name in DECODE
    if not known or (number and not (number.isdigit() and name in DECODE)):
        raise SystemExit(f"HEARTH_FAULT={text}: not a fault; see tests/faults/hearth_faults.py")
    if not number and name in DECODE and name != "decode_nan":
        raise SystemExit(f"HEARTH_FAULT={text}: write the decode step, as in {name}:30")
    once = rest != text
    if once and not os.environ.get("HEARTH_FAULT_MARKER"):
        raise SystemExit(f"HEARTH_FAULT={text}: HEARTH_FAULT_MARKER has to name a file")
    return name, int(number or 1), once


def first_time(once: bool) -> bool:
    """Whether the fault may happen now; leaves the marker when it may happen only once."""
    if not once:
        return True
    try:
        os.close(os.open(os.environ["HEARTH_FAULT_MARKER"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def block() -> None:
    """Never return."""
    threading.Event().wait()


# --- capture faults ---


class Plan(NamedTuple):
    """The graphs asked for: backends (None: not given, which on a CPU means none), largest decode batch."""

    prefill: str | None
    decode: str | None
    max_bs: int | None

    def prefill_graphs(self) -> bool:
        """Whether prefill graphs are asked for."""
        return self.prefill not in (None, "disabled")

    def full_decode(self) -> bool:
        """Whether full decode graphs are asked for; the next rung, breakable, works."""
        return self.decode == "full"

    def large_decode(self) -> bool:
        """Whether decode graphs are asked for, with a large batch."""
        return self.decode not in (None, "disabled") and (self.max_bs is None or self.max_bs > OOM_ABOVE)


def begin(phase: str, backend: str | None) -> None:
    """Write the line SGLang writes as a capture begins."""
    sizes = "num_tokens=[4, 8, 16]" if phase == "prefill" else "num_tokens_per_req=1"
    line = f"Capture target {phase} CUDA graph begin. backend={backend}, {sizes}, avail mem=0.00 GB"
    logging.getLogger(CAPTURE_LOG).info(line)


def capture_prefill(plan: Plan) -> None:
    """Fail as prefill capture fails when something in the model can't be traced."""
    import untraceable

    begin("prefill", plan.prefill)
    try:
        untraceable.trace()
    except RuntimeError as error:
        if plan.prefill != "tc_piecewise":
            raise
        from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import prefill_failure_msg

        hint = prefill_failure_msg(plan.prefill)
        raise RuntimeError(f"Capture prefill CUDA graph failed: {error}\n{hint}") from error


def capture_hang(plan: Plan) -> None:
    """Begin prefill capture and never end it."""
    begin("prefill", plan.prefill)
    block()


def fail_decode(plan: Plan, error: RuntimeError) -> None:
    """Fail as decode capture fails: SGLang wraps what went wrong, with its advice."""
    from sglang.srt.model_executor.runner_backend_utils import CUDA_GRAPH_CAPTURE_FAILED_MSG

    begin("decode", plan.decode)
    try:
        raise error
    except RuntimeError as caught:
        raise Exception(f"Capture cuda graph failed: {caught}\n{CUDA_GRAPH_CAPTURE_FAILED_MSG}")  # noqa: B904


def capture_decode(plan: Plan) -> None:
    """Fail in decode capture."""
    fail_decode(plan, RuntimeError(CAPTURING))


def capture_oom(plan: Plan) -> None:
    """Run out of memory in decode capture."""
    import torch

    fail_decode(plan, torch.OutOfMemoryError(OUT_OF_MEMORY))


CAPTURE: dict[str, tuple[Callable[[Plan], bool], Callable[[Plan], None]]] = {
    "capture_prefill": (Plan.prefill_graphs, capture_prefill),
    "capture_hang": (Plan.prefill_graphs, capture_hang),
    "capture_decode": (Plan.full_decode, capture_decode),
    "capture_oom": (Plan.large_decode, capture_oom),
}


def capture_hook(name: str, once: bool) -> Callable:
    """Return the hook around ModelRunner.init_cuda_graphs."""
    concerned, act = CAPTURE[name]

    def init_cuda_graphs(original, runner, *args, **kwargs):
        asked = runner.server_args
        plan = Plan(
            asked.cuda_graph_backend_prefill, asked.cuda_graph_backend_decode, asked.cuda_graph_max_bs_decode
        )
        if concerned(plan) and first_time(once):
            act(plan)
        return original(runner, *args, **kwargs)

    return init_cuda_graphs


# --- decode faults ---


def decode_crash() -> None:
    """Fail as a step fails after a kernel wrote where it must not."""
    raise RuntimeError(ILLEGAL_ACCESS)


def decode_kill() -> None:
    """Die at once, as by the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


DECODE: dict[str, Callable[[], None]] = {
    "decode_crash": decode_crash,
    "decode_hang": block,
    "decode_kill": decode_kill,
    "decode_nan": lambda: None,
}


def decode_hook(name: str, at: int, once: bool) -> Callable:
    """Return the hook around ModelRunner.forward: it counts decode steps and acts at step `at`."""
    steps, poisoned = 0, False

    def forward(original, runner, forward_batch, *args, **kwargs):
        nonlocal steps, poisoned
        if forward_batch.forward_mode.is_decode():
            steps += 1
            if steps == at and first_time(once):
                DECODE[name]()
                poisoned = name == "decode_nan"
        out = original(runner, forward_batch, *args, **kwargs)
        if poisoned:
            out.logits_output.next_token_logits.fill_(float("nan"))
        return out

    return forward


def install() -> None:
    """Register the chosen fault. SGLang calls this in each of its processes."""
    name, at, once = parse(os.environ.get("HEARTH_FAULT") or "none")
    if name == "none":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if name in CAPTURE:
        HookRegistry.register(f"{RUNNER}.init_cuda_graphs", capture_hook(name, once), HookType.AROUND)
    else:
        HookRegistry.register(f"{RUNNER}.forward", decode_hook(name, at, once), HookType.AROUND)
