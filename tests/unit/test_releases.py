"""The store of releases, on a real file system: atomic, whole or not there, never losing what is in use."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.deploy.release import Draft
from hearth.deploy.releases import (
    CURRENT,
    PREVIOUS,
    Busy,
    NotAllowed,
    Outcome,
    Store,
    load,
    prunable,
)
from hearth.errors import ConfigError, MissingError, StateError

CONFIG = "model: {path: /m, served_name: x}\nengine: {version: 0.5.23}\n"
DRAFT = Draft.model_validate({"image": {"ref": "x", "digest": "sha256:" + "a" * 64}})


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "releases")


def add(store, config=CONFIG):
    release, changed = store.add(DRAFT, config)
    assert changed
    return release.id


def test_a_release_is_kept_whole_and_readable_by_the_containers_user(store):
    release_id = add(store)
    folder = store.folder(release_id)
    assert sorted(path.name for path in folder.iterdir()) == ["hearth.yaml", "release.json"]
    assert folder.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
    assert store.read(release_id).config.file == "hearth.yaml"
    assert store.ids() == [release_id]


def test_the_same_again_is_no_new_release_only_while_it_is_current(store):
    first = add(store)
    again, changed = store.add(DRAFT, CONFIG)
    assert changed
    store.point(CURRENT, first)
    same, changed = store.add(DRAFT, CONFIG)
    assert (same.id, changed) == (first, False)
    assert again.id != first


def test_a_new_release_names_the_one_before(store):
    first = add(store)
    store.point(CURRENT, first)
    release, _ = store.add(DRAFT, CONFIG + "\n# changed\n")
    assert release.previous == first


def test_links_move_in_one_step_and_can_go(store):
    one, two = add(store), add(store)
    store.point(CURRENT, one)
    store.point(CURRENT, two)
    assert (store.root / CURRENT).readlink().name == two
    assert load(store.root / CURRENT).id == two
    store.point(CURRENT, None)
    assert store.pointed(CURRENT) is None


def test_a_link_to_nothing_points_to_nothing(store):
    one = add(store)
    store.point(CURRENT, one)
    (store.root / PREVIOUS).symlink_to("20200101T000000Z-000000")
    assert store.pointed(PREVIOUS) is None
    (store.root / PREVIOUS).unlink()
    (store.root / PREVIOUS).symlink_to("/etc")
    assert store.pointed(PREVIOUS) is None


def test_what_a_crash_left_is_no_release_and_goes_with_the_next(store):
    one = add(store)
    (store.root / ".new-20261129T000000Z-aaaaaa").mkdir()
    assert store.ids() == [one]
    add(store)
    assert not list(store.root.glob(".new-*"))


@pytest.mark.parametrize("text", ["", "{", '{"id": "x"}', "\x00"])
def test_a_damaged_release_is_named_and_harms_no_other(store, text):
    good, bad = add(store), add(store)
    (store.folder(bad) / "release.json").write_text(text)
    assert str(store.folder(bad)) in store.kept(bad).problem
    assert store.kept(bad).release is None
    with pytest.raises(ConfigError):
        store.read(bad)
    assert store.kept(good).release is not None
    store.point(CURRENT, bad)
    assert add(store)
    assert (store.folder(bad) / "release.json").read_text() == text  # nothing is lost


def test_a_config_that_was_changed_afterwards_is_refused(store):
    release_id = add(store)
    (store.folder(release_id) / "hearth.yaml").write_text("model: {}\n")
    with pytest.raises(ConfigError, match="was changed after the release was made"):
        store.read(release_id)
    (store.folder(release_id) / "hearth.yaml").unlink()
    with pytest.raises(MissingError, match="damaged"):
        store.read(release_id)


@pytest.mark.parametrize("name", ["nonsense", "../x", "20200101T000000Z-000000", ""])
def test_an_unknown_id_is_refused_with_what_there_is(store, name):
    known = add(store)
    with pytest.raises(MissingError, match=known):
        store.read(name)


def test_outcomes(store):
    release_id = add(store)
    assert not store.kept(release_id).proven
    store.note(release_id, Outcome(1.0, True, "", 12.5))
    assert store.kept(release_id).proven
    assert store.kept(release_id).outcome == Outcome(1.0, True, "", 12.5)
    store.note(release_id, None)
    assert store.kept(release_id).outcome is None
    (store.folder(release_id) / "outcome.json").write_text("{half")
    assert not store.kept(release_id).proven


def test_a_release_in_use_is_never_removed(store):
    one, two, three = add(store), add(store), add(store)
    store.point(CURRENT, one)
    store.point(PREVIOUS, two)
    for each in (one, two):
        with pytest.raises(StateError, match="in use"):
            store.remove(each)
    store.remove(three)
    assert sorted(store.ids()) == sorted([one, two])


def test_only_one_at_a_time(store):
    with store.locked(), pytest.raises(Busy, match=str(os.getpid())), store.locked():
        pass
    with store.locked():
        pass


def test_a_full_disk_is_named(store, monkeypatch):
    add(store)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        store.add(DRAFT, CONFIG)


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights to be refused: needs root")
def test_a_folder_that_is_not_ours_is_named(store, tmp_path):
    add(store)
    tmp_path.chmod(0o755)
    child = os.fork()
    if child == 0:  # a process of its own, that gives root up for good
        os.setuid(65534)
        try:
            with store.locked():
                os._exit(1)
        except NotAllowed:
            os._exit(0)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


IDS = st.lists(st.integers(0, 40), unique=True).map(lambda found: [f"{n:02d}" for n in found])


@given(IDS, st.integers(1, 10), st.sets(st.integers(0, 40).map(lambda n: f"{n:02d}"), max_size=2))
def test_pruning_keeps_the_newest_and_what_is_in_use(ids, keep, in_use):
    gone = prunable(ids, keep, in_use)
    left = set(ids) - set(gone)
    assert not in_use & set(gone)
    assert set(sorted(ids)[-keep:]) <= left
    assert len(left) <= keep + len(in_use)
