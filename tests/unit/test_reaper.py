"""The reaper alone, with real processes: nothing that the engine starts outlives it or its supervisor."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import alive

from hearth.engine import reaper

# What an engine may start to get away: each process writes its pid into the directory given.
TREE = """
import os, signal, subprocess, sys, time
def note(): open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
def wait():
    note()
    time.sleep(600)
def child(body):
    if os.fork() == 0:
        body()
        os._exit(0)
def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait()
def own_session():
    os.setsid()
    child(wait)
    wait()
def double_fork():
    os.setsid()
    child(wait)
def stopped():
    note()
    os.kill(os.getpid(), signal.SIGSTOP)
def late(*_):
    child(own_session)
signal.signal(signal.SIGTERM, late)
for body in (wait, stubborn, own_session, double_fork, stopped):
    child(body)
note()
while True:
    time.sleep(600)
"""
COUNT = 7


class Run:
    """A reaper under test, with its pipes."""

    def __init__(self, *argv: str, cwd: str = "") -> None:
        control, self.control = os.pipe()
        self.status, status = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(control), str(status), cwd, *argv],
            pass_fds=(control, status),
            start_new_session=True,
        )
        os.close(control)
        os.close(status)
        self.lines = os.fdopen(self.status)

    def say(self, word: str) -> None:
        os.write(self.control, word.encode())

    def close(self) -> None:
        os.close(self.control)
        self.lines.close()
        self.process.wait(30)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Run]:
    run = Run(sys.executable, "-c", TREE, str(tmp_path))
    pids_when(tmp_path, COUNT)
    yield run
    run.close()


def pids_when(notes: Path, count: int) -> list[int]:
    """The pids noted, once there are `count` of them."""
    end = time.monotonic() + 60
    while len(found := [int(p.name) for p in notes.iterdir()]) < count:
        assert time.monotonic() < end, f"only {len(found)} of {count} processes came up"
        time.sleep(0.01)
    return found


def wait_until_gone(pids: list[int], limit: float = 30) -> None:
    begin = time.monotonic()
    while left := [p for p in pids if alive(p)]:
        assert time.monotonic() - begin < limit, f"still there: {left}"
        time.sleep(0.005)


def test_kill_ends_every_descendant(tree: Run, tmp_path: Path) -> None:
    pids = pids_when(tmp_path, COUNT)
    assert tree.lines.readline().startswith("pid ")
    tree.say("kill\n")
    assert tree.lines.readline() == "exit -9\n"
    assert tree.lines.readline() == "gone\n"
    assert not [p for p in pids if alive(p)]
    assert tree.process.wait(30) == 0


def test_processes_started_after_term_die_too(tree: Run, tmp_path: Path) -> None:
    tree.say("term\n")
    pids = pids_when(tmp_path, COUNT + 2)
    tree.say("kill\n")
    assert tree.lines.read().endswith("exit -9\ngone\n")
    assert not [p for p in pids if alive(p)]


def test_term_reaches_main_alone(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nif os.fork(): time.sleep(600)\nopen(sys.argv[1], 'w').close(); time.sleep(600)"
    )
    run = Run(sys.executable, "-c", script, str(tmp_path / "1"))
    while not (tmp_path / "1").exists():
        time.sleep(0.01)
    child = [p.pid for p in psutil.Process(run.process.pid).children(recursive=True)][1]
    run.process.send_signal(signal.SIGSTOP)  # so that it can't kill the leftover before we look
    pid = int(run.lines.readline().split()[1])
    run.say("term\n")
    run.process.send_signal(signal.SIGCONT)
    assert run.lines.readline() == "exit -15\n"
    assert run.lines.readline() == "gone\n"
    assert not alive(pid)
    assert not alive(child)
    run.close()


def test_death_of_main_kills_the_leftovers(tree: Run, tmp_path: Path) -> None:
    pids = pids_when(tmp_path, COUNT)
    os.kill(int(tree.lines.readline().split()[1]), signal.SIGKILL)
    assert tree.lines.read() == "exit -9\ngone\n"
    assert not [p for p in pids if alive(p)]


def test_sigkill_of_the_supervisor_leaves_no_orphan_for_a_second(tmp_path: Path) -> None:
    supervisor = f"""
    import asyncio, os, sys
    from pathlib import Path
    from hearth.engine.process import EngineProcess
    async def main():
        sink = os.open(os.devnull, os.O_WRONLY)
        await EngineProcess.spawn([sys.executable, "-c", {TREE!r}, {str(tmp_path)!r}], dict(os.environ), sink)
        await asyncio.sleep(600)
    asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(supervisor)])
    pids = pids_when(tmp_path, COUNT)
    children = [p.pid for p in psutil.Process(process.pid).children()]
    process.kill()
    process.wait()
    wait_until_gone(pids + children)


def test_terminal_signals_and_term_leave_the_reaper_and_the_engine_alone(tree: Run) -> None:
    assert os.getsid(tree.process.pid) == tree.process.pid != os.getsid(0)
    main = int(tree.lines.readline().split()[1])
    assert os.getsid(main) == main
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        tree.process.send_signal(number)
    time.sleep(0.1)
    assert tree.process.poll() is None
    assert alive(main)


def test_signals_are_at_their_defaults_in_the_engine() -> None:
    run = Run("grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status")
    assert run.lines.read().endswith("exit 0\ngone\n")
    run.close()
    out = subprocess.run(
        [sys.executable, "-c", OUTPUT.format(reaper.__file__)], capture_output=True, text=True, check=True
    ).stdout
    # Signals 32 and 33 are glibc's own: no program can set them back, so what is inherited there stays.
    assert {int(mask, 16) & ~(0b11 << 31) for mask in out.split()[1::2]} == {0}


OUTPUT = """
import os, signal, subprocess, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
r, w = os.pipe()
show = ["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]
subprocess.run([sys.executable, "-I", "-S", "{}", str(r), "2", "", *show], pass_fds=(r,))
"""


def test_a_fork_chain_cannot_outrun_it() -> None:
    script = (
        "import os\nos.setsid() if os.fork() == 0 else os._exit(3)\n"
        "while True:\n    if os.fork(): os._exit(0)"
    )
    run = Run(sys.executable, "-I", "-S", "-c", script)
    assert run.lines.readline().startswith("pid ")
    assert run.lines.readline() == "exit 3\n"
    assert run.lines.readline() == "gone\n"
    run.close()


def test_shared_memory_of_a_killed_engine_is_unlinked(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom multiprocessing import shared_memory\n"
        "m = shared_memory.SharedMemory(create=True, size=4096)\n"
        "open(sys.argv[1], 'w').write(m.name + '\\n'); time.sleep(600)"
    )
    run = Run(sys.executable, "-c", script, str(tmp_path / "name"))
    while not (tmp_path / "name").exists() or not (tmp_path / "name").read_text().endswith("\n"):
        time.sleep(0.01)
    block = Path("/dev/shm") / (tmp_path / "name").read_text().strip()
    assert block.exists()
    run.say("kill\n")
    assert run.lines.read().endswith("gone\n")
    run.close()
    assert not block.exists()


def test_it_starts_quickly_and_without_hearth() -> None:
    code = f"import runpy, sys; runpy.run_path({reaper.__file__!r}); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"hearth", "psutil", "asyncio", "subprocess", "pathlib"} & set(out.stdout.split())
