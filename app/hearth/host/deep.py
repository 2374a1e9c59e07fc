"""The cards working together: an all-reduce over all of them, by the engine's own interpreter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hearth.host.checks_base import Check, Output, failed, listed, passed, short, skipped, warned
from hearth.host.collect import ask

NAME = "deep.allreduce"
SCRIPT = Path(__file__).with_name("allreduce.py")
LIMIT = 120.0
"""Seconds in all: importing torch on a cold disk takes thirty, a first all-reduce a few."""
FLOOR = 5.0
"""GB/s of bus bandwidth; PCIe generation 3 has about 16 in a direction: less than this is wrong anywhere."""
_HANG_FIX = "see host.iommu and pci.acs; NCCL_P2P_DISABLE=1 is the last resort, and slow"


def check(python: str, limit: float = LIMIT, extra: Sequence[str] = ()) -> Check:
    """Run it and judge; never raises."""
    return judge(ask((python, str(SCRIPT), *extra), limit))


def judge(output: Output) -> Check:
    """The verdict on what the script printed. Pure."""
    stages = _stages(output.text)
    torch = stages.get("torch")
    if torch is None:
        said = output.problem or short(output.text[-300:]) or "it printed nothing"
        return skipped(
            NAME, f"the interpreter can't run the check: {said}", "name the engine's with --python"
        )
    if "missing" in torch:
        why = f"this interpreter has no torch ({short(str(torch['missing']))})"
        return skipped(NAME, why, "run it in the engine's container, or name the engine's with --python")
    if "start" not in stages:
        return skipped(NAME, f"torch sees {torch.get('gpus', 0)} GPUs: nothing to reduce over")
    return _verdict(stages, output)


def _stages(text: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            data = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and isinstance(data.get("stage"), str):
            found[data["stage"]] = data
    return found


def _verdict(stages: dict[str, dict[str, Any]], output: Output) -> Check:
    done, ranks = stages.get("done"), stages["start"].get("ranks")
    if done is None:
        return _unfinished("first" in stages, output, ranks)
    speed = done.get("busbw")
    seen = f"{ranks} GPUs, {speed} GB/s bus bandwidth at {_mib(done.get('bytes'))} MiB"
    if done.get("wrong") != 0:
        return failed(
            NAME,
            f"{seen}, {done.get('wrong')} wrong elements",
            "sums over the cards come out wrong: so would every answer",
            "look for Xid and PCIe errors (AER) in the kernel log; update NCCL and the driver",
        )
    if isinstance(speed, (int, float)) and speed < FLOOR:
        why = f"under {FLOOR:g} GB/s something is in the way between the cards"
        return warned(NAME, seen, why, "see gpu.pcie, pci.link, pci.acs and host.iommu")
    apart = stages["start"].get("unreachable")
    if isinstance(apart, list) and apart:
        why = "these pairs have no peer access: their traffic goes through the host's memory"
        return warned(NAME, f"{seen}; {listed(apart, 6)}", why, "see host.iommu and pci.acs")
    return passed(NAME, f"{seen}, every sum right")


def _unfinished(began: bool, output: Output, ranks: object) -> Check:
    if output.problem:
        where = "the large all-reduce" if began else "the first all-reduce"
        why = "it hangs: at full utilisation and low power that is P2P against a translating IOMMU or ACS"
        return failed(NAME, f"{where} over {ranks} GPUs: {output.problem}", why, _HANG_FIX)
    last = [line for line in output.text.splitlines() if line.strip() and not line.startswith("{")][-1:]
    seen = short(last[0]) if last else f"exit status {output.code}"
    return failed(NAME, seen, "NCCL or torch gave up", "the engine would fail the same way: read its message")


def _mib(size: object) -> str:
    return f"{size / (1 << 20):g}" if isinstance(size, int) else "?"
