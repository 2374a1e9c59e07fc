"""The sealed environment by version, and the watch for what compiles all the same."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hearth.engine.dialect import dialect_for
from hearth.errors import UnknownVersion
from hearth.kernels.seal import CompileWatch, cache_roots, seal_env, seal_tree


@pytest.mark.parametrize("version", ["0.5.9", "0.5.12", "0.5.18", "0.5.20", "0.5.23"])
def test_no_compiling_no_downloads_and_every_cache_below_the_root(version: str) -> None:
    env = seal_env(version, "/c")
    assert env["FLASHINFER_DISABLE_JIT"] == "1"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert dialect_for(version).cache_env("/c").items() <= env.items()
    assert all(root.is_relative_to("/c") for root in cache_roots(env))
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TVM_FFI_CACHE_DIR"} <= set(env)


@pytest.mark.parametrize(("version", "known"), [("0.5.19", False), ("0.5.20", True), ("0.5.23", True)])
def test_crash_on_compile_only_where_the_engine_knows_it(version: str, known: bool) -> None:
    assert ("SGLANG_CRASH_ON_JIT_COMPILE" in seal_env(version, "/c")) is known


def test_flashinfers_workspace_can_lie_elsewhere() -> None:
    env = seal_env("0.5.23", "/c", scratch="/run/scratch")
    assert env["FLASHINFER_WORKSPACE_BASE"] == "/run/scratch"
    assert Path("/run/scratch") in cache_roots(env)


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(UnknownVersion):
        seal_env("0.1.0", "/c")


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def age(root: Path) -> None:
    """Make every folder look old, so that its listing is kept."""
    for folder, _, _ in os.walk(root):
        os.utime(folder, (1e9, 1e9))


def test_only_what_appears_after_the_mark_counts_and_once(tmp_path: Path) -> None:
    put(tmp_path / "triton" / "old.cubin")
    age(tmp_path)
    watch = CompileWatch([tmp_path])
    watch.mark()
    assert watch.scan() == []
    new = [
        put(tmp_path / "triton" / "k" / "new.cubin"),
        put(tmp_path / "a.so"),
        put(tmp_path / "nv" / "6" / "af31"),
    ]
    new.append(put(tmp_path / "flashinfer" / "autotune" / "rank_0.json"))
    assert watch.scan() == sorted(map(str, new))
    assert watch.scan() == []


@pytest.mark.parametrize(
    "name", ["x.py", "x.lock", "flashinfer_jit.log", "config.json", "tmp.123/x.cubin", ".x.so"]
)
def test_what_no_compiler_makes_does_not_count(tmp_path: Path, name: str) -> None:
    watch = CompileWatch([tmp_path])
    watch.mark()
    put(tmp_path / name)
    assert watch.scan() == []


def test_written_again_counts_again_and_removed_does_not(tmp_path: Path) -> None:
    path = put(tmp_path / "a.so")
    other = put(tmp_path / "b.so")
    watch = CompileWatch([tmp_path])
    watch.mark()
    put(tmp_path / "next", "y").replace(path)
    other.unlink()
    assert watch.scan() == [str(path)]


def test_nested_and_absent_roots_and_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    watch = CompileWatch([tmp_path, tmp_path / "a", tmp_path / "later", Path("/nonexistent/x")])
    watch.mark()
    found = put(tmp_path / "a" / "k.so")
    assert watch.scan() == [str(found)]
    late = put(tmp_path / "later" / "m.o")
    assert watch.scan() == [str(late)]


def test_an_unchanged_tree_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(20):
        put(tmp_path / f"d{index}" / "k.so")
    age(tmp_path)
    watch = CompileWatch([tmp_path])
    watch.mark()
    listed: list[str] = []
    real = os.scandir
    monkeypatch.setattr("os.scandir", lambda path: (listed.append(str(path)), real(path))[1])
    assert watch.scan() == []
    assert listed == []
    put(tmp_path / "d3" / "new.so")
    assert watch.scan() == [str(tmp_path / "d3" / "new.so")]
    assert listed == [str(tmp_path / "d3")]


def test_sealing_takes_write_permission_and_removes_locks(tmp_path: Path) -> None:
    put(tmp_path / "a" / "k.so")
    put(tmp_path / "a" / "k.lock")
    put(tmp_path / "jit.log")
    (tmp_path / "link").symlink_to("/etc/hostname")
    assert seal_tree(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "k.so", "link"]
    assert not stat.S_IMODE((tmp_path / "a" / "k.so").stat().st_mode) & 0o222
    assert os.access("/etc/hostname", os.R_OK)
