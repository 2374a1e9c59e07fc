"""Files that are whole or not there."""

import errno
import os
from pathlib import Path

import pytest

from hearth.files import for_everybody, write_whole


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    write_whole(tmp_path / "a", b"newer", for_everybody)
    assert (tmp_path / "a").read_bytes() == b"newer"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_an_interrupted_writer_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".a.tmp").write_bytes(b"half")
    write_whole(tmp_path / "a", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / ".a.tmp").symlink_to(tmp_path / "victim")
    write_whole(tmp_path / "a", b"whole")
    assert (tmp_path / "victim").read_bytes() == b"mine"
