"""Verdict on what the driver has reported since the machine started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hearth.host.checks_base import (
    GPU_NONE,
    NOTHING,
    Check,
    Facts,
    Wanted,
    failed,
    listed,
    passed,
    skipped,
)
from hearth.host.xid import Xid, parse_all

_NAME = "kernel.xid"
_RECOVERY = 154


def judge(facts: Facts, wanted: Wanted) -> list[Check]:
    """One verdict: errors (Xid) in the kernel log that a reset or reboot has not yet cleared."""
    if wanted.gpus == 0:
        return [skipped(_NAME, GPU_NONE)]
    output = facts.get("kernel_log", NOTHING)
    if not output.there or (output.code != 0 and "not permitted" in output.text):
        return [skipped(_NAME, f"kernel log: {output.problem or 'not allowed'}", "run as root")]
    found = list(parse_all(output.text.splitlines()))
    fatal = standing(found)
    if fatal:
        return [
            failed(
                _NAME,
                listed((xid.sentence for xid in fatal), 4),
                "the driver has reported an error that no restart of the engine can fix",
                fatal[0].do,
            )
        ]
    counts = Counter((xid.number, xid.meaning) for xid in found)
    told = listed(f"{count}x Xid {number} ({meaning})" for (number, meaning), count in counts.items())
    return [passed(_NAME, f"none that needs a reset; {told}" if told else "none since the machine started")]


def standing(found: Iterable[Xid]) -> list[Xid]:
    """The first fatal Xid of each card, unless a later 154 says that the card needs nothing any more."""
    first: dict[str, Xid] = {}
    for xid in found:
        if xid.fatal:
            first.setdefault(xid.bus, xid)
        elif xid.number == _RECOVERY:
            first.pop(xid.bus, None)
    return list(first.values())
