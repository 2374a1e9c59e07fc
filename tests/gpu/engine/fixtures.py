"""Cuts logs of `hearth serve` into the engine's own runs, scrubbed, for tests/fixtures/logs.

    python3 tests/gpu/engine/fixtures.py HEARTH_LOG RUN > NAME.log      RUN counts the starts, from 1

Hearth's own lines and lines of requests go; paths become those of the other fixtures; long lines are cut;
of the engine's arguments those about graphs stay.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OWN = re.compile(r"^\[[\d\- :]+ hearth\] ")
STARTED = re.compile(r"^\[[\d\- :]+ hearth\] Starting the engine ")
NOISE = re.compile(
    r'"GET /metrics HTTP|"POST /(generate|v1/completions) HTTP|^\[[^\]]+\] (Prefill|Decode) batch'
)
PLACES = (
    (re.compile(r"/tmp/hgpu/site"), "/opt/engine/site"),
    (re.compile(r"/tmp/hgpu/work/models"), "/opt/engine/m"),
    (re.compile(r"/tmp/hgpu/work"), "/opt/engine/work"),
    (re.compile(r"/[\w/.]+/lib/python3\.\d+/(?:site|dist)-packages"), "/opt/engine/lib"),
)
LONGEST = 400
KEPT_BATCHES = 3


def runs(text: str) -> list[list[str]]:
    """The engine's lines of each start."""
    found: list[list[str]] = []
    for line in text.split("\n"):
        if STARTED.match(line):
            found.append([])
        elif found and not OWN.match(line):
            found[-1].append(line)
    return found


def scrubbed(lines: list[str]) -> list[str]:
    """Without noise, except the last few batches; without this machine's paths; no line too long."""
    noisy = [index for index, line in enumerate(lines) if NOISE.search(line)]
    batches = [index for index in noisy if " batch, " in lines[index]]
    drop = set(noisy) - set(batches[-KEPT_BATCHES:])
    return [_scrub(line) for index, line in enumerate(lines) if index not in drop]


def _scrub(line: str) -> str:
    for pattern, place in PLACES:
        line = pattern.sub(place, line)
    if "server_args=" in line:
        head, _, dump = line.partition("cuda_graph_config=")
        return head[:200] + " ... cuda_graph_config=" + dump[: dump.rindex("cuda_graph") + 20]
    return line[:LONGEST]


if __name__ == "__main__":
    chosen = runs(Path(sys.argv[1]).read_text(errors="replace"))[int(sys.argv[2]) - 1]
    sys.stdout.write("\n".join(scrubbed(chosen)).rstrip("\n") + "\n")
