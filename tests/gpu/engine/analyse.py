"""Turns a run's results.json into what is committed, and prints its tables.

    python3 tests/gpu/engine/analyse.py RESULTS.json [OUT.json]

OUT.json is the same without this machine's paths and without a driver's own tracebacks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PATHS = ((re.compile(r"/tmp/hgpu/site"), "SITE"), (re.compile(r"/tmp/hgpu/work"), "WORK"))
PLAN_KEYS = ("ttft_32_ms", "ttft_512_ms", "one_stream", "at_once_32")
PHASES = ("spawn", "init", "load", "memory", "capture_prefill", "capture_decode", "bind", "warmup")
DROPPED = frozenset({"trace", "bundle", "next_plan", "hint"})


def cleaned(value: Any) -> Any:
    """The same without tracebacks, bundle names and paths."""
    if isinstance(value, dict):
        return {key: cleaned(each) for key, each in value.items() if key not in DROPPED}
    if isinstance(value, list):
        return [cleaned(each) for each in value]
    if isinstance(value, str):
        for pattern, place in PATHS:
            value = pattern.sub(place, value)
        return re.sub(r"\x1b\[\d*m", "", value)[:600]
    return value


def detected(result: dict[str, Any]) -> float | None:
    """Seconds from the fault until Hearth had named it: its first state after serving."""
    later = (e["at"] for e in result["since_fault"] if e["state"] != "serving")
    first = next(later, None)
    return None if first is None else round(first - result["fault_at"], 2)


def tables(results: dict[str, Any]) -> list[str]:
    """Lines of Markdown: plans, starts, faults, overhead."""
    steps = {name: entry["result"] for name, entry in results.items() if _done(entry)}
    lines: list[str] = []
    for name, step in steps.items():
        if "summary" in step:
            lines += [f"{name} ({step['rounds']} rounds)", *_plans(step["summary"])]
        elif "since_fault" in step:
            lines.append(_fault(name, step))
        elif name == "overhead":
            lines += [f"overhead: {json.dumps(step['medians'])}", json.dumps(step["tokens_per_second"])]
        elif "phase_seconds" in step:
            lines.append(_start(name, step))
        elif all(isinstance(each, dict) and "phase_seconds" in each for each in step.values()):
            lines += [_start(each, start) for each, start in step.items()]
    return lines


def _done(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("result"), dict)


def _plans(summary: dict[str, dict[str, float]]) -> list[str]:
    base = summary.get("standard")
    lines = []
    for name, row in summary.items():
        cells = [f"{row[key]:,.1f}" + (f" ({row[key] / base[key]:.2f})" if base else "") for key in PLAN_KEYS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _start(name: str, step: dict[str, Any]) -> str:
    phases = step["phase_seconds"] or {}
    cells = [f"{phases[phase]:.1f}" if phase in phases else "-" for phase in PHASES]
    graphs = ", ".join(f"{c['phase']} {c['gb']}" for c in step["captures"])
    return f"| {name} | {step.get('ready_seconds', '-')} | {' | '.join(cells)} | {graphs} |"


def _fault(name: str, step: dict[str, Any]) -> str:
    kinds = ", ".join(failure["kind"] for failure in step["failures"])
    times = (detected(step), step["seconds_to_memory_free"], step["seconds_to_ready"])
    return f"| {name} | {kinds} | {' | '.join(str(each) for each in times)} | {step['sentence']} |"


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())
    for entry in results.values():
        if _done(entry) and "since_fault" in entry["result"]:
            entry["result"]["seconds_to_detected"] = detected(entry["result"])
    print("\n".join(tables(results)))
    if len(sys.argv) > 2:
        text = json.dumps(cleaned(results), separators=(",", ":"))
        Path(sys.argv[2]).write_text(re.sub(r'(,"[a-z_-]+":\{"begun")', r"\n\1", text) + "\n")


if __name__ == "__main__":
    main()
