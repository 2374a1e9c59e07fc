"""Boards as a supervisor leaves them, for looking at the status page."""

from __future__ import annotations

import math
import random
import time

from hearth.board import Board, Incident
from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import GraphPlan
from hearth.states import State

PIECEWISE = GraphPlan("tc_piecewise", "full", 64)
STANDARD = GraphPlan("disabled", "full", 64)
EAGER = GraphPlan("disabled", "disabled", 64)
PHASES = {
    "spawn": 6.41,
    "init": 38.9,
    "load": 412.37,
    "memory": 9.12,
    "warm": 21.5,
    "capture_prefill": 44.02,
    "capture_decode": 31.77,
    "bind": 0.31,
    "warmup": 4.86,
}
DYNAMO = Failure(
    FailureKind.GRAPH_CAPTURE,
    Phase.CAPTURE_PREFILL,
    Axis.PREFILL,
    evidence=(
        "torch._dynamo.exc.Unsupported: Attempted to call function marked as skipped: posix.stat",
        "[2026-11-29 16:08:36 TP3] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/opt/engine/site/sglang/srt/managers/scheduler.py", line 6082, in run_scheduler_process',
        "    scheduler = Scheduler(server_args, port_args)",
        '  File "/opt/engine/site/flashinfer/jit/core.py", line 308, in is_aot',
        "    return self.aot_path.exists()",
        "[2026-11-29 16:08:36] Received sigquit from a child process. It usually means the child failed.",
    ),
    hint="torch.compile traced into a function that it can't trace; hearth trace names the op",
    source="signature dynamo-unsupported",
)
NUMERICS = Failure(
    FailureKind.NUMERICS,
    Phase.SERVING,
    Axis.NONE,
    evidence=("known-answer request: expected '4', got '!!!!!!!!!!!!!!!!'",),
    hint="the engine computes wrong numbers; try another FP4 GEMM or attention backend",
    source="hearth: canary",
)
KILLED = Failure(
    FailureKind.ENGINE_KILLED,
    Phase.SERVING,
    Axis.NONE,
    evidence=(
        "the engine was killed by signal 9 (SIGKILL)",
        "Out of memory: Killed process 48212 (sglang::schedul)",
    ),
    hint="the kernel's OOM killer: look at the container's memory limit",
    source="exit status",
)


def _board(wanted: GraphPlan = PIECEWISE, plan: GraphPlan = PIECEWISE) -> Board:
    return Board(
        wanted=wanted,
        plan=plan,
        engine_version="0.5.21",
        model="nvidia/GLM-5-NVFP4",
        endpoint="http://gpu1.example.org:30000",
    )


def _hour(board: Board, scale: float = 1.0, gap: tuple[float, float] = (0.0, 0.0)) -> None:
    """An hour of rates; nothing was measured between `gap` seconds ago."""
    dice, now = random.Random(7), time.time()
    for second in range(3600, 0, -5):
        if gap[1] <= second <= gap[0]:
            continue
        load = 0.6 + 0.25 * math.sin(second / 500) + 0.1 * math.sin(second / 90)
        generation = max(0.0, scale * 980 * load + dice.gauss(0, 40))
        prefill = max(0.0, scale * 6200 * load * dice.uniform(0.5, 1.2))
        board.history.add(now - second, generation, prefill)
    _, generation, prefill = board.history.points()[-1]
    board.rates = {"generation": generation, "prefill": prefill}


def _serve(board: Board, since: float) -> None:
    board.state, board.state_since = State.SERVING, time.time() - since
    board.phase, board.phase_seconds = Phase.SERVING, dict(PHASES)
    board.canary_ok, board.canary_detail = True, "answered '4' in 0.21 s"
    board.running, board.queued, board.kv_usage = 37.0, 2.0, 0.613
    board.effective = board.plan
    board.passes = {"decode_cuda_graph": 184211.0, "decode_none": 96.0, "prefill_none": 0.0}
    board.say(f"Serving {board.model} on {board.endpoint} with {board.plan}.")


def serving() -> Board:
    """Healthy, on the wanted plan, no failure."""
    board = _board()
    _serve(board, 3 * 86400 + 4 * 3600)
    board.passes["prefill_cuda_graph"] = 51244.0
    _hour(board)
    return board


def stepped_down() -> Board:
    """Serving on standard graphs after failures of several kinds; the engine also lost a decode size."""
    board = _board(plan=STANDARD)
    _serve(board, 1520)
    board.passes = {"decode_cuda_graph": 184211.0, "decode_none": 960.0, "prefill_none": 51244.0}
    _hour(board, 0.8, (2140, 1530))
    now = time.time()
    board.incidents.extend(
        [
            Incident(now - 9 * 86400, KILLED, PIECEWISE, "engine_killed: start again on the same plan"),
            Incident(now - 2500, NUMERICS, PIECEWISE, "numerics: once is tolerated; same plan again"),
            Incident(
                now - 2130, DYNAMO, PIECEWISE, f"graph_capture: step down from {PIECEWISE} to {STANDARD}"
            ),
        ]
    )
    board.restarts, board.ladder_steps = 3, 1
    board.say(f"Serving {board.model} on {board.endpoint} with {STANDARD} (1 below the wanted {PIECEWISE}).")
    return board


def downgraded() -> Board:
    """Serving, but the engine switched prefill graphs off by itself."""
    board = serving()
    board.effective = STANDARD
    board.downgrades = ["prefill graphs: asked for tc_piecewise, the engine runs disabled"]
    return board


def starting() -> Board:
    """In the middle of loading weights."""
    board = _board()
    board.state, board.state_since = State.STARTING, time.time() - 203
    board.phase, board.progress = Phase.LOAD, "Loading safetensors checkpoint shards 20/54"
    board.phase_seconds = {"spawn": 6.41, "init": 38.9, "load": 150.0}
    board.say(f"Starting the engine with {PIECEWISE}.")
    return board


def gave_up() -> Board:
    """Every step down was tried."""
    board = _board(plan=EAGER)
    board.state, board.state_since = State.GAVE_UP, time.time() - 12
    board.phase, board.phase_seconds = Phase.CAPTURE_DECODE, {"spawn": 6.4, "init": 39.2, "load": 409.0}
    board.incidents.append(
        Incident(time.time() - 13, KILLED, EAGER, f"engine_killed: no step is left below {EAGER}")
    )
    board.restarts, board.ladder_steps = 6, 2
    board.say(
        f"Stopped for good: engine_killed: no step is left below {EAGER}. "
        "Exit code 70: every step down was tried, or the engine died too often."
    )
    return board
