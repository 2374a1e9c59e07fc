"""The checks of a host: outputs of real tools in, verdicts out. Nothing here touches a host.

`hearth doctor` and the Ansible roles run the commands and read the files of hearth.host.probes, and hand
what they got to `judge`. No text may raise: a tool that prints nonsense is itself a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hearth.host import checks_driver, checks_gpu, checks_pci, checks_runtime, checks_system, checks_xid
from hearth.host.checks_base import Check, Facts, Output, Room, Status, Wanted

__all__ = ["Check", "Facts", "Output", "Room", "Status", "Wanted", "facts_from_json", "judge", "report"]


def judge(facts: Facts, wanted: Wanted) -> list[Check]:
    """Every verdict that the facts allow, in the order in which a person reads them."""
    areas = (checks_system, checks_driver, checks_gpu, checks_xid, checks_pci, checks_runtime)
    return [check for area in areas for check in area.judge(facts, wanted)]


def report(checks: Iterable[Check]) -> dict[str, Any]:
    """The document of `hearth doctor --json`: `ok` unless a check failed."""
    found = list(checks)
    return {
        "ok": all(check.status is not Status.FAIL for check in found),
        "checks": [check.to_json() for check in found],
    }


def facts_from_json(data: Mapping[str, Any]) -> dict[str, Output]:
    """Facts that another tool collected: by name a text, or an object with text, code and problem."""
    return {str(name): _output(value) for name, value in data.items()}


def _output(value: Any) -> Output:
    if isinstance(value, Mapping):
        code = value.get("code")
        return Output(
            text=str(value.get("text") or ""),
            code=code if isinstance(code, int) else 0,
            problem=str(value.get("problem") or ""),
        )
    return Output(text=str(value))
