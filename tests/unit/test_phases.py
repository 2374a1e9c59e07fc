"""Phases of an engine's life, from real and reconstructed log lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hearth.engine import phases
from hearth.engine.loglines import plain_lines
from hearth.engine.phases import PhaseLimit, PhaseTracker, rank_of
from hearth.failure import Phase

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
S, N, L, M, W = Phase.SPAWN, Phase.INIT, Phase.LOAD, Phase.MEMORY, Phase.WARM
P, D, B, U, R = Phase.CAPTURE_PREFILL, Phase.CAPTURE_DECODE, Phase.BIND, Phase.WARMUP, Phase.SERVING


def walk(lines: list[str], limits: dict[Phase, PhaseLimit] | None = None) -> tuple[PhaseTracker, list[Phase]]:
    """Feed lines one second apart; the tracker and the phases it reported."""
    tracker = PhaseTracker(limits or {}, 0.0)
    moves = [tracker.observe(line, float(second)) for second, line in enumerate(lines)]
    return tracker, [move for move in moves if move is not None]


def fixture(name: str) -> list[str]:
    return plain_lines((LOGS / name).read_text(encoding="utf-8", errors="replace").split("\n"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("healthy-breakable-0.5.17.log", [N, L, M, W, P, W, D, W, B, U, R]),
        ("healthy-tc_piecewise-0.5.17.log", [N, L, M, W, P, W, D, W, B, U, R]),
        ("healthy-eager-0.5.17.log", [N, L, M, W, B, U, R]),
        ("healthy-sigterm-drain-0.5.21.log", [N, L, M, W, B, U, R, Phase.DRAIN]),
        ("healthy-tp8-warnings-0.5.23.log", [N, L, M, W, P, W, D, W, B, U, R]),
        ("numerics-nan-probability-0.5.12.log", [N, L, M, W, D, W, P, W, B, U, R]),
        ("graph_capture-dynamo-piecewise-0.5.11.log", [N, L, M, W, D, W, P]),
        ("graph_capture-dynamo-0.5.9.log", [N, L, M, W, D, W, P]),
        ("hang-capture-decode-0.5.23.log", [N, L, M, W, P, W, D]),
        ("missing_artifact-model-path-0.5.21.log", []),
    ],
)
def test_order_of_phases(name: str, expected: list[Phase]) -> None:
    tracker, moves = walk(fixture(name))
    assert moves == expected
    assert tracker.ready is (R in expected)


def test_seconds_add_up_to_the_time_that_passed() -> None:
    lines = fixture("healthy-breakable-0.5.17.log")
    tracker, _ = walk(lines)
    assert sum(tracker.seconds.values()) == pytest.approx(len(lines) - 1)
    assert tracker.seconds[P] > tracker.seconds[M] > 0


def test_speculative_engine_loads_and_captures_again() -> None:
    _, moves = walk(
        [
            "[2026-11-29 14:00:00 TP0] Load weight begin. avail mem=93 GB",
            "[2026-11-29 14:00:01 TP0] Load weight end. elapsed=1 s",
            "[2026-11-29 14:00:02 TP0] Memory pool end. avail mem=9 GB",
            "[2026-11-29 14:00:03 TP0] Capture target verify CUDA graph begin. backend=full",
            "[2026-11-29 14:00:04 TP0] Capture target verify CUDA graph end. elapsed=1 s",
            "[2026-11-29 14:00:05 TP0] Load weight begin. avail mem=8 GB",
            "[2026-11-29 14:00:06 TP0] Load weight end. elapsed=1 s",
            "[2026-11-29 14:00:07 TP0] Memory pool end. avail mem=7 GB",
            "[2026-11-29 14:00:08 TP0] Capture draft decode CUDA graph begin. backend=full",
            "[2026-11-29 14:00:09 TP0] Capture draft decode CUDA graph end. elapsed=1 s",
            "[2026-11-29 14:00:10 TP0] Capture draft extend cuda graph begin. This can take minutes.",
        ]
    )
    assert moves == [L, M, W, D, W, L, M, W, D, W, D]


def test_ranks_out_of_step() -> None:
    """A late rank neither ends a phase for the others nor brings an old one back."""
    tracker, moves = walk(
        [
            "[2026-11-29 14:00:00 TP0] Capture target prefill CUDA graph begin. backend=breakable",
            "[2026-11-29 14:00:00 TP1] Capture target prefill CUDA graph begin. backend=breakable",
            "[2026-11-29 14:00:01 TP0] Capture target prefill CUDA graph end. elapsed=1 s",
            "[2026-11-29 14:00:02 TP1] Capture target prefill CUDA graph end. elapsed=2 s",
            "[2026-11-29 14:00:03 TP0] Capture target decode CUDA graph begin. backend=full",
            "[2026-11-29 14:00:03 TP2] Capture target prefill CUDA graph begin. backend=breakable",
            "[2026-11-29 14:00:03 TP2] Load weight end. elapsed=1 s",
        ]
    )
    assert moves == [P, W, D]
    assert tracker.phase is D


def test_marker_glued_to_a_progress_bar() -> None:
    bar = "Capturing batches (bs=1 avail_mem=68.89 GB): 100%|████| 12/12 [00:00<00:00, 13.08it/s]"
    _, moves = walk(
        ["Capture cuda graph begin.", bar + "[2026-11-29 16:52:42 TP3] max_total_num_tokens=560233, x=1"]
    )
    assert moves == [D, B]


@pytest.mark.parametrize(
    "line",
    [
        "Receive: obj=GenerateReqInput(text='The server is fired up and ready to roll!')",
        "please say server_args= to me",
        '"Load weight begin" is what the prompt said',
    ],
)
def test_quoted_markers_mean_nothing(line: str) -> None:
    assert walk([line])[1] == []


def test_deadline_and_silence() -> None:
    tracker = PhaseTracker({S: PhaseLimit(deadline=100, silence=30), L: PhaseLimit(silence=10)}, 0.0)
    assert tracker.overdue(29) is None
    late = tracker.overdue(31)
    assert late is not None
    assert (late.phase, late.why, late.seconds) == (S, "silence", 31)
    tracker.progress(31)
    assert tracker.overdue(60) is None
    tracker.observe("noise", 90)
    over = tracker.overdue(101)
    assert over is not None
    assert over.why == "deadline"
    tracker.observe("server_args={}", 102)
    assert tracker.overdue(10_000) is None, "init has no limit here"
    tracker.observe("Load weight begin. avail mem=1 GB", 103)
    assert "load" in getattr(tracker.overdue(114), "sentence", "")


def test_a_new_engine_in_the_same_log_starts_over() -> None:
    tracker, moves = walk(["server_args={}", "Load weight begin", "server_args={}"])
    assert moves == [N, L, N]
    assert tracker.run == 1


BARS = {
    "Multi-thread loading shards:  12% Completed | 10/85 [00:10<01:20,  1.02it/s]": (
        "Multi-thread loading shards 10/85"
    ),
    "Capturing batches (bs=48 avail_mem=68.90 GB):  25%|██▌       | 3/12 [00:00<00:00]": (
        "Capturing batches 3/12 (bs=48)"
    ),
    "Compiling num tokens (num_tokens=896):   8%|▊         | 3/38 [00:10<01:35,  2.73s/it]": (
        "Compiling num tokens 3/38 (num_tokens=896)"
    ),
    "100% of people": "",
}


@pytest.mark.parametrize(("bar", "text"), BARS.items())
def test_progress_text(bar: str, text: str) -> None:
    tracker, _ = walk([bar])
    assert tracker.progress_text == text


def test_a_new_phase_has_no_progress_yet() -> None:
    bar = "Multi-thread loading shards:  12% Completed | 10/85 [00:10<01:20,  1.02it/s]"
    tracker, moves = walk(["server_args={}", "Load weight begin", bar, "Load weight end."])
    assert moves[-1] not in (N, L)
    assert tracker.progress_text == ""


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[2026-11-29 14:00:00 TP3] x", "TP3"),
        ("[2026-11-29 14:00:00 DP0 TP1 EP1] x", "DP0 TP1 EP1"),
        ("[2026-11-29 14:00:00] x", ""),
        ("[rank6]:[W1129 14:02:31 TCPStore.cpp:106] x", "TP6"),
        ("no stamp TP3", ""),
    ],
)
def test_rank(line: str, rank: str) -> None:
    assert rank_of(line) == rank


def test_every_row_is_found_by_its_own_prefilter() -> None:
    """`has` must stand in each line that `match` accepts: a wrong one would hide the row."""
    for row in yaml.safe_load(phases._DATA.read_text()):
        assert row["has"].strip() in row["match"].replace("\\", "") or row["has"] == "apture ", row
        assert row["source"]


@given(st.lists(st.text(max_size=300), max_size=30), st.floats(0, 1e6))
def test_any_text_is_survived(lines: list[str], now: float) -> None:
    tracker = PhaseTracker({phase: PhaseLimit(1, 1) for phase in Phase}, 0.0)
    for line in lines:
        tracker.observe(line, now)
    assert tracker.phase in Phase
    assert tracker.progress_text is not None
    tracker.overdue(now)


def test_a_ten_megabyte_line() -> None:
    tracker = PhaseTracker({}, 0.0)
    assert tracker.observe("[2026-11-29 14:00:00] server_args=" + "x" * 10_000_000, 1.0) is N
    assert tracker.observe("y" * 10_000_000, 2.0) is None
