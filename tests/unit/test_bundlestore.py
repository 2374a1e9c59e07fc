"""Bundles on disk: names, pruning, and disks that refuse."""

import errno
import json
import os
import stat
import time

import pytest

from hearth import bundlestore
from hearth.bundlestore import BundleStore, bundle_names, read_bundle
from hearth.errors import StateError
from hearth.failure import Failure, FailureKind, Phase

AT = 1795989406.5
FAILURE = {
    "at": AT,
    "sentence": "s",
    "done": "d",
    "action": "restart",
    **Failure(FailureKind.OOM, Phase.LOAD).to_json(),
}
FILES = {"failure.json": json.dumps(FAILURE), "log.txt": "line\n"}


@pytest.fixture
def store(tmp_path):
    return BundleStore(tmp_path / "failures", 50, 500_000_000)


def test_a_bundle_is_named_by_time_and_kind_and_read_by_its_owner_alone(store):
    path = store.write(AT, "oom", FILES)
    assert path.name == "20261129T215646.500Z-oom"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert (path / "log.txt").read_text() == "line\n"
    bundle = read_bundle(path)
    assert not bundle.problem
    assert bundle.document["kind"] == "oom"
    assert [entry.name for entry in store.folder.iterdir()] == [path.name], "nothing is left aside"


def test_two_at_the_same_moment_are_two_and_sort_as_they_came(store):
    written = [store.write(AT, kind, FILES).name for kind in ("unknown", "hang", "hang", "comm")]
    assert len(set(written)) == 4
    assert store.names() == written


def test_the_oldest_go_by_count(tmp_path):
    store = BundleStore(tmp_path, 3, 500_000_000)
    written = [store.write(AT + n, "oom", FILES).name for n in range(5)]
    assert store.names() == written[2:]


def test_the_oldest_go_by_size_and_the_newest_stays(tmp_path):
    store = BundleStore(tmp_path, 50, 250_000)
    big = {**FILES, "log.txt": "x" * 100_000}
    written = [store.write(AT + n, "oom", big).name for n in range(4)]
    assert store.names() == written[2:]
    huge = store.write(AT + 9, "oom", {**FILES, "log.txt": "x" * 400_000}).name
    assert store.names() == [huge]


def test_a_clock_that_was_set_back_does_not_prune_the_new_one(tmp_path):
    store = BundleStore(tmp_path, 2, 500_000_000)
    first, _ = (store.write(AT + n, "oom", FILES).name for n in range(2))
    new = store.write(AT - 3600, "hang", FILES).name
    assert new in store.names()
    assert first not in store.names()


def test_what_hearth_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "20261129T215646.500Z-oom.txt").write_text("mine")
    (tmp_path / "20261129T215646.500Z-link").symlink_to(tmp_path / "notes")
    store = BundleStore(tmp_path, 1, 1)
    for n in range(3):
        store.write(AT + n, "oom", FILES)
    assert len(store.names()) == 1
    assert (tmp_path / "notes").is_dir()
    assert (tmp_path / "20261129T215646.500Z-oom.txt").read_text() == "mine"
    assert (tmp_path / "20261129T215646.500Z-link").is_symlink()


def test_what_a_killed_writer_left_goes_with_a_later_write(store):
    store.folder.mkdir()
    old, new = store.folder / ".writing-1-1", store.folder / ".writing-2-2"
    for folder in (old, new):
        folder.mkdir()
        (folder / "log.txt").write_text("half")
    past = time.time() - 3600
    os.utime(old, (past, past))
    store.write(AT, "oom", FILES)
    assert not old.exists()
    assert new.exists(), "another writer may be at work"


def test_a_full_disk_is_one_error_and_leaves_nothing(store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = store.write(AT, "oom", FILES).name
    monkeypatch.setattr(bundlestore.os, "fsync", full)
    with pytest.raises(StateError, match=r"No space left on device \(check free space"):
        store.write(AT + 1, "oom", FILES)
    assert [entry.name for entry in store.folder.iterdir()] == [kept]


def test_lowered_limits_make_room_before_a_new_one_is_written(tmp_path, monkeypatch):
    written = [BundleStore(tmp_path, 50, 500_000_000).write(AT + n, "oom", FILES).name for n in range(4)]
    monkeypatch.setattr(bundlestore, "_fill", lambda *_: os.close(-1))
    with pytest.raises(StateError):
        BundleStore(tmp_path, 2, 500_000_000).write(AT + 9, "oom", FILES)
    assert bundle_names(tmp_path) == written[2:]


def test_a_file_in_the_folders_place_is_one_error(tmp_path):
    (tmp_path / "failures").write_text("")
    with pytest.raises(StateError, match="can't be written"):
        BundleStore(tmp_path / "failures", 1, 1).write(AT, "oom", FILES)


def test_no_folder_is_no_bundles(tmp_path):
    assert bundle_names(tmp_path / "none") == []


BROKEN = {
    "not JSON": "{",
    "a list": "[]",
    "no kind": "{}",
    "an unknown kind": json.dumps({**FAILURE, "kind": "x"}),
    "evidence that is none": json.dumps({**FAILURE, "evidence": 5}),
    "a sentence that is none": json.dumps({**FAILURE, "sentence": None}),
    "deep": "[" * 100_000,
    "bytes": "\x00\x01",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_corrupt_bundle_has_a_problem(store, text):
    bundle = read_bundle(store.write(AT, "oom", {"failure.json": text}))
    assert "not what Hearth writes" in bundle.problem
    assert not bundle.document


def test_a_bundle_without_its_file_or_with_a_pipe_has_a_problem(store):
    path = store.write(AT, "oom", {})
    assert "No such file" in read_bundle(path).problem
    os.mkfifo(path / "failure.json")
    assert "not a regular file" in read_bundle(path).problem
