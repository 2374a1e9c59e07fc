"""Stacks of processes: every way in which py-spy can fail leaves a reason, in bounded time."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hearth import stacks
from hearth.stacks import find_tool, stacks_text

GOOD = 'echo "Thread 1 (idle): \\"MainThread\\""; echo "    f (a.py:3)"'


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a py-spy made of the given shell lines beside an interpreter; returns that interpreter."""

    def make(script):
        for name, text in (("py-spy", script), ("python3", "exit 0")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        return str(tmp_path / "python3")

    return make


async def test_each_process_has_a_heading_and_its_stack(tool):
    text = await stacks_text([os.getpid(), os.getppid()], tool(f'echo "$*" >&2; {GOOD}'))
    assert text.count("f (a.py:3)") == 2
    assert text.startswith(f"== process {os.getpid()}: {psutil.Process().name()}, ")
    assert "threads" in text


async def test_where_pausing_fails_it_is_tried_without(tool):
    python = tool(
        f'case "$*" in *nonblocking*) {GOOD};; *) echo "Error: Failed to suspend" >&2; exit 1;; esac'
    )
    assert "f (a.py:3)" in await stacks_text([os.getpid()], python)


async def test_a_stopped_process_is_not_paused(tool):
    python = tool(f'case "$*" in *nonblocking*) {GOOD};; *) sleep 60;; esac')
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        child.send_signal(signal.SIGSTOP)
        while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        text = await stacks_text([child.pid], python)
    finally:
        child.kill()
        child.wait()
    assert "f (a.py:3)" in text
    assert "stopped" in text


async def test_the_reason_stands_where_a_stack_cannot(tool):
    python = tool(
        'printf "Error: Permission denied\\nCaused by:\\n 0: x\\n\\nStack backtrace:\\n 0: y\\n" >&2; exit 1'
    )
    text = await stacks_text([os.getpid()], python)
    assert "no stack: Error: Permission denied Caused by: 0: x (py-spy needs the right to trace" in text
    assert "backtrace" not in text


async def test_a_py_spy_that_hangs_costs_no_more_than_the_limit(tool, monkeypatch):
    monkeypatch.setattr(stacks, "PAUSED_SECONDS", 0.2)
    python = tool("exec sleep 600")
    text = await stacks_text([os.getpid(), os.getppid()], python, seconds=0.5)
    assert text.count("no stack: all of them together took longer than 0.5 s") == 2
    while any(_runs(child, "sleep 600") for child in psutil.Process().children(recursive=True)):
        time.sleep(0.01)


def _runs(process, command):
    try:
        return " ".join(process.cmdline()) == command
    except psutil.Error:
        return False


async def test_no_tool_no_process_and_a_process_that_is_gone(tool, monkeypatch, tmp_path):
    assert await stacks_text([], "python3") == "No process of the engine was left.\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    text = await stacks_text([os.getpid()], "/nonexistent/python3")
    assert "no stack: there is no py-spy" in text
    assert find_tool("/nonexistent/python3") is None
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    text = await stacks_text([gone.pid], tool("echo 'Error: No such process' >&2; exit 1"))
    assert f"== process {gone.pid}: gone\nno stack: Error: No such process\n" in text
