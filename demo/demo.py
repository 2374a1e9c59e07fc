#!/usr/bin/env python3
"""The demo: a real engine is started, broken on purpose, brought back by Hearth, and answers.

Run it with `make demo`. With a terminal it goes on serving until Ctrl-C; without one it stops by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / ".run" / "demo"
CONFIG = Path("demo/hearth.demo.yaml")
ENGINE, SUPERVISOR = "http://127.0.0.1:30080", "http://127.0.0.1:9480"
START_LIMIT = 1200.0
"""Seconds for two engine starts on a slow machine."""

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    os.chdir(ROOT)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal ends it like Ctrl-C
        signal.signal(number, signal.default_int_handler)
    try:
        prepare()
        return serve()
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130


def serve() -> int:
    """Start Hearth, show what it does, and stop it, whatever happens."""
    console.rule("Starting hearth serve: wanted plan piecewise, and a fault planted in its capture")
    log = RUN / "hearth.log"
    with log.open("wb") as sink:
        hearth = subprocess.Popen(
            [sys.executable, "-m", "hearth", "serve", "-c", str(CONFIG)],
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return show(hearth, log)
    finally:
        stop(hearth)


def prepare() -> None:
    """The engine's environment, the tiny model, and an empty state: each demo starts from nothing known."""
    console.rule("Preparing a real SGLang for CPU (once: 3 to 6 GB, minutes)")
    python = Path(last_line([sys.executable, "tools/cpu_engine.py"]))
    console.print("Making a tiny model with random weights, unless it is there.")
    model = Path(last_line([str(python), "tools/tiny_model.py"]))
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    (RUN / "engine").symlink_to(python.parent.parent)
    (RUN / "model").symlink_to(model)


def last_line(command: list[str]) -> str:
    """Run a tool that shows its progress on stderr and prints its result as the last line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tool:
        try:
            output = tool.communicate()[0]
        except KeyboardInterrupt:
            end(tool)
            raise
    if tool.returncode != 0:
        sys.exit(tool.returncode)
    return output.strip().splitlines()[-1]


def end(tool: subprocess.Popen[str]) -> None:
    """Let an interrupted tool clean up. Ctrl-C has reached it too; a signal to this process alone hasn't."""
    try:
        tool.wait(3)
    except subprocess.TimeoutExpired:
        tool.terminate()
        tool.wait()


def show(hearth: subprocess.Popen[bytes], log: Path) -> int:
    if not follow(hearth):
        console.print(f"[red]Hearth ended with exit code {hearth.poll()}.[/red] Its log: {log}")
        console.print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), markup=False)
        return 1
    console.rule("One chat request, streamed")
    answered = chat()
    console.rule("hearth status")
    subprocess.run([sys.executable, "-m", "hearth", "status", "--url", SUPERVISOR], check=False)
    status = read_status() or {}
    fell_back = bool(status.get("ladder_steps"))
    console.rule()
    console.print(f"Page: {SUPERVISOR}/   metrics: {SUPERVISOR}/metrics   engine: {ENGINE}/v1   log: {log}")
    if not (answered and fell_back):
        console.print("[red]The demo did not go as it must: no fallback, or no answer.[/red]")
        return 1
    console.print("[green]Broken on purpose, named, stepped down, answering.[/green]")
    if sys.stdin.isatty():
        console.print("Serving until Ctrl-C.")
        return serve_on(hearth)
    return 0


def serve_on(hearth: subprocess.Popen[bytes]) -> int:
    """Wait for Ctrl-C, which is a good end here, or for Hearth to end by itself."""
    try:
        return int(hearth.wait() != 0)
    except KeyboardInterrupt:
        return 0


def follow(hearth: subprocess.Popen[bytes]) -> bool:
    """Print every sentence and failure until the engine serves; False when it doesn't come to that."""
    said, seen, begun = "", 0, time.monotonic()
    with console.status("starting") as spinner:
        while hearth.poll() is None and time.monotonic() - begun < START_LIMIT:
            status = read_status()
            if status is not None:
                for failure in status["failures"][seen:]:
                    print_failure(failure)
                seen = len(status["failures"])
                if status["sentence"] != said:
                    said = status["sentence"]
                    console.print(f"[{time.monotonic() - begun:5.0f} s] {said}", markup=False)
                spinner.update(f"{status['state']}, phase {status['phase']}")
                if status["ready"]:
                    return True
            time.sleep(0.3)
    return False


def print_failure(failure: dict[str, Any]) -> None:
    console.print(f"[bold red]Failure:[/bold red] {failure['kind']} in {failure['phase']}", end=" ")
    console.print(f"(axis {failure['axis']}, rule {failure['source']})", markup=False)
    for line in failure["evidence"][:3]:
        console.print(f"    {line[:200]}", markup=False)
    console.print(f"    hint: {failure['hint']}", markup=False)
    console.print(f"    done: {failure['done']}", markup=False)


def chat() -> bool:
    """Stream one answer to the screen (a random model talks nonsense); whether any text came."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello, are you there?"}],
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{ENGINE}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    count = 0
    with urllib.request.urlopen(request, timeout=120) as answer:
        for raw in answer:
            line = raw.decode().strip()
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            choices = json.loads(line[5:])["choices"]
            text = (choices[0]["delta"].get("content") or "") if choices else ""
            count += bool(text)
            console.print(text, end="", markup=False)
    console.print()
    return count > 0


def read_status() -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{SUPERVISOR}/status", timeout=2) as answer:
            document: dict[str, Any] = json.load(answer)
            return document
    except (OSError, ValueError, urllib.error.URLError):
        return None


def stop(hearth: subprocess.Popen[bytes]) -> None:
    """End Hearth and its engine; a second Ctrl-C doesn't cut it short and leave them behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if hearth.poll() is None:
        console.print("Stopping: the engine drains, then every process ends.")
        hearth.send_signal(signal.SIGTERM)
        try:
            hearth.wait(90)
        except subprocess.TimeoutExpired:
            hearth.kill()
    console.print(f"Stopped with exit code {hearth.wait()}.")


if __name__ == "__main__":
    sys.exit(main())
