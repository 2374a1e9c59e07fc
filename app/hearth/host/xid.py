"""Xid errors: what NVIDIA's driver says in the kernel log, and whether a restart can still help. Pure.

Forms seen: `NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.`,
`NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, ...` and, from old drivers,
`NVRM: Xid (0000:03:00): 14, Channel 00000001`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hearth.errors import ConfigError
from hearth.failure import Failure, FailureKind, Phase

_DATA = Path(__file__).with_name("xid.yaml")
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,16})\): (\d{1,4})\b(.{0,400})")
_RECOVERY = re.compile(r"\bto 0x[0-9a-fA-F]{1,8} \(([^)]{1,60})\)|^, ([A-Z][A-Za-z ]{3,60})$")
_HARMLESS = ("none", "drain p2p")
_BY_TEXT = "by_text"


@dataclass(frozen=True)
class Known:
    """One row of xid.yaml. `fatal` None: the line itself says whether (154)."""

    xid: int
    meaning: str
    fatal: bool | None
    do: str
    source: str


@dataclass(frozen=True)
class Xid:
    """One error that the driver reported."""

    bus: str
    """Address as the driver writes it, without function: `0000:c1:00`."""
    number: int
    fatal: bool
    meaning: str
    do: str
    line: str

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Xid {self.number} on {self.bus}: {self.meaning}"


@cache
def table() -> dict[int, Known]:
    """The rows of xid.yaml by number. Raises ConfigError for a file that can't be used."""
    try:
        rows = [_row(row) for row in yaml.safe_load(_DATA.read_text(encoding="utf-8"))]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{_DATA.name}: can't be used: {error}", "reinstall Hearth") from error
    return {row.xid: row for row in rows}


def _row(row: dict[str, Any]) -> Known:
    fatal = row["fatal"]
    if fatal not in (True, False, _BY_TEXT):
        raise ValueError(f"xid {row['xid']}: fatal is neither true, false nor {_BY_TEXT}")
    known = None if fatal == _BY_TEXT else bool(fatal)
    return Known(int(row["xid"]), str(row["meaning"]), known, str(row["do"]), str(row["source"]))


def parse(line: str) -> Xid | None:
    """The Xid in a line of the kernel log, however the line begins; None if it has none. Never raises."""
    match = _LINE.search(line)
    if match is None:
        return None
    shown = " ".join(line[match.start() :].split())[:400]
    return _built(match[1].lower(), int(match[2]), _asks_for_recovery(match[3]), shown)


def from_number(bus: str, number: int, recovery: bool) -> Xid:
    """An Xid of which only number and card are known; `recovery`: the driver asks for a reset or a reboot."""
    found = _built(bus.lower(), number, recovery, f"NVML: Xid {number} on {bus}")
    return replace(found, fatal=found.fatal or recovery)


def _built(bus: str, number: int, by_text: bool, shown: str) -> Xid:
    known = table().get(number)
    if known is None:
        return Xid(bus, number, False, "not in Hearth's table", "look it up in NVIDIA's Xid catalog", shown)
    fatal = by_text if known.fatal is None else known.fatal
    return Xid(bus, number, fatal, known.meaning, known.do, shown)


def _asks_for_recovery(rest: str) -> bool:
    """Whether a 154 asks for a reset or reboot: `..., GPU recovery action changed from 0x0 (None) to
    0x2 (Node Reboot Required)`. A wording that nobody knows counts as yes."""
    match = _RECOVERY.search(rest)
    action = ((match[1] or match[2]) if match else "unknown").strip().lower()
    return action not in _HARMLESS


def parse_all(lines: Iterable[str]) -> Iterator[Xid]:
    """The Xids in lines of a kernel log, in their order."""
    for line in lines:
        found = parse(line)
        if found is not None:
            yield found


def gpu_index(bus: str, addresses: Iterable[str]) -> int | None:
    """Which of the GPUs' PCI addresses (`00000000:C1:00.0`, in NVML's order) the driver's address means."""
    wanted = _numbers(bus)
    for index, address in enumerate(addresses):
        if wanted is not None and _numbers(address) == wanted:
            return index
    return None


def _numbers(address: str) -> tuple[int, int, int] | None:
    """Domain, bus and device as numbers; the function doesn't matter."""
    match = re.fullmatch(
        r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.[0-7])?", address
    )
    return (int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16)) if match else None


def failure(xid: Xid, phase: Phase) -> Failure:
    """The Failure that a fatal Xid is: no graph plan and no restart can fix it."""
    return Failure(
        FailureKind.GPU_FAULT,
        phase,
        evidence=(xid.line,),
        hint=f"{xid.meaning}: {xid.do}",
        source="hearth: kernel log",
    )
