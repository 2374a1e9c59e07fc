"""The host lock: what is said about a holder, and when one is gone for sure."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.deploy import hostlock
from hearth.deploy.hostlock import Holder, gone, myself, parse
from hearth.deploy.inventory import Target

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
