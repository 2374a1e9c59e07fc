"""The host lock: what is said about a holder, and when one is gone for sure."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.deploy import hostlock
from hearth.deploy.hostlock import Holder, Locked, gone, myself, parse
from hearth.deploy.inventory import Target
from hearth.deploy.remote import Said

ME = Holder("me@here", "deploy", time.time(), "r2", 7, 100.0, "m1", "b1")
OTHER = replace(ME, who="al@there", run="r1", pid=5, started=50.0)


@pytest.mark.parametrize(
    ("holder", "started", "reason"),
    [
        (OTHER, None, "its process 5"),
        (OTHER, 50.5, ""),
        (OTHER, 90.0, "its process 5"),
        (replace(OTHER, boot="b0"), 50.0, "was restarted"),
        (replace(OTHER, machine="m2"), None, ""),
        (replace(OTHER, machine=""), None, ""),
        (replace(OTHER, pid=0), None, ""),
    ],
)
def test_only_a_provably_dead_holder_is_gone(holder: Holder, started: float | None, reason: str) -> None:
    found = gone(holder, ME, lambda pid: started)
    assert reason in found
    assert bool(found) is bool(reason)


def test_this_process_is_not_gone() -> None:
    me = myself("deploy", "r")
    assert gone(me, me, hostlock._started) == ""


def test_there_and_back() -> None:
    assert parse(json.dumps(asdict(OTHER))) == OTHER
    assert parse(" \n") is None


@given(st.text(max_size=200))
def test_any_file_is_a_holder_or_none(text: str) -> None:
    found = parse(text)
    assert (found is None) is (not text.strip())


def test_a_refusal_names_holder_reason_and_way_out() -> None:
    old = replace(OTHER, since=time.time() - 8 * 3600, why="driver upgrade")
    said = str(hostlock.refusal(Target("gpu1", "gpu1"), old))
    for part in (
        "gpu1 is held by al@there",
        "(8 h)",
        "driver upgrade",
        "longer than",
        "hearth lock gpu1 --release",
    ):
        assert part in said


def test_ages() -> None:
    assert "(0 s)" in hostlock.age(0)
    assert "(59 s)" in hostlock.age(59.9)
    assert "(2 min)" in hostlock.age(125)
    assert "(3 days)" in hostlock.age(3.5 * 86400)


HOST = Target("gpu1", "gpu1")
DEFAULT = hostlock.PATH


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock's file; a stand-in for SSH runs the same scripts in a shell of this machine."""

    def here(target: Target, script: str, root: bool = True, timeout: float = 60) -> Said:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=timeout)
        return Said(done.returncode, done.stdout, done.stderr)

    path = tmp_path / "deploy.lock"
    monkeypatch.setattr(hostlock, "PATH", str(path))
    monkeypatch.setattr(hostlock, "run", here)
    return path


def test_a_living_holder_is_never_pushed_aside(lock: Path) -> None:
    first, second = myself("deploy", "r1"), myself("deploy", "r2")
    with hostlock.held([HOST], first, print):
        with pytest.raises(Locked, match="gpu1 is held by"), hostlock.held([HOST], second, print):
            pytest.fail("two at once")
        assert parse(lock.read_text()) == first
    assert not lock.exists()


def test_a_dead_holder_is_taken_over_and_that_is_said(lock: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    lock.write_text(json.dumps(asdict(replace(myself("deploy", "dead"), pid=process.pid, started=1.0))))
    said: list[str] = []
    me = myself("deploy", "r2")
    with hostlock.held([HOST], me, said.append):
        assert parse(lock.read_text()) == me
    assert "is taken over: its process" in said[0]
    assert not lock.exists()


def test_the_lock_of_somebody_else_is_not_let_go(lock: Path) -> None:
    other, me = myself("deploy", "r1"), myself("deploy", "r2")
    lock.write_text(json.dumps(asdict(other)))
    assert not hostlock.release(HOST, me)
    assert parse(lock.read_text()) == other
    assert hostlock.force(HOST) == other
    assert not lock.exists()


def test_of_several_hosts_all_are_held_or_none(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(target: Target, me: Holder, say: hostlock.Say) -> None:
        if target.name == "gpu2":
            raise hostlock.refusal(target, OTHER)
        taken(target, me, say)

    taken = hostlock.take
    monkeypatch.setattr(hostlock, "take", refused)
    two = [HOST, Target("gpu2", "gpu2")]
    with pytest.raises(Locked, match="gpu2"), hostlock.held(two, myself("deploy", "r"), print):
        pytest.fail("one is held by somebody")
    assert not lock.exists()


def test_it_outlives_a_reboot_and_leaves_nothing(lock: Path) -> None:
    assert not DEFAULT.startswith(("/run/", "/tmp/", "/var/run/"))
    with hostlock.held([HOST], myself("deploy", "r1"), print):
        assert list(lock.parent.iterdir()) == [lock]
    assert list(lock.parent.iterdir()) == []
