"""Warmed caches: whole or absent, keyed, sealed, pruned; and the command with a stand-in engine."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.cli.warm import Engine, starter
from hearth.errors import CheckFailed, ConfigError, StateError
from hearth.kernels.warm import MARKER, WarmBusy, cache_key, find, unlike, warm

KEY = "k-1"


async def fill(folder: Path) -> None:
    (folder / "triton").mkdir()
    (folder / "triton" / "a.cubin").write_text("code")


def test_a_filled_cache_is_whole_sealed_and_found(tmp_path: Path) -> None:
    seen: list[Path] = []

    async def start(folder: Path) -> None:
        seen.append(folder)
        assert find(tmp_path, KEY) is None
        await fill(folder)

    done = asyncio.run(warm(tmp_path, KEY, start))
    assert done.fresh
    assert done.path == find(tmp_path, KEY) == tmp_path / KEY == seen[0]
    assert not done.path.is_symlink()
    assert (done.files, done.size) == (1, 4)
    assert not stat.S_IMODE((done.path / "triton" / "a.cubin").stat().st_mode) & 0o222
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", KEY]


def test_a_cache_warmed_with_the_file_program_is_of_no_use_without_it(tmp_path: Path) -> None:
    tools, bare = tmp_path / "tools", tmp_path / "bare"
    for folder in (tools, bare):
        folder.mkdir()
    (tools / "file").write_text("#!/bin/sh\n")
    (tools / "file").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tools))
        cache = asyncio.run(warm(tmp_path / "caches", KEY, fill)).path
    assert unlike(cache, str(tools)) is None
    assert "`file` is not here, but was where" in str(unlike(cache, str(bare)))
    assert unlike(tmp_path, str(bare)) is None


def test_a_second_warming_does_not_start_anything(tmp_path: Path) -> None:
    asyncio.run(warm(tmp_path, KEY, fill))

    async def never(_: Path) -> None:
        raise AssertionError("started again")

    again = asyncio.run(warm(tmp_path, KEY, never))
    assert not again.fresh
    assert again.files == 1


@pytest.mark.parametrize("error", [CheckFailed("no"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_interrupted_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    async def start(folder: Path) -> None:
        await fill(folder)
        raise error

    async def run() -> None:
        with pytest.raises(type(error)):
            await warm(tmp_path, KEY, start)

    asyncio.run(run())
    assert find(tmp_path, KEY) is None
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_what_a_killed_warming_left_is_never_a_cache_and_goes(tmp_path: Path) -> None:
    (tmp_path / f".warming-{KEY}").mkdir()
    (tmp_path / f".warming-{KEY}" / MARKER).write_text("{}")
    (tmp_path / KEY).symlink_to(f".warming-{KEY}")
    assert find(tmp_path, KEY) is None
    assert asyncio.run(warm(tmp_path, KEY, fill)).fresh
    assert find(tmp_path, KEY) is not None


def test_an_engine_that_wrote_nothing_is_an_error(tmp_path: Path) -> None:
    async def start(_: Path) -> None:
        return

    with pytest.raises(CheckFailed, match="wrote no cache"):
        asyncio.run(warm(tmp_path, KEY, start))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_old_keys_go_after_success_and_the_one_before_stays(tmp_path: Path) -> None:
    for index in range(3):
        done = asyncio.run(warm(tmp_path, f"key-{index}", fill))
        os.utime(done.path / MARKER, (index + 1, index + 1))
    (tmp_path / "somebody-elses").mkdir()
    done = asyncio.run(warm(tmp_path, "key-9", fill))
    assert done.pruned == ("key-1",)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "key-2", "key-9", "somebody-elses"]


def test_a_failed_warming_prunes_nothing(tmp_path: Path) -> None:
    for index in range(2):
        asyncio.run(warm(tmp_path, f"key-{index}", fill))

    async def start(_: Path) -> None:
        raise CheckFailed("no")

    with pytest.raises(CheckFailed):
        asyncio.run(warm(tmp_path, "key-9", start))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "key-0", "key-1"]


def test_a_folder_in_the_way_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir()
    (tmp_path / KEY / "mine").touch()
    with pytest.raises(StateError, match="in the way"):
        asyncio.run(warm(tmp_path, KEY, fill))
    assert (tmp_path / KEY / "mine").exists()


def test_two_at_once(tmp_path: Path) -> None:
    async def start(folder: Path) -> None:
        with pytest.raises(WarmBusy):
            await warm(tmp_path, "other", fill)
        await fill(folder)

    assert asyncio.run(warm(tmp_path, KEY, start)).fresh


def test_keys() -> None:
    key = cache_key("sha256:ab", "NVIDIA RTX PRO 6000 Blackwell", "590.48.01")
    assert key == "rtx-pro-6000-blackwell-590.48.01-cdf4db8c94807a81"
    with pytest.raises(ConfigError, match="driver version"):
        cache_key("sha256:ab", "x", " ")


TEXT = st.text(min_size=1).filter(str.strip)


@given(TEXT, TEXT, TEXT, TEXT)
def test_a_key_is_a_safe_name_and_tells_its_parts_apart(a: str, b: str, c: str, d: str) -> None:
    key = cache_key(a, b, c)
    assert Path(key).name == key
    assert not key.startswith(".")
    assert len(key.encode()) < 120
    assert (cache_key(a, b, d) == key) == (c == d)


SCRIPT = """
import os, sys, time, pathlib
p = pathlib.Path(os.environ["TRITON_CACHE_DIR"]); p.mkdir(parents=True); (p / "a.cubin").write_text("x")
pathlib.Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
print("warming"); sys.stdout.flush()
time.sleep(0.3)
print(sys.argv[1]); sys.stdout.flush()
time.sleep(float(sys.argv[2]))
"""


def engine(tmp_path: Path, says: str, then: float, **more: object) -> Engine:
    import re

    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    command = (sys.executable, str(script), says, str(then))
    values = {"ready_url": None, "ready_line": re.compile("fired up"), "timeout": 30.0} | more
    return Engine(command, "0.5.23", **values)  # type: ignore[arg-type]


def test_the_command_waits_for_the_line_and_stops_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    begin = time.monotonic()
    done = asyncio.run(warm(tmp_path / "root", KEY, starter(engine(tmp_path, "fired up", 60))))
    assert time.monotonic() - begin < 50
    assert done.files == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_engine_that_ends_early_is_named_by_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    with pytest.raises(CheckFailed, match="ended with 0 before it was ready: out of luck"):
        asyncio.run(warm(tmp_path / "root", KEY, starter(engine(tmp_path, "out of luck", 0))))


def test_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    with pytest.raises(CheckFailed, match="wasn't ready after 1 s"):
        asyncio.run(warm(tmp_path / "root", KEY, starter(engine(tmp_path, "x", 60, timeout=1.0))))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_neither_engine_nor_cache(tmp_path: Path, signum: int) -> None:
    (tmp_path / "engine.py").write_text(SCRIPT)
    words = f"{sys.executable} {tmp_path}/engine.py never 60"
    code = (
        "from hearth.cli.warm import warm; import typer, sys; from hearth.errors import HearthError\n"
        "app = typer.Typer(); app.command()(warm)\n"
        "try: app()\nexcept HearthError as e: print(e); sys.exit(e.code)"
    )
    args = [
        "--root",
        tmp_path / "root",
        "--command",
        words,
        "--engine-version",
        "0.5.23",
        "--image-digest",
        "d",
    ]
    args += ["--gpu", "g", "--driver", "1", "--ready-line", "fired up"]
    env = {**os.environ, "PID_FILE": str(tmp_path / "pid")}
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=env, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert b"nothing half-made was kept" in out
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert [path.name for path in (tmp_path / "root").iterdir()] == [".lock"]
