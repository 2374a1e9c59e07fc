"""The plan store keeps either the old or the new state, whatever happens to it, and loses nothing."""

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth import planstore
from hearth.errors import StateError
from hearth.failure import Axis, Failure, FailureKind, Phase
from hearth.ladder import GraphPlan
from hearth.planstore import FILE_NAME, MAX_BYTES, PlanStore, fingerprint

WANTED = GraphPlan("breakable", "full", 32)
LOWER = GraphPlan("disabled", "full", 32)
FAILURE = Failure(FailureKind.GRAPH_CAPTURE, Phase.CAPTURE_PREFILL, Axis.PREFILL, ("Unsupported",), "h", "s")


@pytest.fixture
def store(tmp_path):
    return PlanStore(tmp_path)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_remembered_is_recalled_by_a_new_process(store, tmp_path):
    store.remember("key", LOWER, WANTED, [FAILURE])
    found = PlanStore(tmp_path).recall("key", WANTED)
    assert (found.plan, found.wanted, found.failures) == (LOWER, WANTED, (FAILURE,))
    assert abs(found.saved_at - time.time()) < 60


def test_another_fingerprint_or_another_wanted_plan_recalls_nothing(store):
    store.remember("key", LOWER, WANTED)
    assert store.recall("other", WANTED) is None
    assert store.recall("key", GraphPlan("breakable", "full", 64)) is None


def test_nothing_is_made_by_looking(tmp_path):
    store = PlanStore(tmp_path / "state")
    assert store.recall("key", WANTED) is None
    assert store.forget() == []
    assert not (tmp_path / "state").exists()


def test_promote_forgets_step_downs_and_keeps_the_rest(store):
    store.remember("down", LOWER, WANTED, [FAILURE])
    store.remember("fine", WANTED, WANTED)
    assert [entry.plan for entry in store.forget()] == [LOWER]
    assert list(store.all()) == ["fine"]
    assert store.forget() == []


FACTS = st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text()), max_size=6)


@given(FACTS, FACTS)
def test_a_fingerprint_depends_on_every_fact_and_on_no_order(left, right):
    assert (fingerprint(left) == fingerprint(right)) == (
        json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    )
    assert fingerprint(dict(reversed(left.items()))) == fingerprint(left)


BROKEN = {
    "empty": b"",
    "half": b'{"schema": 1, "sha256": "ab',
    "nul": b"\0" * 4096,
    "not utf-8": b"\xff\xfe{",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "newer": b'{"schema": 2, "sha256": "", "plans": {}, "new": 1}',
    "bad checksum": b'{"schema": 1, "sha256": "00", "plans": {}}',
    "plans is a list": b'{"schema": 1, "sha256": "", "plans": []}',
    "deep": b"[" * 100_000,
    "huge": b" " * (MAX_BYTES + 1),
    "huge number": b'{"schema": ' + b"9" * 10_000 + b"}",
}


def signed(plans):
    return json.dumps({"schema": 1, "sha256": planstore._checksum(plans), "plans": plans}).encode()


ENTRY = {"plan": LOWER.to_json(), "wanted": WANTED.to_json(), "failures": [], "saved_at": 1.0}
BROKEN |= {
    f"signed, {name}": signed({"k": {**ENTRY, **change}})
    for name, change in {
        "no plan": {"plan": None},
        "size text": {"plan": {**LOWER.to_json(), "decode_max_bs": "many"}},
        "size 0": {"plan": {**LOWER.to_json(), "decode_max_bs": 0}},
        "size inf": {"plan": {**LOWER.to_json(), "decode_max_bs": float("inf")}},
        "time beyond floats": {"saved_at": 10**400},
        "unknown kind": {"failures": [{**FAILURE.to_json(), "kind": "new"}]},
    }.items()
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_cannot_be_trusted_is_set_aside_whole(store, tmp_path, caplog, content):
    store.path.write_bytes(content)
    assert store.recall("k", WANTED) is None
    (aside,) = names(tmp_path)
    assert aside.startswith("plans.json.unusable-")
    assert (tmp_path / aside).read_bytes() == content
    assert "set aside" in caplog.text
    assert len(caplog.text) < 2000
    store.remember("k", LOWER, WANTED)
    assert store.recall("k", WANTED).plan == LOWER
    assert (tmp_path / aside).read_bytes() == content


@given(st.binary(max_size=200))
def test_no_content_makes_reading_fail(tmp_path_factory, content):
    store = PlanStore(tmp_path_factory.mktemp("state"))
    store.path.write_bytes(content)
    assert store.all() == {}


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_never_changes_the_plan(tmp_path_factory, position, value):
    store = PlanStore(tmp_path_factory.mktemp("state"))
    store.remember("key", LOWER, WANTED, [FAILURE])
    raw = bytearray(store.path.read_bytes())
    raw[position % len(raw)] = value
    store.path.write_bytes(raw)
    found = store.recall("key", WANTED)
    assert found is None or (found.plan, found.failures) == (LOWER, (FAILURE,))


def test_two_files_set_aside_at_one_moment_are_both_kept(store, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    for content in (b"one", b"two", b"three"):
        store.path.write_bytes(content)
        assert store.all() == {}
    assert {(tmp_path / name).read_bytes() for name in names(tmp_path)} == {b"one", b"two", b"three"}


def test_a_directory_or_a_pipe_in_its_place_is_set_aside(store, tmp_path):
    for make in (store.path.mkdir, lambda: os.mkfifo(store.path)):
        make()
        assert store.all() == {}
        store.remember("key", LOWER, WANTED)
        assert store.recall("key", WANTED) is not None
        store.path.unlink()
    assert len(names(tmp_path)) == 2


def test_a_write_never_replaces_a_file_that_could_not_be_read_and_not_be_moved(store, monkeypatch):
    store.path.write_bytes(b"precious")

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        assert store.all() == {}
        with pytest.raises(StateError, match="Permission denied"):
            store.remember("key", LOWER, WANTED)
    assert store.path.read_bytes() == b"precious"


def test_mode_and_owner_of_the_file_are_kept(store):
    store.remember("key", LOWER, WANTED)
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    store.path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(store.path, 12345, 12345)
    before = store.path.stat()
    store.remember("key", WANTED, WANTED)
    after = store.path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino


def test_a_linked_directory_and_a_linked_file_stay_links(tmp_path):
    real, other = tmp_path / "real", tmp_path / "other"
    real.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(real)
    (real / FILE_NAME).symlink_to(other / "kept.json")
    store = PlanStore(tmp_path / "link")
    store.remember("key", LOWER, WANTED)
    assert store.recall("key", WANTED).plan == LOWER
    assert (tmp_path / "link").is_symlink()
    assert (real / FILE_NAME).is_symlink()
    assert names(other) == ["kept.json"]


def test_a_clock_that_goes_back_loses_nothing_new(store, monkeypatch):
    for number in range(40):
        monkeypatch.setattr(time, "time", lambda now=1e9 - number: now)
        store.remember(f"key{number}", LOWER, WANTED)
    assert list(store.all()) == [f"key{number}" for number in range(8, 40)]


def test_failures_of_any_size_stay_small_on_disk(store):
    loud = Failure(
        FailureKind.UNKNOWN, Phase.LOAD, evidence=("x" * 10_000_000, "\ud800\0\n") * 20, hint="y" * 10**6
    )
    for number in range(40):
        store.remember(f"key{number}", LOWER, WANTED, [loud] * 100)
    assert store.path.stat().st_size < MAX_BYTES
    assert len(store.all()) == 32


def test_leftovers_of_killed_writers_do_not_pile_up(store, tmp_path):
    store.remember("key", LOWER, WANTED)
    (tmp_path / ".plans.json.tmp").write_bytes(b"half")
    store.remember("key", WANTED, WANTED)
    assert names(tmp_path) == [FILE_NAME]


def test_a_link_planted_as_the_temporary_file_is_not_followed(store, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".plans.json.tmp").symlink_to(victim)
    store.remember("key", LOWER, WANTED)
    assert victim.read_text() == "mine"
    assert store.recall("key", WANTED).plan == LOWER


def test_a_lock_held_for_too_long_is_an_error_that_says_so(store, tmp_path, monkeypatch):
    monkeypatch.setattr(planstore, "_LOCK_WAIT", 0.05)
    with planstore._locked(tmp_path), pytest.raises(StateError, match="another process holds its lock"):
        store.remember("key", LOWER, WANTED)


def test_a_directory_that_cannot_be_made_is_an_error_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"can't be written: .*check free space") as caught:
        PlanStore(tmp_path / "file" / "state").remember("key", LOWER, WANTED)
    assert "\n" not in str(caught.value)


SCRIPT = """
import sys
from pathlib import Path
from hearth import planstore
from hearth.planstore import PlanStore
from hearth.ladder import GraphPlan
{body}
"""


def child(body, *arguments, **options):
    command = [sys.executable, "-c", SCRIPT.format(body=body), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


FILL = """
store = PlanStore(Path(sys.argv[1]))
from hearth.errors import StateError
try:
    for n in range(32):
        store.remember(f"new{n}" * 20, GraphPlan("disabled", "full", 1), GraphPlan("breakable", "full", 1))
except StateError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_state(store, tmp_path):
    store.remember("key", LOWER, WANTED)
    limit = store.path.stat().st_size + 500
    process = child(
        FILL, tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    out, errors = process.communicate(timeout=60)
    assert "can't be written: File too large" in out, errors
    assert store.recall("key", WANTED).plan == LOWER
    assert names(tmp_path) == [FILE_NAME]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_of_somebody_else_is_an_error_and_keeps_the_state(store, tmp_path):
    store.remember("key", LOWER, WANTED)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    process = child(FILL.replace("for n", "import os; os.setuid(65534)\n    for n"), tmp_path)
    out, errors = process.communicate(timeout=60)
    assert "can't be written: Permission denied" in out, errors
    assert store.recall("key", WANTED).plan == LOWER


COUNT = """
planstore._LOCK_WAIT = 60  # a writer in a loop leaves the other no turn, for as long as the disk takes
store = PlanStore(Path(sys.argv[1]))
for n in range(int(sys.argv[3])):
    store.remember(f"{sys.argv[2]}-{n}", GraphPlan("disabled", "full", 1), GraphPlan("breakable", "full", 1))
"""


def test_two_writers_at_once_lose_nothing_of_each_other(store, tmp_path):
    writers = [child(COUNT, tmp_path, name, 15) for name in "ab"]
    for writer in writers:
        assert writer.communicate(timeout=60)[1] == ""
    assert set(store.all()) == {f"{name}-{n}" for name in "ab" for n in range(15)}
    assert names(tmp_path) == [FILE_NAME]


# One process makes writers by fork, so that a hundred of them cost no hundred interpreter starts. The writer
# tells each finished state through a pipe before it goes on to the next.
WRITER = """
import os
store, told = PlanStore(Path(sys.argv[1])), sys.stdout
first = int(sys.argv[2])
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        n = int(line)
        while True:
            n += 1
            plan = GraphPlan("p" + str(n) * 2000, "full", n)
            store.remember("key", plan, GraphPlan("breakable", "full", 1))
            os.write(1, f"{n}\\n".encode())
    os.write(1, f"pid {pid}\\n".encode())
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""
KILLS = 150


def test_sigkill_at_any_moment_leaves_the_old_or_the_new_state(store, tmp_path):
    dice, told, leftovers = random.Random(7), 0, 0
    process = child(WRITER, tmp_path, 0, stdin=subprocess.PIPE)
    for _ in range(KILLS):
        process.stdin.write(f"{told}\n")
        process.stdin.flush()
        told = _kill_a_writer(process, dice, told)
        found = store.recall("key", GraphPlan("breakable", "full", 1))
        number = 0 if found is None else found.plan.decode_max_bs
        assert number in (told, told + 1), "neither the old nor the new state"
        assert number == 0 or found.plan.prefill == "p" + str(number) * 2000
        told = number
        leftovers += (tmp_path / ".plans.json.tmp").exists()
        assert set(names(tmp_path)) <= {FILE_NAME, ".plans.json.tmp"}
    process.stdin.close()
    process.wait(timeout=10)
    assert told > KILLS // 10, "the writers were killed before they wrote anything"
    assert leftovers > 0, "no kill hit the middle of a write: the test proves nothing"
    store.remember("key", LOWER, WANTED)
    assert names(tmp_path) == [FILE_NAME]


def _kill_a_writer(process, dice, told):
    """Kill the writer after a random moment; returns the last state that it said was written."""
    pid = 0
    while not pid:
        word, _, rest = process.stdout.readline().strip().partition(" ")
        pid, told = (int(rest), told) if word == "pid" else (0, int(word))
    time.sleep(dice.uniform(0, 0.03))
    os.kill(pid, signal.SIGKILL)
    while (line := process.stdout.readline().strip()) != "dead":
        told = int(line)
    return told
