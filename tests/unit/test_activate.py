"""An activation: switch, prove, go back. systemd and the engine are stand-ins that fail as they are told."""

import itertools

import pytest

from hearth.deploy import activate as module
from hearth.deploy import downtime
from hearth.deploy.activate import Tools, activate, judge
from hearth.deploy.downtime import Meter
from hearth.deploy.release import Draft
from hearth.deploy.releases import CURRENT, PREVIOUS, Outcome, Store
from hearth.deploy.smoke import Check
from hearth.deploy.systemctl import UnitState, parse
from hearth.errors import MissingError

CONFIG = "model: {path: /m, served_name: x}\nengine: {version: 0.5.23}\n"
FAILED = UnitState(active="failed", sub="failed", result="exit-code", exit_status=78, status="bad key")
RUNS = UnitState(active="active", sub="running", status="Serving.")


class FaultyHost:
    """Stands in for systemd and the engine: a release comes up, fails to, or answers wrong, as it is told."""

    def __init__(self, store, faults=()):
        self.store, self.faults = store, dict(faults)
        self.current, self.stopped, self.restarts = None, False, 0
        self.preflight = lambda release: None
        self.stale = False

    def show(self):
        state = FAILED if self.faults.get(self.current) == "dies" else RUNS
        if self.current is None or self.stopped:
            state = UnitState()
        return UnitState(**{**state.__dict__, "invocation": str(self.restarts)})

    def restart(self):
        self.current, self.stopped = self.store.pointed(CURRENT), False
        self.restarts += 1

    def stop(self):
        self.stopped = True

    async def ready(self, _):
        return self.faults.get(self.current) != "never ready"

    async def smoke(self, _):
        wrong = self.faults.get(self.current) == "wrong"
        return [Check("prompt 1", not wrong, "answered 'Milan'" if wrong else "answered 'Rome'")]

    def ask(self, _):
        async def once():
            return self.current is not None and not self.stopped and self.current not in self.faults

        return once

    @property
    def tools(self):
        return Tools(
            self,
            self.ready,
            self.smoke,
            self.ask,
            lambda release: self.preflight(release),
            lambda release, state: self.stale,
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(module, "LATE_GRACE", 5.0)
    monkeypatch.setattr(downtime, "PACE", 0.01)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "releases")


def add(store, word):
    draft = Draft.model_validate(
        {"image": {"ref": "x", "digest": "sha256:" + "a" * 64}, "made_by": word, "ready_within": 0.5}
    )
    return store.add(draft, f"{CONFIG}# {word}\n")[0].id


async def test_the_first_release(store):
    host, one = FaultyHost(store), add(store, "one")
    report = await activate(store, one, host.tools)
    assert (report.ok, report.changed, report.downtime_s) == (True, True, None)
    assert store.pointed(CURRENT) == one
    assert store.pointed(PREVIOUS) is None
    assert store.kept(one).proven


async def serving(store, *words):
    """A host on which each of these releases was activated in turn."""
    host = FaultyHost(store)
    ids = [add(store, word) for word in words]
    for each in ids:
        assert (await activate(store, each, host.tools)).ok
    return host, ids


async def test_the_next_release_keeps_the_one_before_to_go_back_to(store):
    host, (one, two) = await serving(store, "one", "two")
    assert (store.pointed(CURRENT), store.pointed(PREVIOUS)) == (two, one)
    assert store.kept(two).outcome.downtime_s is not None
    assert host.restarts == 2


async def test_what_runs_and_is_proven_is_left_alone(store):
    host, (one,) = await serving(store, "one")
    report = await activate(store, one, host.tools)
    assert (report.ok, report.changed) == (True, False)
    assert host.restarts == 1
    assert (await activate(store, one, host.tools, force=True)).changed
    assert host.restarts == 2


async def test_what_runs_with_an_older_unit_or_secret_starts_again(store):
    host, (one,) = await serving(store, "one")
    host.stale = True
    report = await activate(store, one, host.tools)
    assert (report.ok, report.changed, host.restarts) == (True, True, 2)


async def test_a_start_of_the_same_release_is_measured_on_itself(store):
    host, (_, two) = await serving(store, "one", "two")
    asked, ask = [], host.ask
    host.ask = lambda release: asked.append(release.id) or ask(release)
    await activate(store, two, host.tools, force=True)
    await activate(store, add(store, "three"), host.tools)
    assert asked == [two, two]


async def test_what_cannot_be_asked_before_is_not_measured_and_all_the_rest_happens(store):
    host, (_, two) = await serving(store, "one", "two")
    new = add(store, "new")

    def refuse(_):
        raise MissingError("/etc/hearth/secrets/old_key: no such file")

    host.ask = refuse
    report = await activate(store, new, host.tools)
    assert (report.ok, report.downtime_s) == (True, None)
    assert (store.pointed(CURRENT), store.pointed(PREVIOUS)) == (new, two)


async def test_a_smoke_test_that_cannot_be_asked_goes_back(store):
    host, (one,) = await serving(store, "one")
    bad, ask = add(store, "bad"), host.smoke

    async def refuse(release):
        if release.id == bad:
            raise MissingError("api_key: no such file")
        return await ask(release)

    host.smoke = refuse
    report = await activate(store, bad, host.tools)
    assert (report.rolled_back_to, report.reason) == (one, "api_key: no such file")


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("dies", "exit code 78 (CONFIG"),
        ("wrong", "smoke test: prompt 1: answered 'Milan'"),
        ("never ready", "not ready after 0.5 s"),
    ],
)
async def test_a_release_that_does_not_serve_goes_back_by_itself(store, fault, word):
    host, (one, two) = await serving(store, "one", "two")
    bad = add(store, "bad")
    host.faults[bad] = fault
    report = await activate(store, bad, host.tools)
    assert (report.ok, report.rolled_back, report.rolled_back_to) == (False, True, two)
    assert word in report.reason
    assert report.downtime_s is not None
    assert (store.pointed(CURRENT), store.pointed(PREVIOUS)) == (two, one)
    assert host.current == two
    assert word in store.kept(bad).outcome.reason
    assert not store.kept(bad).proven
    assert report.to_json()["rolled_back"] is True


async def test_a_first_release_that_fails_is_stopped(store):
    bad = add(store, "bad")
    host = FaultyHost(store, {bad: "wrong"})
    report = await activate(store, bad, host.tools)
    assert (report.ok, report.rolled_back) == (False, False)
    assert "no release to go back to" in report.reason
    assert host.stopped


async def test_when_the_old_one_does_not_come_back_either_both_causes_are_told(store):
    host, (one,) = await serving(store, "one")
    bad = add(store, "bad")
    host.faults = {bad: "wrong", one: "dies"}
    report = await activate(store, bad, host.tools)
    assert (report.ok, report.rolled_back) == (False, False)
    assert "Milan" in report.reason
    assert f"{one} doesn't come back either" in report.reason


async def test_what_is_sure_to_fail_touches_nothing(store):
    host, (one,) = await serving(store, "one")
    bad = add(store, "bad")

    def refuse(_):
        raise MissingError("no image")

    host.preflight = refuse
    with pytest.raises(MissingError):
        await activate(store, bad, host.tools)
    assert (store.pointed(CURRENT), host.restarts) == (one, 1)


async def test_an_activation_that_was_cut_short_is_not_gone_back_to(store):
    host, (one, two) = await serving(store, "one", "two")
    cut = add(store, "cut")
    store.point(PREVIOUS, two)
    store.point(CURRENT, cut)  # and then the power went
    assert not store.kept(cut).proven
    again = await activate(store, cut, host.tools)
    assert again.ok
    assert again.changed
    assert (store.pointed(CURRENT), store.pointed(PREVIOUS)) == (cut, two)
    store.note(cut, None)
    bad = add(store, "bad")
    host.faults[bad] = "wrong"
    report = await activate(store, bad, host.tools)
    assert report.rolled_back_to == two
    assert one in store.ids()


async def test_every_moment_of_a_crash_leaves_a_release_to_start_from(store):
    """After each single step of a switch, `current` points to a whole release and a proven one is linked."""
    _, (one, two) = await serving(store, "one", "two")
    new = add(store, "new")
    steps = (
        lambda: store.note(new, None),
        lambda: store.point(PREVIOUS, two),
        lambda: store.point(CURRENT, new),
    )
    for step in steps:
        step()
        linked = [store.pointed(CURRENT), store.pointed(PREVIOUS)]
        assert all(store.kept(each).release is not None for each in linked)
        assert any(store.kept(each).proven for each in linked)
    assert one in store.ids()


async def test_a_damaged_old_release_is_told(store):
    host, (one,) = await serving(store, "one")
    bad = add(store, "bad")
    (store.folder(one) / "release.json").write_text("{")
    host.faults[bad] = "wrong"
    report = await activate(store, bad, host.tools)
    assert not report.ok
    assert not report.rolled_back
    assert "release.json" in report.reason


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        (UnitState(active="active", sub="running", invocation="old"), False),
        (UnitState(active="failed", invocation="old"), False),
        (UnitState(active="activating", sub="start", invocation="new"), False),
        (UnitState(active="activating", sub="auto-restart", invocation="new", restarts=1), False),
        (UnitState(active="active", sub="running", invocation="new"), True),
    ],
)
def test_a_unit_is_up_or_not_yet(state, verdict):
    assert judge(state, "old") is verdict


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (UnitState(active="failed", result="exit-code", exit_status=79, invocation="new"), "MISSING"),
        (UnitState(active="failed", result="timeout", invocation="new"), "systemd says timeout"),
        (
            UnitState(active="failed", result="watchdog", invocation="new", status="Frozen."),
            "Frozen.: systemd says",
        ),
        (
            UnitState(active="activating", restarts=2, exit_status=1, result="exit-code", invocation="n"),
            "3 times",
        ),
        (UnitState(load="not-found", invocation=""), "no such unit"),
    ],
)
def test_why_a_unit_is_not_up(state, word):
    assert word in judge(state, "old")


def test_systemctls_words_are_read():
    text = "LoadState=loaded\nActiveState=active\nSubState=running\nResult=success\nExecMainStatus=0\n"
    text += "NRestarts=3\nInvocationID=abc\nStatusText=Serving a=b.\n"
    state = parse(text + "ExecMainStartTimestampMonotonic=2500000\nFragmentPath=/u\n")
    assert state == UnitState(
        "loaded", "active", "running", "success", 0, 3, "abc", "Serving a=b.", 2.5, "/u"
    )
    assert state.ready
    assert parse("").load == ""


def meter(*answers):
    made, clock = Meter(), itertools.count()
    for answer in answers:
        if answer is None:
            made.begin()
        else:
            made.saw(float(next(clock)), answer)
    return made.seconds


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [
        ([True, None, True, True], 0.0),
        ([True, None, False, False, True], 3.0),
        ([True, True, None, True, False, True, True], 2.0),
        ([True, None, False, True, False, True], 4.0),  # what answered in between was not to last
        ([True, False, True, True, None, False, True], 2.0),  # a slip before the change doesn't count
        ([True, None, False, False], None),
        ([False, None, False, True], None),
        ([None], None),
        ([], None),
    ],
)
def test_downtime_is_from_the_last_good_answer_to_the_first(answers, seconds):
    assert meter(*answers) == seconds


def test_an_outcome_is_kept_as_it_was(store):
    one = add(store, "one")
    store.note(one, Outcome(1.5, False, "why", None))
    assert store.kept(one).outcome == Outcome(1.5, False, "why", None)
