"""Every fixture log is named right, and stays so when what doesn't matter changes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.engine.classify import classify, hang_failure, is_fatal_hint, live_signature
from hearth.engine.phases import Overdue
from hearth.engine.signatures import Tier, parse, table
from hearth.errors import ConfigError
from hearth.failure import Axis, Failure, FailureKind, Phase

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
INDEX: list[dict[str, Any]] = yaml.safe_load((LOGS / "INDEX.yaml").read_text(encoding="utf-8"))
WORDINGS: dict[str, list[dict[str, str]]] = yaml.safe_load(
    (LOGS / "WORDINGS.yaml").read_text(encoding="utf-8")
)
IDS = [row["name"] for row in INDEX]
STAMP = re.compile(r"\[2026-11-29 \d\d:\d\d:\d\d")
FATAL = re.compile(
    r"hit an exception|Error|error|Fail|crashed|died|Xid|watchdog|NaN|NVML|exception|nvcc|oom|CDI"
)


def lines_of(row: dict[str, Any]) -> list[str]:
    return (LOGS / row["name"]).read_text(encoding="utf-8", errors="replace").split("\n")


def raw_lines_of(row: dict[str, Any]) -> list[str]:
    return (LOGS / row["name"]).read_bytes().decode("utf-8", "replace").split("\n")


def told(failure: Failure | None) -> tuple[str | None, str | None, str | None]:
    return (failure.kind.value, failure.phase.value, failure.axis.value) if failure else (None, None, None)


def expected(row: dict[str, Any]) -> tuple[str | None, str | None, str | None]:
    return row["kind"], row["phase"], row["axis"]


@pytest.mark.parametrize("row", INDEX, ids=IDS)
def test_fixture(row: dict[str, Any]) -> None:
    failure = classify(raw_lines_of(row), row["exit_status"])
    assert told(failure) == expected(row)
    if failure is not None:
        assert failure.evidence
        assert failure.hint
        assert failure.source
        assert all(len(line) <= 500 for line in failure.evidence)


def test_fixtures_cover_every_kind_and_are_all_listed() -> None:
    assert {row["kind"] for row in INDEX} == {kind.value for kind in FailureKind} | {None}
    assert sorted(IDS) == sorted(p.name for p in LOGS.glob("*.log"))
    assert all(row["made"] in ("real", "reconstructed") for row in INDEX)
    assert all(row["origin"] for row in INDEX)


# --- what must not matter ---


def crlf(lines: list[str]) -> list[str]:
    return [line + "\r" for line in lines]


def other_times(lines: list[str]) -> list[str]:
    return [STAMP.sub("[2027-01-02 03:04:05", line) for line in lines]


def milliseconds(lines: list[str]) -> list[str]:
    return [STAMP.sub(lambda m: m[0] + ".123", line) for line in lines]


def other_ranks(lines: list[str]) -> list[str]:
    return [re.sub(r"(?<=:\d\d) TP(\d)\]", r" DP0 TP1\1 EP1\1]", line) for line in lines]


def other_paths(lines: list[str]) -> list[str]:
    return [line.replace("/opt/engine/site", "/usr/local/lib/python3.12/dist-packages") for line in lines]


def journal(lines: list[str]) -> list[str]:
    if any(line.startswith("Nov ") for line in lines):
        return lines
    return [f"Nov 29 16:05:39 gpu1 hearth[1234]: {line}" for line in lines]


def compose(lines: list[str]) -> list[str]:
    return [f"engine-1  | {line}" for line in lines]


def json_file(lines: list[str]) -> list[str]:
    rest = {"stream": "stderr", "time": "2026-11-29T16:05:39Z"}
    return [json.dumps({"log": line + "\n", **rest}) for line in lines]


def docker_stamps(lines: list[str]) -> list[str]:
    return [f"2026-11-29T16:05:39.123456789Z {line}" for line in lines]


def coloured(lines: list[str]) -> list[str]:
    return [f"\x1b[31m{line}\x1b[0m" for line in lines]


def noise_after(lines: list[str]) -> list[str]:
    """Echoes of other ranks among and after the fatal lines."""
    first = next((i for i, line in enumerate(lines) if FATAL.search(line)), len(lines))
    out = []
    for i, line in enumerate(lines):
        out.append(line)
        if i > first and i % 7 == 0:
            out.append(
                "[rank6]:[W1129 14:02:31.184510746 TCPStore.cpp:106] [c10d] sendBytes failed on "
                "SocketImpl(fd=98): Broken pipe"
            )
    echo = "[rank6]:[E1129 14:02:31 ProcessGroupNCCL.cpp:683] [Rank 6] NCCL error: remote process exited"
    return [*out, f"{echo} or there was a network error, ncclRemoteError"] if first < len(lines) else out


def in_engine(lines: list[str]) -> list[str]:
    """What differs between hosts and versions: ranks, paths, stamps with milliseconds, line ends."""
    return crlf(milliseconds(other_ranks(other_paths(lines))))


def terminal(lines: list[str]) -> list[str]:
    return coloured(other_times(lines))


MUTATIONS = [in_engine, terminal, journal, compose, json_file, docker_stamps]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("row", INDEX, ids=IDS)
def test_form_does_not_matter(row: dict[str, Any], mutate: Any) -> None:
    if mutate is compose and any(line.startswith(("Nov ", "[ 1843")) for line in lines_of(row)):
        return
    assert told(classify(mutate(raw_lines_of(row)), row["exit_status"])) == expected(row)


@pytest.mark.parametrize("row", [r for r in INDEX if r["kind"]], ids=[r["name"] for r in INDEX if r["kind"]])
def test_echoes_of_other_ranks_do_not_matter(row: dict[str, Any]) -> None:
    if row["exit_status"] is None and row["kind"] == "hang":
        return  # a log that just stops has no line that an echo could follow
    assert told(classify(noise_after(lines_of(row)), row["exit_status"])) == expected(row)


# --- messages that no fixture holds ---

START = [
    "[2026-11-29 14:00:01 TP0] server_args=ServerArgs(x=1)",
    "[2026-11-29 14:00:02 TP0] Load weight begin. avail",
]
TO_WARM = [
    *START,
    "[2026-11-29 14:01:02 TP0] Load weight end.",
    "[2026-11-29 14:01:03 TP0] Memory pool end. avail",
]
TO_PREFILL = [
    *TO_WARM,
    "[2026-11-29 14:01:04 TP0] Capture target prefill CUDA graph begin. backend=breakable",
]
TO_DECODE = [
    *TO_WARM,
    "[2026-11-29 14:01:04 TP0] Capture cuda graph begin. This can take up to several minutes.",
]
TO_SERVING = [*TO_DECODE, "[2026-11-29 14:01:05 TP0] Capture cuda graph end. Time elapsed: 1 s",
              "[2026-11-29 14:01:06] The server is fired up and ready to roll!"]  # fmt: skip

STARTS = {"load": START, "warm": TO_WARM, "capture_prefill": TO_PREFILL, "capture_decode": TO_DECODE,
          "serving": TO_SERVING}  # fmt: skip


def died(text: str) -> list[str]:
    return [
        "[2026-11-29 14:02:00 TP3] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x/sglang/srt/managers/scheduler.py", line 1, in run_scheduler_process',
        "    raise Exception('CUDA out of memory')  # program text is no evidence",
        *text.split("\n"),
        "",
        "[2026-11-29 14:02:01] Received sigquit from a child process. It usually means the child failed.",
    ]


@pytest.mark.parametrize("row", WORDINGS["died"], ids=lambda row: f"{row['start']}-{row['text'][:60]}")
def test_wording(row: dict[str, str]) -> None:
    failure = classify([*STARTS[row["start"]], *died(row["text"])], -9)
    assert failure is not None
    assert (failure.kind.value, failure.axis.value) == (row["kind"], row["axis"])
    first = row["text"].split("\n")[0].strip()[:40]
    assert any(first in line for line in failure.evidence)


def test_first_rank_to_fail_wins() -> None:
    lines = [
        *TO_SERVING,
        *died("RuntimeError: CUDA error: an illegal memory access was encountered"),
        "[rank5]:[E1129] [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
        "[2026-11-29 14:02:09 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]
    failure = classify(lines, -9)
    assert failure is not None
    assert failure.kind in (FailureKind.GRAPH_REPLAY, FailureKind.OOM)
    assert classify(lines[:-2], -9).kind is FailureKind.GRAPH_REPLAY  # type: ignore[union-attr]


def test_cause_in_a_chain_is_first_evidence() -> None:
    row = next(r for r in INDEX if r["name"] == "oom-capture-hidden-0.5.17.log")
    failure = classify(lines_of(row), -9)
    assert failure is not None
    assert failure.evidence[0].startswith("torch.OutOfMemoryError")
    assert any("Fail when using backend" in line for line in failure.evidence)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (-9, "engine_killed"),
        (137, "engine_killed"),
        (-11, "engine_killed"),
        (1, "unknown"),
        (0, "unknown"),
        (None, "unknown"),
        (2, "config"),
        (127, "missing_artifact"),
    ],
)
def test_only_an_exit_status(status: int | None, kind: str) -> None:
    failure = classify([], status)
    assert failure is not None
    assert failure.kind.value == kind


def test_a_given_phase_is_believed() -> None:
    """The supervisor's ring may lack the start of the log."""
    failure = classify(died("torch.OutOfMemoryError: CUDA out of memory."), -9, Phase.CAPTURE_DECODE)
    assert told(failure) == ("oom", "capture_decode", "memory")


def test_crash_looping_container_is_explained_by_an_earlier_start() -> None:
    failed = [*START, *died("torch.OutOfMemoryError: CUDA out of memory.")]
    assert told(classify([*failed, *START], None))[0] == "oom"
    assert told(classify([*failed, *TO_SERVING], None))[0] is None


def test_hang_failure() -> None:
    failure = hang_failure(Overdue(Phase.CAPTURE_DECODE, "silence", 601.0), TO_DECODE)
    assert told(failure) == ("hang", "capture_decode", "decode")
    assert "601 s" in failure.evidence[0]
    bind = "ERROR: [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000)"
    named = hang_failure(Overdue(Phase.BIND, "deadline", 300.0), [*TO_WARM, bind])
    assert named.kind is FailureKind.PORT_IN_USE


# --- live ---


@pytest.mark.parametrize("row", WORDINGS["live"], ids=lambda row: row["source"])
def test_live(row: dict[str, str]) -> None:
    found = live_signature(row["line"])
    assert found is not None
    assert found.id == row["source"]
    assert is_fatal_hint(row["line"])


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-29 16:52:43] Decode batch, #running-req: 1, cuda graph: True, gen throughput (token/s): 24",
        "Receive: obj=GenerateReqInput(text='an illegal memory access was encountered')",
        "NVRM: Xid (PCI:0000:c1:00): 31, pid=91422, name=python3, Ch 00000008, MMU Fault",
        '[2026-11-29 16:52:43] INFO:     127.0.0.1:32988 - "POST /generate HTTP/1.1" 200 OK',
        "Ignore import error when loading sglang.srt.models.mllama: No module named 'vllm'",
    ],
)
def test_not_live(line: str) -> None:
    assert live_signature(line) is None


def test_no_line_of_a_healthy_log_is_live() -> None:
    for row in INDEX:
        if row["kind"] is None and "restarted" not in row["name"] and "group-term" not in row["name"]:
            assert [line for line in lines_of(row) if is_fatal_hint(line)] == []


# --- the table ---


def test_every_row_has_a_hint_and_a_source() -> None:
    for row in table().signatures:
        assert row.hint, row.id
        assert row.source, row.id
    assert {row.kind for row in table().signatures} == set(FailureKind)


def test_every_text_of_a_row_finds_that_row_or_a_better_one() -> None:
    """No text is shadowed by the noise list, and none is dead."""
    for row in table().signatures:
        phase = next(iter(sorted(row.phases)), Phase.CAPTURE_DECODE)
        for glob in row.globs:
            line = " zz ".join(glob)
            found = table().match(line, phase)
            assert row in found, (row.id, glob)
            assert found[0].tier <= row.tier


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("signatures: [{id: a, kind: nope, tier: cause, hint: h, source: s}]\nnoise: []", "nope"),
        (
            "signatures: [{id: a, kind: oom, tier: cause, hint: h, source: s, colour: red}]\nnoise: []",
            "colour",
        ),
        ("signatures: [{id: a, kind: oom, tier: cause, source: s}]\nnoise: []", "hint"),
        (
            "signatures: [{id: a, kind: oom, tier: cause, text: [ABC], hint: h, source: s}]\nnoise: []",
            "lower case",
        ),
        (
            "signatures: [{id: a, kind: oom, tier: cause, if: [x], re: ['('], hint: h, source: s}]",
            "unterminated",
        ),
    ],
)
def test_a_broken_table_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)


def test_tiers_are_ordered() -> None:
    assert Tier.VERDICT < Tier.CAUSE < Tier.SYMPTOM < Tier.WEAK


# --- hostile input ---

_WORDS = st.sampled_from(
    [
        "Traceback (most recent call last):",
        "Scheduler hit an exception:",
        "[2026-11-29 14:00:00 TP1]",
        "\r",
        "\x00",
        "CUDA out of memory",
        '{"log":"x',
        '  File "a.py", line 1',
        "The above exception was the direct cause of",
        "Capture cuda graph begin",
        "Xid (PCI:0): 79",
        "\x1b[31m",
        "server_args=",
        "crashed with exit code -9",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.one_of(_WORDS, st.text(max_size=40)), max_size=5).map(" ".join), max_size=25),
       st.one_of(st.none(), st.integers(-64, 255)))  # fmt: skip
def test_any_text_is_survived(lines: list[str], status: int | None) -> None:
    failure = classify(lines, status)
    assert failure is None or isinstance(failure.axis, Axis)
    for line in lines:
        live_signature(line)


def test_ten_megabytes_in_a_line() -> None:
    start = time.monotonic()
    lines = [
        *TO_DECODE,
        "x" * 10_000_000,
        *died("torch.OutOfMemoryError: CUDA out of memory." + "y" * 10_000_000),
    ]
    assert told(classify(lines, -9)) == ("oom", "capture_decode", "memory")
    assert time.monotonic() - start < 20
