"""Xid lines as drivers of several ages wrote them, and the table of what they mean."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.engine.classify import classify
from hearth.failure import FailureKind, Phase
from hearth.host import xid
from hearth.host.checks_xid import standing

# line, bus, number, fatal. Wordings from NVIDIA's documentation and public reports; the 0000:00:07 one was
# provoked on an H200 (driver 580.159.04).
LINES = [
    ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", "0000:01:00", 79, True),
    (
        "Oct 06 17:59:27 gpu1 kernel: NVRM: Xid (PCI:0000:C1:00): 79, pid=1122, GPU has fallen off the bus.",
        "0000:c1:00",
        79,
        True,
    ),
    (
        "[   54.513745] NVRM: Xid (PCI:0000:00:07): 31, pid=794, name=python3, channel 0x0000000a",
        "0000:00:07",
        31,
        False,
    ),
    ("[ 966.503025] NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120", "0000:01:00", 31, False),
    ("NVRM: Xid (PCI:0000:01:00): 8, pid=48694, name=python3, channel 0x00000008", "0000:01:00", 8, True),
    (
        "NVRM: Xid (PCI:0000:01:00): 119, pid=6211, name=nvidia-smi, Timeout after 45s",
        "0000:01:00",
        119,
        True,
    ),
    ("NVRM: Xid (PCI:0000:01:00): 45, pid=15041, name=python3, Ch 00000006", "0000:01:00", 45, False),
    ("NVRM: Xid (PCI:0000:01:00): 154, Node Reboot Required", "0000:01:00", 154, True),
    ("NVRM: Xid (PCI:0000:01:00): 999, something new", "0000:01:00", 999, False),
]
CHANGED = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x%x (%s)"


@pytest.mark.parametrize(("line", "bus", "number", "fatal"), LINES)
def test_lines(line: str, bus: str, number: int, fatal: bool) -> None:
    found = xid.parse(line)
    assert found is not None
    assert (found.bus, found.number, found.fatal) == (bus, number, fatal)
    assert found.line.startswith("NVRM: Xid")
    assert found.do


@pytest.mark.parametrize(
    ("code", "action", "fatal"),
    [
        (0, "None", False),
        (1, "GPU Reset Required", True),
        (2, "Node Reboot Required", True),
        (2, "OS Reboot", True),
        (3, "Drain P2P", False),
        (4, "Drain and Reset", True),
    ],
)
def test_a_changed_recovery_action_says_itself_whether_it_is_fatal(
    code: int, action: str, fatal: bool
) -> None:
    found = xid.parse(CHANGED % (code, action))
    assert found is not None
    assert found.fatal is fatal


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04",
        "r8169 0000:05:00.0 eth0: RTL8168h/8111h, XID 541, IRQ 158",
        "somebody wrote: Xid (PCI:0000:01:00): 79",
    ],
)
def test_other_lines(line: str) -> None:
    assert xid.parse(line) is None


@settings(deadline=None)
@given(st.text())
def test_no_text_raises(text: str) -> None:
    xid.parse(text)
    xid.parse(f"NVRM: Xid (PCI:0000:01:00): 154{text}")
    xid.gpu_index(text, [text])


def test_which_gpu() -> None:
    addresses = ["00000000:01:00.0", "00000000:C1:00.0", "00010000:C1:00.0"]
    assert xid.gpu_index("0000:c1:00", addresses) == 1
    assert xid.gpu_index("10000:c1:00", addresses) == 2
    assert xid.gpu_index("c1:00", addresses) == 1
    assert xid.gpu_index("0000:e1:00", addresses) is None
    assert xid.gpu_index("0000:01:00", ["", "rubbish"]) is None


def test_the_table_says_everything() -> None:
    for row in xid.table().values():
        assert row.meaning
        assert row.do
        assert row.source


@pytest.mark.parametrize("number", xid.table())
def test_hearth_explain_and_the_watch_agree(number: int) -> None:
    """154 says itself whether it is fatal; the bare line says nothing more than that something changed."""
    fatal = xid.table()[number].fatal is not False
    found = classify([f"NVRM: Xid (PCI:0000:01:00): {number}, pid=1"], None)
    assert (found is not None and found.kind is FailureKind.GPU_FAULT) is fatal


def test_the_failure() -> None:
    found = xid.parse(LINES[0][0])
    assert found is not None
    failure = xid.failure(found, Phase.SERVING)
    assert (failure.kind, failure.phase) == (FailureKind.GPU_FAULT, Phase.SERVING)
    assert failure.evidence == (LINES[0][0],)
    assert "power the host off" in failure.hint


def test_what_stands() -> None:
    lost, recovered = LINES[0][0], CHANGED.replace("0x%x", "0x0") % "None"
    harmless = next(line for line, _, number, _ in LINES if number == 45)
    assert [x.number for x in standing(xid.parse_all([harmless, lost, CHANGED % (2, "OS Reboot")]))] == [79]
    assert standing(xid.parse_all([lost, recovered])) == []
    assert [x.number for x in standing(xid.parse_all([recovered, lost]))] == [79]
