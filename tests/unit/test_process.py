"""Spawning, watching and stopping real process trees."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from processes import alive

from hearth.engine.logstream import LogStream, log_pipe
from hearth.engine.process import EngineProcess, fresh_metrics_dir
from hearth.engine.redact import Redactor
from hearth.errors import ConfigError, HearthError, MissingError, StateError

OTHERS: set[psutil.Process] = set()
SLEEP = "import time; time.sleep(600)"
DRAINS = """
import signal, sys, time
def stop(*_):
    time.sleep(0.2)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True: time.sleep(1)
"""
IGNORES = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0: os.setsid()
print("up", flush=True)
while True: time.sleep(600)
"""


@pytest.fixture(autouse=True)
def others() -> None:
    """Remembers the children this process has anyway (the dockerds of other tests)."""
    OTHERS.clear()
    OTHERS.update(psutil.Process().children())


def children() -> list[psutil.Process]:
    """The children of this process since the test began."""
    return [child for child in psutil.Process().children() if child not in OTHERS]


def sink() -> int:
    return os.open(os.devnull, os.O_WRONLY)


async def python(code: str, log_sink: int | None = None, **more: object) -> EngineProcess:
    target = sink() if log_sink is None else log_sink
    return await EngineProcess.spawn([sys.executable, "-c", code], dict(os.environ), target, **more)  # type: ignore[arg-type]


async def started(code: str, lines: int = 1) -> EngineProcess:
    """Spawn `code` and wait until it printed `lines` lines."""
    read, write = os.pipe()
    process = await python(code, write)
    seen = b""
    while seen.count(b"\n") < lines:
        seen += await asyncio.to_thread(os.read, read, 100)
    os.close(read)
    return process


async def test_exit_status_and_output() -> None:
    read, write = os.pipe()
    process = await python(
        "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(7)", write
    )
    assert await process.wait_exit() == 7
    assert await process.wait_gone(30)
    with os.fdopen(read, "rb") as file:
        assert file.read() == b"out\nerr\n"
    assert process.descendants() == []


async def test_death_by_signal_is_seen() -> None:
    process = await python(SLEEP)
    assert process.descendants() == [process.pid]
    os.kill(process.pid, signal.SIGSEGV)
    assert await process.wait_exit() == -signal.SIGSEGV
    assert await process.wait_gone(30)


async def test_a_clean_drain() -> None:
    process = await started(DRAINS)
    report = await process.stop(drain_seconds=30, kill_seconds=30)
    assert (report.exit_status, report.drained, report.killed, report.left) == (0, True, False, ())
    assert 0.2 <= report.seconds < 30


async def test_what_ignores_sigterm_is_killed_after_the_drain_limit() -> None:
    process = await started(IGNORES, 2)
    pids = process.descendants()
    assert len(pids) == 2
    report = await process.stop(drain_seconds=0.3, kill_seconds=5)
    assert (report.exit_status, report.drained, report.killed, report.left) == (-9, False, True, ())
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_stopping_twice_and_a_dead_one() -> None:
    process = await python("raise SystemExit(3)")
    await process.wait_exit()
    for _ in range(2):
        report = await process.stop(1, 5)
        assert (report.exit_status, report.drained, report.killed) == (3, False, False)


async def test_kill_cuts_a_drain_short() -> None:
    process = await started(IGNORES, 2)
    stop = asyncio.create_task(process.stop(60, 5))
    await asyncio.sleep(0.05)
    process.kill()
    report = await asyncio.wait_for(stop, 30)
    assert report.exit_status == -9
    assert children() == []


async def test_a_killed_reaper_takes_the_engine_with_it() -> None:
    process = await started("import os\nos.fork()\nprint('up', flush=True)\n" + SLEEP, 2)
    pids = process.descendants()
    (reaper,) = children()
    reaper.kill()
    assert await asyncio.wait_for(process.wait_exit(), 30) == -9
    assert await process.wait_gone(30)
    assert not [p for p in pids if alive(p)]
    assert process.descendants() == []
    assert (await process.stop(1, 1)).left == ()


async def test_environment_and_directory_are_exactly_what_was_given(tmp_path: Path) -> None:
    read, write = os.pipe()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics-old").mkdir()
    (tmp_path / "run" / "metrics-old" / "counter_7.db").write_bytes(b"stale")
    code = "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))"
    process = await EngineProcess.spawn(
        [sys.executable, "-I", "-c", code], {"A": "ü"}, write, cwd=tmp_path, runtime_dir=tmp_path / "run"
    )
    assert await process.wait_exit() == 0
    with os.fdopen(read) as file:
        env, cwd = json.load(file)
    metrics = Path(env.pop("PROMETHEUS_MULTIPROC_DIR"))
    env.pop("LC_CTYPE", None)  # set by Python itself where no locale is (PEP 538)
    assert env == {"A": "ü"}
    assert cwd == str(tmp_path)
    assert list((tmp_path / "run").iterdir()) == [metrics]
    assert list(metrics.iterdir()) == []


def test_a_metrics_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file"):
        fresh_metrics_dir(tmp_path / "file" / "run")


async def test_spawn_errors_name_the_thing(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/no/such/interpreter\n")
    directory = tmp_path / "dir"
    cases: list[tuple[list[str], Path | None, type[HearthError], str]] = [
        (["no-such-program-x"], None, MissingError, "no-such-program-x: no such program"),
        ([str(plain)], None, ConfigError, "plain can't be run: Permission denied"),
        ([str(plain), "exec"], None, MissingError, "interpreter"),
        (["true"], directory, ConfigError, f"working directory {directory}: No such file"),
        (["true", "x" * 3_000_000], None, ConfigError, "Argument list too long"),
        (["true", "a\0b"], None, ConfigError, "null byte"),
    ]
    before = open_fds()
    for argv, cwd, error, text in cases:
        plain.chmod(0o755 if "exec" in argv else 0o644)
        with pytest.raises(error, match=text):
            await EngineProcess.spawn(argv, {"PATH": os.defpath}, sink(), cwd)
    await settled()
    assert open_fds() == before


async def test_a_cancelled_spawn_leaves_nothing(tmp_path: Path) -> None:
    task = asyncio.create_task(python(f"open({str(tmp_path / 'x')!r}, 'w'); {SLEEP}"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settled()


async def test_the_log_ends_when_the_last_process_is_gone() -> None:
    read, write = log_pipe()
    lines: list[str] = []
    stream = LogStream(read, None, Redactor(()), lines.extend, asyncio.get_running_loop())
    stream.start()
    code = "import os, time\nif os.fork() == 0: os.setsid()\nprint('up', flush=True); time.sleep(600)"
    process = await python(code, write)
    while len(lines) < 2:
        await asyncio.sleep(0.01)
    assert not await stream.drained(0.1)
    report = await process.stop(drain_seconds=30, kill_seconds=30)
    assert (report.exit_status, report.left) == (-15, ())
    assert await stream.drained(30)


async def test_many_runs_leave_no_zombie_and_no_descriptor() -> None:
    before = open_fds()
    for _ in range(25):
        runs = [EngineProcess.spawn(["sleep", "600"], dict(os.environ), sink()) for _ in range(8)]
        batch = await asyncio.gather(*runs)
        for process in batch:
            process.kill()
        for process in batch:
            assert await process.wait_exit() == -9
            assert await process.wait_gone(10)
    await settled()
    assert open_fds() == before


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def settled() -> None:
    """Wait until the reapers are collected: no child of this process is left, living or zombie."""
    for _ in range(200):
        if not children():
            return
        await asyncio.sleep(0.02)
    raise AssertionError([(p.status(), p.cmdline()) for p in children()])
