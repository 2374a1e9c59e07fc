#!/usr/bin/env python3
"""What being scraped costs: tokens per second of a real engine with and without 100 scrapes a second.

`python tests/bench/scrapes.py [--rounds 8] [--tokens 300]`. A real SGLang server on CPU under `hearth serve`
answers the same four requests again and again; the subjects take turns (A B C, C B A, ...) in one run: nobody
scrapes (twice: the difference is noise), Hearth's page and the engine's own page, each 100 times a second.
Prints tokens/s, the ratio to the unscraped subject of the same round, and the CPU that the supervisor took.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.engine.conftest import Hearth, _tool  # noqa: E402
from tests.monitoring.story import ask  # noqa: E402

RATE = 100.0
CLIENTS = 4
MODEL_TOOL, ENGINE_TOOL = "tools/tiny_model.py", "tools/cpu_engine.py"


@dataclass
class Subject:
    """A page that is scraped (none: nobody scrapes), and what was measured."""

    name: str
    url: str | None
    speeds: list[float] = field(default_factory=list)
    scrapes: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def scrape(url: str) -> None:
    """The scraper's process: RATE times a second over one connection, until it is ended; counts on stdout."""
    asyncio.run(_scrape(url))


async def _scrape(url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=4)) as session:
        due, count = time.monotonic(), 0
        while True:
            async with session.get(url) as answer:
                await answer.read()
            count += 1
            print(count, flush=True)
            due = max(due + 1 / RATE, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))


def work(url: str, tokens: int) -> float:
    """Seconds that CLIENTS requests of so many tokens take, side by side."""
    prompts = [f"Tell me a story about number {number}." for number in range(CLIENTS)]
    threads = [threading.Thread(target=ask, args=(url, prompt, tokens)) for prompt in prompts]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def measure(subject: Subject, hearth: Hearth, tokens: int) -> None:
    """One round of one subject."""
    supervisor = psutil.Process(hearth.process.pid)  # type: ignore[union-attr]
    with tempfile.TemporaryFile("w+") as counted:
        scraper = None
        if subject.url is not None:
            command = [sys.executable, __file__, "--scrape", subject.url]
            scraper = psutil.Popen(command, stdout=counted)
            time.sleep(1.0)
        before, began = sum(supervisor.cpu_times()[:2]), count(counted)
        seconds = work(hearth.engine_url, tokens)
        subject.speeds.append(CLIENTS * tokens / seconds)
        subject.cpu.append((sum(supervisor.cpu_times()[:2]) - before) / seconds)
        subject.scrapes.append((count(counted) - began) / seconds)
        if scraper is not None:
            scraper.terminate()
            scraper.wait()


def count(counted) -> int:  # type: ignore[no-untyped-def]
    """How many scrapes the scraper has written down."""
    counted.seek(0)
    return sum(1 for _ in counted)


def report(subjects: list[Subject]) -> None:
    """The table of docs/benchmarks/scrapes.md."""
    print(
        "| | tokens/s, median (range) | to the first, same round: median (range) | scrapes/s | supervisor |"
    )
    print("|---|---|---|---|---|")
    for subject in subjects:
        ratios = [mine / none - 1 for mine, none in zip(subject.speeds, subjects[0].speeds, strict=True)]
        speeds = subject.speeds
        print(
            f"| {subject.name} | {statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f}) "
            f"| {statistics.median(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%}) "
            f"| {statistics.median(subject.scrapes):.0f} | {statistics.median(subject.cpu):.1%} of a core |"
        )


def main() -> None:
    """Start, warm, measure in turns, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="rounds of all subjects")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each request")
    parser.add_argument("--scrape", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scrape:
        return scrape(options.scrape)
    python = _tool(sys.executable, ENGINE_TOOL, "--version", "0.5.23")
    with tempfile.TemporaryDirectory() as folder:
        hearth = Hearth(Path(folder), python, _tool(python, MODEL_TOOL))
        hearth.config["canary"]["interval"] = 3600
        try:
            hearth.start()
            hearth.wait_ready()
            run(hearth, options.rounds, options.tokens)
        finally:
            hearth.clean_up()


def run(hearth: Hearth, rounds: int, tokens: int) -> None:
    """All rounds, in turns; the first one only warms."""
    subjects = [
        Subject("nobody scrapes", None),
        Subject("nobody scrapes, once more", None),
        Subject("Hearth's page, 100/s", f"{hearth.url}/metrics"),
        Subject("the engine's page, 100/s", f"{hearth.engine_url}/metrics"),
    ]
    work(hearth.engine_url, tokens)
    for number in range(rounds):
        for subject in subjects if number % 2 == 0 else reversed(subjects):
            measure(subject, hearth, tokens)
            print(f"round {number + 1}: {subject.name}: {subject.speeds[-1]:.1f} tokens/s", file=sys.stderr)
    report(subjects)


if __name__ == "__main__":
    main()
