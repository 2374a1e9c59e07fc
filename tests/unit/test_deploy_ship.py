"""Which layers of an image are sent, and what of a checkout reaches a host."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.deploy import package, ship
from hearth.errors import CheckFailed, MissingError


@pytest.mark.parametrize(
    ("there", "same"),
    [([], 0), ([["a"]], 1), ([["a", "x"], ["a", "b"]], 2), ([["b", "a"]], 0), ([["a", "b", "c", "d"]], 3)],
)
def test_layers_in_common(there: list[list[str]], same: int) -> None:
    assert ship.common(["a", "b", "c"], there) == same


@given(st.lists(st.sampled_from("abc")), st.lists(st.lists(st.sampled_from("abc"))))
def test_what_is_in_common_is_a_beginning_of_both(wanted: list[str], there: list[list[str]]) -> None:
    same = ship.common(wanted, there)
    assert same <= len(wanted)
    assert same == 0 or any(chain[:same] == wanted[:same] for chain in there)


def saved(folder: Path) -> Path:
    """An archive as `docker save` writes it: a layer each in a folder, one of them a link to another's."""
    path = folder / "image.tar"
    config = {"rootfs": {"diff_ids": ["sha256:1", "sha256:2", "sha256:3"]}}
    names = ["a/layer.tar", "b/layer.tar", "c/layer.tar"]
    manifest = [{"Config": "c.json", "Layers": names, "RepoTags": ["x:1"]}]
    with tarfile.open(path, "w") as archive:
        for name, data in {
            names[0]: b"one" * 900,
            names[1]: b"two",
            "c.json": json.dumps(config).encode(),
        }.items():
            item = tarfile.TarInfo(name)
            item.size = len(data)
            archive.addfile(item, io.BytesIO(data))
        link = tarfile.TarInfo(names[2])
        link.type, link.linkname = tarfile.SYMTYPE, "../a/layer.tar"
        archive.addfile(link)
        item = tarfile.TarInfo("manifest.json")
        item.size = len(json.dumps(manifest))
        archive.addfile(item, io.BytesIO(json.dumps(manifest).encode()))
    return path


def test_an_archive_without_the_layers_that_are_there(tmp_path: Path) -> None:
    path = saved(tmp_path)
    ids, members = ship.layers(path)
    assert ids == ["sha256:1", "sha256:2", "sha256:3"]
    out = io.BytesIO()
    ship.without(path, members[:1], out)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as less:
        assert less.getnames() == ["b/layer.tar", "c.json", "manifest.json"]
        assert less.extractfile("b/layer.tar").read() == b"two"  # type: ignore[union-attr]
    whole = io.BytesIO()
    ship.without(path, [], whole)
    with tarfile.open(fileobj=io.BytesIO(whole.getvalue())) as all_of_it:
        assert len(all_of_it.getnames()) == 5


def test_a_damaged_archive_is_an_error_not_a_half_image(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(b"nonsense" * 100)
    with pytest.raises((tarfile.TarError, CheckFailed)):
        ship.layers(path)


def wheel(path: Path, text: str, year: int) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("hearth/x.py", (year, 1, 1, 0, 0, 0)), text)
    return path


def test_a_stamp_follows_content_not_time(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("a==1")
    first = package.stamp(wheel(tmp_path / "1.whl", "x", 2020), lock)
    assert first == package.stamp(wheel(tmp_path / "2.whl", "x", 2026), lock)
    assert first != package.stamp(wheel(tmp_path / "3.whl", "y", 2020), lock)
    lock.write_text("a==2")
    assert first != package.stamp(wheel(tmp_path / "1.whl", "x", 2020), lock)


def checkout(root: Path) -> Path:
    for name in (
        ".dockerignore",
        "docker/Dockerfile",
        "images/x.yaml",
        "app/hearth/a.py",
        "app/hearth/__pycache__/a.pyc",
        "docs/x.md",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for name in ("requirements", "tools/cpu_shims"):
        (root / name).mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (root / name).write_text(name)
    return root


def test_an_images_name_follows_what_it_is_made_of(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    first = package.context_hash(root)
    (root / "docs/x.md").write_text("other")
    (root / "app/hearth/__pycache__/b.pyc").write_text("other")
    assert package.context_hash(root) == first
    (root / "app/hearth/a.py").write_text("other")
    assert package.context_hash(root) != first
    assert package.context_hash(root, "base") != package.context_hash(root)


def test_the_archive_of_the_images_files(tmp_path: Path) -> None:
    root = checkout(tmp_path / "root")
    path = package.context_archive(root, tmp_path / "context.tar.gz")
    with tarfile.open(path) as archive:
        assert "app/hearth/a.py" in archive.getnames()
        assert ".dockerignore" in archive.getnames()
        assert not [name for name in archive.getnames() if "pycache" in name or name.startswith("docs")]


def test_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"hearth\.lock: no such file"):
        package.package(tmp_path, tmp_path)
