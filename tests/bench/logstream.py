"""How fast a real writer gets rid of its log lines: through Hearth, and straight into `cat >/dev/null`.

    python tests/bench/logstream.py [--lines 300000]

A child process writes lines of 120 bytes, one write(2) each, as an engine does: once at 100,000 lines a
second, once as fast as it can. Hearth reads, masks secrets, splits, hands the lines to an event loop and
forwards them to `cat >/dev/null`. Printed: lines a second as the writer saw them, the ratio to the plain
pipe, the longest time that one write took, and the CPU that Hearth used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time

from hearth.engine.logstream import LogStream, log_pipe
from hearth.engine.redact import Redactor

LINE = (
    b"[2026-11-29 10:00:00 TP0] Decode batch, #running-req: 16, #token: 12345, token usage: 0.05, "
    b"cuda graph: True, gen: 1\n"
)
assert 110 <= len(LINE) <= 125
BURST = 100


def write(lines: int, rate: float) -> None:
    """The writer: reports seconds and the longest write, in microseconds, on stderr."""
    longest = 0.0
    begin = now = time.perf_counter()
    for number in range(lines):
        if rate and number % BURST == 0 and (ahead := begin + number / rate - time.perf_counter()) > 0:
            time.sleep(ahead)
        before = time.perf_counter()
        os.write(1, LINE)
        now = time.perf_counter()
        longest = max(longest, now - before)
    print(now - begin, longest, file=sys.stderr)


def start_writer(lines: int, rate: float, sink: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--write", str(lines), str(rate)]
    return subprocess.Popen(command, stdout=sink, stderr=subprocess.PIPE, text=True)


def result(writer: subprocess.Popen[str]) -> tuple[float, float]:
    seconds, longest = writer.communicate()[1].split()
    return float(seconds), float(longest)


def plain(lines: int, rate: float) -> tuple[float, float]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as cat:
        assert cat.stdin is not None
        return result(start_writer(lines, rate, cat.stdin.fileno()))


async def hearth(lines: int, rate: float) -> tuple[float, float, float]:
    cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert cat.stdin is not None
    read, sink = log_pipe()
    seen = 0

    def count(new: list[str]) -> None:
        nonlocal seen
        seen += len(new)

    secrets = Redactor(["a-configured-secret", "another-one-of-them"])
    stream = LogStream(read, cat.stdin.fileno(), secrets, count, asyncio.get_running_loop())
    stream.start()
    cpu = time.process_time()
    writer = start_writer(lines, rate, sink)
    os.close(sink)
    assert await stream.drained()
    cpu = time.process_time() - cpu
    assert seen == lines, f"{lines - seen} lines lost"
    cat.stdin.close()
    cat.wait()
    return *result(writer), cpu


def row(name: str, lines: int, rate: float) -> None:
    base, base_longest = plain(lines, rate)
    seconds, longest, cpu = asyncio.run(hearth(lines, rate))
    print(
        f"{name:14} cat: {lines / base:9,.0f} lines/s (longest write {base_longest * 1e3:6.2f} ms)   "
        f"hearth: {lines / seconds:9,.0f} lines/s ({longest * 1e3:6.2f} ms)   "
        f"ratio {base / seconds:4.2f}   CPU {cpu / lines * 1e5:4.2f} s per 100,000 lines",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=300_000)
    parser.add_argument("--write", nargs=2, metavar=("LINES", "RATE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(int(options.write[0]), float(options.write[1]))
        return
    row("100,000/s", options.lines, 100_000.0)
    row("unlimited", options.lines, 0.0)


if __name__ == "__main__":
    main()
