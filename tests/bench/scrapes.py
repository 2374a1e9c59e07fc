#!/usr/bin/env python3
"""What being scraped costs a real engine: with and without 100 scrapes a second.

`python tests/bench/scrapes.py [--blocks 20] [--seconds 4] [--apart]`. A real SGLang server on CPU under
`hearth serve` streams answers to four clients all the time. Slices of a few seconds take turns (A B C, C B A,
...): nobody scrapes; Hearth's page, 100 times a second; nobody, once more (the difference is noise). Prints
for each tokens/s, CPU seconds of the engine for 1000 tokens, which depend less on what else the machine does,
and the CPU that the supervisor and the scraper took. With --apart the engine has the first core for itself,
and everybody else shares the others, as on a host that has cores to spare.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.engine.conftest import Hearth, _tool  # noqa: E402

RATE = 100.0
CLIENTS = 4
SETTLE = 0.5
"""Seconds after a change of subject that aren't measured."""


@dataclass
class Subject:
    """Whether the page is scraped, and what was measured in each slice."""

    name: str
    scraped: bool
    speed: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    supervisor: list[float] = field(default_factory=list)
    scraper: list[float] = field(default_factory=list)
    scrapes: list[float] = field(default_factory=list)


class Load:
    """Clients that stream answers without end and count their tokens."""

    def __init__(self, url: str) -> None:
        self.tokens = [0] * CLIENTS
        self._url = url

    def start(self) -> None:
        """In threads that end with the program."""
        for number in range(CLIENTS):
            threading.Thread(target=self._stream, args=(number,), daemon=True).start()

    def _stream(self, number: int) -> None:
        body = {"text": f"Story {number}:", "stream": True}
        body["sampling_params"] = {"max_new_tokens": 100, "ignore_eos": True}
        while True:
            request = urllib.request.Request(
                f"{self._url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                for line in answer:
                    self.tokens[number] += line.startswith(b"data: {")


def scrape(url: str) -> None:
    """The scraper's process: RATE times a second over one kept connection; counts on stdout.

    A bare socket: what it costs is taken from the engine too, and elsewhere it would be another machine.
    """
    place = urllib.parse.urlsplit(url)
    asked = f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode()
    due, count = time.monotonic(), 0
    with (
        socket.create_connection((place.hostname, place.port)) as connection,
        connection.makefile("rb") as answer,
    ):
        while True:
            connection.sendall(asked)
            size = 0
            while (line := answer.readline().lower()) != b"\r\n":
                if line.startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            answer.read(size)
            count += 1
            os.write(1, b"%d\n" % count)
            # What was missed while stopped isn't made up for.
            due = max(due + 1 / RATE, time.monotonic() - 0.1)
            time.sleep(max(0.0, due - time.monotonic()))


class Bench:
    """The processes, and one slice after the other."""

    def __init__(self, hearth: Hearth, load: Load, scraper: psutil.Popen, counted: Path) -> None:
        assert hearth.process is not None
        self._load, self._scraper, self._counted = load, scraper, counted
        self._supervisor = psutil.Process(hearth.process.pid)
        self._engine = hearth.engine_processes()

    def slice(self, subject: Subject, seconds: float) -> None:
        """Measure one subject for so many seconds."""
        (self._scraper.resume if subject.scraped else self._scraper.suspend)()
        time.sleep(SETTLE)
        before = self._look()
        time.sleep(seconds)
        tokens, engine, supervisor, scraper, scrapes, wall = (
            now - then for now, then in zip(self._look(), before, strict=True)
        )
        subject.speed.append(tokens / wall)
        subject.engine.append(1000 * engine / max(tokens, 1))
        subject.supervisor.append(supervisor / wall)
        subject.scraper.append(scraper / wall)
        subject.scrapes.append(scrapes / wall)

    def _look(self) -> tuple[float, ...]:
        engine = sum(cpu(process) for process in self._engine)
        scrapes = len(self._counted.read_bytes().splitlines())
        tokens = sum(self._load.tokens)
        return tokens, engine, cpu(self._supervisor), cpu(self._scraper), scrapes, time.monotonic()


def cpu(process: psutil.Process) -> float:
    """CPU seconds that a process has taken."""
    times = process.cpu_times()
    return float(times.user + times.system)


def report(subjects: list[Subject]) -> None:
    """The table of docs/benchmarks/scrapes.md: medians of the slices, and ranges of the middle half."""
    print("| | tokens/s | engine, CPU s for 1000 tokens | scrapes/s | supervisor | scraper |")
    print("|---|---|---|---|---|---|")
    for each in subjects:
        shares = f"{statistics.median(each.supervisor):.1%} | {statistics.median(each.scraper):.1%}"
        scrapes = f"{statistics.median(each.scrapes):.0f}"
        print(f"| {each.name} | {spread(each.speed, 1)} | {spread(each.engine, 3)} | {scrapes} | {shares} |")
    none = subjects[0]
    for each in subjects[1:]:
        for what, mine, first in (("tokens/s", each.speed, none.speed), ("CPU", each.engine, none.engine)):
            ratios = [a / b - 1 for a, b in zip(mine, first, strict=True)]
            error = statistics.stdev(ratios) / len(ratios) ** 0.5
            print(
                f"{each.name}, {what}, to the first of the same block: {statistics.median(ratios):+.1%}, "
                f"mean {statistics.mean(ratios):+.1%} with a standard error of {error:.1%}"
            )


def spread(values: list[float], digits: int) -> str:
    """Median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def set_apart(hearth: Hearth) -> None:
    """The engine's processes on the first core; the supervisor, this process and what it starts elsewhere."""
    first, *others = os.sched_getaffinity(0)
    for process in hearth.engine_processes():
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {first})
    assert hearth.process is not None
    for process in (psutil.Process(), psutil.Process(hearth.process.pid)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, others)


def run(hearth: Hearth, folder: Path, blocks: int, seconds: float) -> None:
    """All blocks, in turns."""
    load, counted = Load(hearth.engine_url), folder / "scrapes"
    load.start()
    with counted.open("w") as sink:
        command = [sys.executable, __file__, "--scrape", f"{hearth.url}/metrics"]
        scraper = psutil.Popen(command, stdout=sink)
    subjects = [Subject("nobody scrapes", False), Subject("Hearth's page, 100/s", True)]
    subjects.append(Subject("nobody scrapes, once more", False))
    try:
        time.sleep(5)
        bench = Bench(hearth, load, scraper, counted)
        for number in range(blocks):
            for subject in subjects if number % 2 == 0 else reversed(subjects):
                bench.slice(subject, seconds)
            print(f"block {number + 1} of {blocks}", file=sys.stderr)
        report(subjects)
    finally:
        scraper.kill()


def main() -> None:
    """Start, measure in turns, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=20, help="turns of all subjects")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a slice")
    parser.add_argument("--apart", action="store_true", help="the first core for the engine alone")
    parser.add_argument("--scrape", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scrape:
        scrape(options.scrape)
    python = _tool(sys.executable, "tools/cpu_engine.py", "--version", "0.5.23")
    with tempfile.TemporaryDirectory() as folder:
        hearth = Hearth(Path(folder), python, _tool(python, "tools/tiny_model.py"))
        hearth.config["canary"]["interval"] = 3600
        try:
            hearth.start()
            hearth.wait_ready()
            if options.apart:
                set_apart(hearth)
            run(hearth, Path(folder), options.blocks, options.seconds)
        finally:
            hearth.clean_up()


if __name__ == "__main__":
    main()
