"""A run without compilers: the environment that forbids them, and a watch that counts what appears anyway.

Switches can be missed (a library that nobody knew compiles too), so the watch looks at results: files that
only a compiler or an autotuner writes, new below the cache folders after the engine is ready.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from hearth.engine.dialect import dialect_for

# SGLANG_CRASH_ON_JIT_COMPILE ends the engine at a cold compile of SGLang's own kernels (environ.py).
_CRASH_FROM = Version("0.5.20")
# Nothing answers there, so a missing cubin is an error at once, not a download (cubin_loader.py:35).
_NO_DOWNLOADS = {"FLASHINFER_CUBINS_REPOSITORY": "http://127.0.0.1:9/", "HF_HUB_OFFLINE": "1"}

_ARTIFACTS = (".so", ".cubin", ".ptx", ".o", ".fatbin", ".hsaco")
_TACTICS = ("autotune", "tactics")
# The driver names what it makes out of PTX by hash alone; its folder tells.
_DRIVER_CACHES = ("/nv/", "/ComputeCache/")
# A folder this fresh may get another file without a new time stamp (the kernel's clock ticks every few ms).
_FRESH_NS = 2_000_000_000


def seal_env(version: str, cache_root: str, scratch: str | None = None) -> dict[str, str]:
    """The environment for a run of that SGLang version in which nothing may compile or be downloaded.

    Every cache lies below `cache_root`. FlashInfer writes to its workspace at each import, also when it
    compiles nothing: with `scratch`, that one lies there, so that the cache can be read-only. Raises
    UnknownVersion.
    """
    dialect = dialect_for(version)
    env = {**dialect.cache_env(cache_root), **_NO_DOWNLOADS, "FLASHINFER_DISABLE_JIT": "1"}
    if scratch is not None:
        env["FLASHINFER_WORKSPACE_BASE"] = scratch
    if Version(dialect.version) >= _CRASH_FROM:
        env["SGLANG_CRASH_ON_JIT_COMPILE"] = "1"
    return env


def cache_roots(env: dict[str, str]) -> list[Path]:
    """The folders that `seal_env` or a dialect put caches in, for the watch."""
    names = ("_CACHE_DIR", "_CACHE_PATH", "_WORKSPACE_BASE")
    return sorted({Path(value) for name, value in env.items() if name.endswith(names) and value})


@dataclass(frozen=True)
class _Folder:
    """One listing: the folder's time stamp (None: list it again), its artifacts and its folders."""

    stamp: int | None
    artifacts: dict[str, tuple[int, int]]
    folders: tuple[str, ...]


class CompileWatch:
    """Which artifacts appeared below some folders since `mark()`.

    A look costs one stat for each folder and a listing for each that changed. Links aren't followed; files
    and folders whose names begin with "." or "tmp" are still being written and don't count.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        unique = sorted({root.resolve() for root in roots})
        self._roots = [root for root in unique if not any(parent in unique for parent in root.parents)]
        self._folders: dict[str, _Folder] = {}
        self._known: dict[str, tuple[int, int]] = {}

    def mark(self) -> None:
        """What is there now doesn't count: call it when the engine is ready."""
        self._known = self._look()

    def scan(self) -> list[str]:
        """Paths of artifacts that are new or written again since `mark` or the last `scan`, sorted."""
        seen = self._look()
        new = sorted(path for path, identity in seen.items() if self._known.get(path) != identity)
        self._known.update({path: seen[path] for path in new})
        return new

    def _look(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        kept: dict[str, _Folder] = {}
        pending = [str(root) for root in self._roots]
        while pending:
            path = pending.pop()
            folder = self._folder(path)
            if folder is not None:
                kept[path] = folder
                found.update(folder.artifacts)
                pending.extend(folder.folders)
        self._folders = kept
        return found

    def _folder(self, path: str) -> _Folder | None:
        """The folder's listing, the kept one where its time stamp is the same; None where it is gone."""
        try:
            stamp = os.lstat(path).st_mtime_ns
            known = self._folders.get(path)
            if known is not None and known.stamp == stamp:
                return known
            fresh = time.time_ns() - stamp < _FRESH_NS
            return _listing(path, None if fresh else stamp)
        except OSError:
            return None


def _listing(path: str, stamp: int | None) -> _Folder:
    artifacts, folders = {}, []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith((".", "tmp")) and entry.name != ".cache":
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif _is_artifact(entry):
                status = entry.stat(follow_symlinks=False)
                artifacts[entry.path] = (status.st_mtime_ns, status.st_ino)
    return _Folder(stamp, artifacts, tuple(folders))


def _is_artifact(entry: os.DirEntry[str]) -> bool:
    if not entry.is_file(follow_symlinks=False):
        return False
    if any(folder in entry.path for folder in _DRIVER_CACHES):
        return entry.name != "index"
    tactics = entry.name.endswith(".json") and any(word in entry.path for word in _TACTICS)
    return tactics or entry.name.endswith(_ARTIFACTS)


def seal_tree(root: Path) -> int:
    """Take write permission from every file below `root`, and remove locks and logs. Returns how many files.

    Folders stay writable for their owner: lock files and logs need that, and what a compiler adds is
    counted by the watch; what was warmed can't be altered.
    """
    count = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            if path.is_symlink():
                continue
            if name.endswith((".lock", ".log")):
                path.unlink()
                continue
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
            count += 1
    return count
