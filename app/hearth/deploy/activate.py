"""Make a release the one that runs, and go back by itself when it doesn't prove to serve.

Switch the link, restart the unit, wait for READY, ask the smoke test; on any failure the same for the release
before. What a unit's state means is decided by `judge`; the rest is the order of things.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hearth.deploy.downtime import Ask, Watch
from hearth.deploy.release import Release
from hearth.deploy.releases import CURRENT, PREVIOUS, Outcome, Store
from hearth.deploy.smoke import Check
from hearth.deploy.systemctl import Unit, UnitState
from hearth.errors import ExitCode, HearthError

POLL = 1.0
RESTARTS = 2
"""Starts by systemd itself, after which a release is taken for one that doesn't come up."""
LATE_GRACE = 30.0
"""Seconds that the meter waits for a good answer after everything is proven."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What an activation did. `reason` says why the asked release doesn't run; empty where it does."""

    id: str
    ok: bool
    changed: bool = True
    reason: str = ""
    rolled_back: bool = False
    rolled_back_to: str | None = None
    downtime_s: float | None = None
    ready_s: float | None = None
    checks: tuple[Check, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The shape of `hearth release activate --json`."""
        return {
            "ok": self.ok,
            "id": self.id,
            "changed": self.changed,
            "rolled_back": self.rolled_back,
            "rolled_back_to": self.rolled_back_to,
            "reason": self.reason,
            "downtime_s": None if self.downtime_s is None else round(self.downtime_s, 2),
            "ready_s": None if self.ready_s is None else round(self.ready_s, 2),
            "checks": [check.to_json() for check in self.checks],
        }


@dataclass(frozen=True)
class Tools:
    """How an activation reaches the world."""

    unit: Unit
    ready: Callable[[Release], Awaitable[bool]]
    """Whether the release's supervisor says that the engine answers right."""
    smoke: Callable[[Release], Awaitable[list[Check]]]
    ask: Callable[[Release], Ask]
    """How to ask for one good answer, for the meter of the downtime."""
    preflight: Callable[[Release], None]
    """Raises HearthError for what is sure to fail: then nothing is touched."""
    stale: Callable[[Release, UnitState], bool] = field(default=lambda release, state: False)
    """Whether unit or secrets are others than those that the running process started with."""
    say: Say = field(default=lambda _: None)


@dataclass(frozen=True)
class _Proof:
    """How one release came up: `reason` is empty when it serves right."""

    reason: str
    ready_s: float | None = None
    checks: tuple[Check, ...] = ()


class _NotUp(Exception):
    """The unit doesn't come up; the message says why."""


async def activate(store: Store, release_id: str, tools: Tools, force: bool = False) -> Report:
    """Make `release_id` run, or go back. The store must be locked.

    Raises HearthError, with nothing touched, for a release that can't be used at all.
    """
    release = store.read(release_id)
    tools.preflight(release)
    if not force and await _runs_already(store, release, tools):
        return Report(release_id, ok=True, changed=False)
    base = _base(store, release_id)
    before = store.kept(base).release if base and store.pointed(CURRENT) != release_id else None
    async with Watch(_ask(before or release, tools)) as watch:
        return await _switch(store, release, base, tools, watch)


def _ask(release: Release, tools: Tools) -> Ask:
    """Asks what runs; where it can't be asked the downtime is not measured, and nothing else is lost."""
    try:
        return tools.ask(release)
    except HearthError as error:
        tools.say(f"the downtime is not measured: {error}")
        return _no_answer


async def _no_answer() -> bool:
    return False


async def _switch(store: Store, release: Release, base: str | None, tools: Tools, watch: Watch) -> Report:
    kept_before = store.pointed(PREVIOUS)
    watch.meter.begin()
    store.note(release.id, None)
    if base is not None:
        store.point(PREVIOUS, base)
    store.point(CURRENT, release.id)
    proof = await _prove(release, tools)
    if not proof.reason:
        return await _done(store, release, proof, watch)
    tools.say(f"{release.id} doesn't serve: {proof.reason}")
    store.note(release.id, Outcome(time.time(), False, proof.reason))
    if base is None:
        tools.unit.stop()
        reason = f"{proof.reason}; there is no release to go back to: the service is stopped"
        return Report(release.id, ok=False, reason=reason, ready_s=proof.ready_s, checks=proof.checks)
    return await _back(store, release, base, kept_before, proof, tools, watch)


async def _done(store: Store, release: Release, proof: _Proof, watch: Watch) -> Report:
    downtime = await watch.until_back(LATE_GRACE)
    store.note(release.id, Outcome(time.time(), True, "", downtime))
    return Report(release.id, ok=True, downtime_s=downtime, ready_s=proof.ready_s, checks=proof.checks)


async def _back(
    store: Store,
    release: Release,
    base: str,
    kept_before: str | None,
    proof: _Proof,
    tools: Tools,
    watch: Watch,
) -> Report:
    """To the release before: `previous` is again what it was, unless that is what runs now."""
    tools.say(f"going back to {base}")
    store.point(CURRENT, base)
    store.point(PREVIOUS, None if kept_before in (base, release.id) else kept_before)
    again = await _prove_base(store, base, tools)
    downtime = await watch.until_back(LATE_GRACE) if not again else None
    store.note(release.id, Outcome(time.time(), False, proof.reason, downtime))
    reason = proof.reason if not again else f"{proof.reason}; and {base} doesn't come back either: {again}"
    return Report(
        release.id,
        ok=False,
        reason=reason,
        rolled_back=not again,
        rolled_back_to=base,
        downtime_s=downtime,
        ready_s=proof.ready_s,
        checks=proof.checks,
    )


async def _prove_base(store: Store, base: str, tools: Tools) -> str:
    try:
        return (await _prove(store.read(base), tools)).reason
    except HearthError as error:
        return str(error)


async def _prove(release: Release, tools: Tools) -> _Proof:
    """Restart the unit on the current link and see whether it serves."""
    begun = time.monotonic()
    try:
        await _wait_ready(release, tools)
        took = time.monotonic() - begun
        tools.say(f"{release.id} is ready after {took:.0f} s; asking the smoke test")
        checks = tuple(await tools.smoke(release))
    except (_NotUp, HearthError) as error:
        return _Proof(str(error))
    wrong = [f"{check.name}: {check.seen}" for check in checks if not check.ok]
    return _Proof(f"smoke test: {'; '.join(wrong)}" if wrong else "", took, checks)


async def _wait_ready(release: Release, tools: Tools) -> None:
    before = await asyncio.to_thread(tools.unit.show)
    await asyncio.to_thread(tools.unit.restart)
    ends = time.monotonic() + release.ready_within
    told = ""
    while True:
        state = await asyncio.to_thread(tools.unit.show)
        verdict = judge(state, before.invocation)
        if verdict is True and await tools.ready(release):
            return
        if isinstance(verdict, str):
            raise _NotUp(verdict)
        if time.monotonic() > ends:
            raise _NotUp(f"not ready after {release.ready_within:g} s: {state.status or state.active}")
        if state.status and state.status != told:
            told = state.status
            tools.say(told)
        await asyncio.sleep(POLL)


def judge(state: UnitState, old_invocation: str) -> bool | str:
    """Whether the restarted unit is up (True), not yet (False), or why it won't be (pure)."""
    if state.load != "loaded":
        return f"systemd has no such unit ({state.load}): deploy again"
    if state.invocation == old_invocation:
        return False  # what is shown is still the unit before the restart
    if state.active == "failed":
        return _why(state)
    if state.restarts >= RESTARTS:
        return f"started {state.restarts + 1} times in vain: {_why(state)}"
    return state.ready


def _why(state: UnitState) -> str:
    codes = {code.value: code for code in ExitCode}
    code = codes.get(state.exit_status)
    meaning = f"exit code {state.exit_status}" + (f" ({code.name}: {code.meaning})" if code else "")
    how = meaning if state.result in ("exit-code", "success") else f"systemd says {state.result}"
    return f"{state.status}: {how}" if state.status else how


def _base(store: Store, release_id: str) -> str | None:
    """The release to go back to: the newest of current and previous that was proven and isn't this one."""
    links = [store.pointed(CURRENT), store.pointed(PREVIOUS)]
    others = [each for each in links if each is not None and each != release_id]
    proven = [each for each in others if store.kept(each).proven]
    return next(iter(proven), None)


async def _runs_already(store: Store, release: Release, tools: Tools) -> bool:
    if store.pointed(CURRENT) != release.id or not store.kept(release.id).proven:
        return False
    state = await asyncio.to_thread(tools.unit.show)
    if not state.ready or not await tools.ready(release):
        return False
    if tools.stale(release, state):
        tools.say(f"{release.id} started before its unit or its secrets were changed: it starts again")
        return False
    return True
