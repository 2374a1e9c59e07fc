#!/usr/bin/env python3
"""From the death of an engine to the spawn of its successor, and what the supervisor costs while idle.

`make bench-supervisor`. The engine is a stand-in that starts at once (tests/bench/standin), so that only the
supervisor is measured. Side by side, interleaved in one run: Hearth, a loop as `docker --restart=always` has
it (0.1 s, doubling while deaths are less than 10 s apart) and one as systemd's Restart=on-failure (0.1 s).
The delay that each is set to wait is subtracted; what is left is noticing, naming and spawning.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import yaml

HERE = Path(__file__).resolve().parent
HEARTH_BACKOFF = 0.001
LOOP_DELAY = 0.1
ENGINE = [sys.executable, "-m", "sglang.launch_server", "--port"]


class Subject:
    """Something that keeps a stand-in engine alive."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        self.name, self.folder, self.port = name, folder, port
        self.starts = folder / f"{name}.starts"
        self.starts.touch()
        self.env = {**os.environ, "PYTHONPATH": str(HERE / "standin"), "STANDIN_STARTS": str(self.starts)}
        self.process = self.launch()

    def launch(self) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def delay(self, round_number: int) -> float:
        """Seconds that it is set to wait before a restart."""
        raise NotImplementedError

    def seen(self) -> list[tuple[float, int]]:
        lines = [line.split() for line in self.starts.read_text().splitlines()]
        return [(float(at), int(pid)) for at, pid in lines]

    def wait_start(self, count: int) -> tuple[float, int]:
        while len(self.seen()) < count or not answers(self.port):
            time.sleep(0.005)
        return self.seen()[count - 1]

    def kill_once(self, round_number: int) -> float:
        """Seconds from the engine's death to its successor's first line, without the set delay."""
        count = len(self.seen())
        _, pid = self.wait_start(count)
        self.settle()
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        started, _ = self.wait_start(count + 1)
        return started - killed - self.delay(round_number)

    def settle(self) -> None:
        time.sleep(0.3)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class HearthSubject(Subject):
    def launch(self) -> subprocess.Popen[bytes]:
        model = self.folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.status = self.port + 1
        config = {
            "model": {"path": str(model), "served_name": "x"},
            "engine": {
                "version": "0.5.23",
                "python": sys.executable,
                "env": {"PYTHONPATH": str(HERE / "standin"), "STANDIN_STARTS": str(self.starts)},
            },
            "graphs": {"wanted": "standard"},
            "limits": {"backoff": HEARTH_BACKOFF, "backoff_max": HEARTH_BACKOFF, "restart_count": 10_000},
            "ports": {"engine_host": "127.0.0.1", "engine": self.port, "supervisor": self.status},
            "paths": {name: str(self.folder / name) for name in ("state", "runtime", "cache")},
            "profile": "cpu",
        }
        path = self.folder / "hearth.yaml"
        path.write_text(yaml.safe_dump(config))
        return subprocess.Popen(
            [sys.executable, "-m", "hearth", "serve", "-c", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "hearth.log").open("wb"),
            start_new_session=True,
        )

    def delay(self, round_number: int) -> float:
        return HEARTH_BACKOFF

    def settle(self) -> None:
        while not answers(self.status, "/readyz"):
            time.sleep(0.02)
        time.sleep(0.3)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class LoopSubject(Subject):
    doubling = False

    def launch(self) -> subprocess.Popen[bytes]:
        command = " ".join([*ENGINE, str(self.port)])
        grow = 'd=$(awk "BEGIN{print $d*2}")' if self.doubling else ":"
        loop = f"d={LOOP_DELAY}; while :; do {command} >/dev/null 2>&1; sleep $d; {grow}; done"
        return subprocess.Popen(["sh", "-c", loop], env=self.env, start_new_session=True)

    def delay(self, round_number: int) -> float:
        return LOOP_DELAY * 2**round_number if self.doubling else LOOP_DELAY


class DockerLike(LoopSubject):
    doubling = True


def answers(port: int, path: str = "/server_info") -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def idle(subject: HearthSubject, seconds: float) -> None:
    """Memory and CPU of the supervisor and of the reaper below it, while nobody asks the engine anything."""
    subject.settle()
    supervisor = psutil.Process(subject.process.pid)
    reaper = supervisor.children()[0]
    for name, process in (("supervisor", supervisor), ("reaper", reaper)):
        before = sum(process.cpu_times()[:2])
        begun = time.monotonic()
        time.sleep(seconds / 2)
        share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)
        print(
            f"idle {name:10s} {process.memory_info().rss / 1e6:6.1f} MB RSS  {100 * share:5.2f} % of a core"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hearth = HearthSubject("hearth", folder, 30170)
        subjects = [
            hearth,
            DockerLike("docker-like", folder, 30174),
            LoopSubject("systemd-like", folder, 30176),
        ]
        try:
            for subject in subjects:
                subject.wait_start(1)
            taken: dict[str, list[float]] = {subject.name: [] for subject in subjects}
            for number in range(options.rounds):
                for subject in subjects:
                    taken[subject.name].append(subject.kill_once(number))
            report(taken)
            idle(hearth, options.idle_seconds)
        finally:
            for subject in subjects:
                subject.stop()


def report(taken: dict[str, list[float]]) -> None:
    base = statistics.median(taken["systemd-like"])
    print("death of the engine -> spawn of its successor, beyond the set delay")
    for name, values in taken.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"  {name:13s} median {median:.3f} s ({spread}), {median / base:.1f} x the systemd-like loop")


if __name__ == "__main__":
    main()
