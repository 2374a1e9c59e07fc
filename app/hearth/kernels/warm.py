"""Caches that only a GPU can fill: Triton, DeepGEMM, CuTe-DSL, TileLang, SGLang's kernels, autotune tactics.

They are filled once for each image, GPU type and driver, by starting the engine as it will be served:

    ROOT/KEY            a finished cache: a real folder with `warm.json` in it
    ROOT/.warming-KEY   one that is being filled; meanwhile ROOT/KEY is a link to it, so that the engine sees
                        the same path now and when it serves (some caches keep absolute paths)
    ROOT/.lock          held while warming

A finished cache gets its name by one rename, last. Whatever is left of an interrupted warming is removed by
the next one and never taken for a cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hearth.errors import CheckFailed, ConfigError, ExitCode, HearthError, StateError
from hearth.kernels.seal import seal_tree

MARKER = "warm.json"
_PART = ".warming-"
_KEPT = 2

Start = Callable[[Path], Awaitable[None]]


class WarmBusy(HearthError):
    """Another warming is at work in the same folder."""

    code = ExitCode.RETRY


@dataclass(frozen=True)
class Warmed:
    """A finished cache. `fresh` is False where it was there already; seconds and counts are its maker's."""

    path: Path
    fresh: bool
    files: int
    size: int
    seconds: float
    pruned: tuple[str, ...] = ()


def cache_key(image_digest: str, gpu: str, driver: str) -> str:
    """A folder name for what compiled code depends on: readable in front, a hash of all three behind.

    >>> cache_key("sha256:ab", "NVIDIA RTX PRO 6000 Blackwell", "590.48.01")
    'rtx-pro-6000-blackwell-590.48.01-cdf4db8c94807a81'
    """
    for name, value in (("image digest", image_digest), ("GPU type", gpu), ("driver version", driver)):
        if not value.strip():
            raise ConfigError(f"a kernel cache needs the {name}, which is empty")
    digest = hashlib.sha256("\0".join((image_digest, gpu, driver)).encode()).hexdigest()[:16]
    readable = f"{gpu.removeprefix('NVIDIA ')} {driver}".lower()
    slug = re.sub(r"[^a-z0-9.]+", "-", readable).strip("-.")[:80] or "gpu"
    return f"{slug}-{digest}"


def find(root: Path, key: str) -> Path | None:
    """The finished cache of that key, or None."""
    path = root / key
    return path if not path.is_symlink() and (path / MARKER).is_file() else None


def unlike(cache: Path, search: str | None = None) -> str | None:
    """Why a served engine will not find what was warmed into `cache`: a sentence, or None.

    Triton names the stubs that it compiles with C by `platform.architecture()` among others (3.6,
    runtime/build.py), which runs the program `file`. With that on PATH (`search`, or this process's) only
    here, or only where the cache was warmed, each stub is compiled again, which a sealed image can't.
    """
    then = _facts(cache).get("file_program")
    now = shutil.which("file", path=search) is not None
    if then is None or then == now:
        return None
    where = "here, but was not where" if now else "not here, but was where"
    return (
        f"{cache}: the program `file` is {where} these caches were warmed, so Triton will not find its "
        "compiled stubs: warm again in an image that is like this one in that"
    )


async def warm(root: Path, key: str, start: Start, keep: int = _KEPT) -> Warmed:
    """Make the cache of `key` unless it is there: `start(folder)` fills it and returns with the engine gone.

    Whatever `start` raises passes through and leaves no cache. After success, the newest `keep` caches stay
    (this one among them; the one before is what a rollback needs). Raises WarmBusy, CheckFailed where
    nothing was written at all, StateError where the folder can't be used.
    """
    try:
        with _locked(root):
            _sweep(root)
            there = find(root, key)
            if there is not None:
                return _warmed(there, fresh=False)
            return await _fill(root, key, start, keep)
    except OSError as error:
        raise StateError(f"{error.filename or root}: {error.strerror or error}") from error


async def _fill(root: Path, key: str, start: Start, keep: int) -> Warmed:
    aside, link = root / f"{_PART}{key}", root / key
    if link.is_dir():  # a folder without a marker isn't ours to delete
        raise StateError(f"{link}: is in the way: a folder that no warming made", "move it away")
    started = time.monotonic()
    aside.mkdir()
    try:
        link.symlink_to(aside.name)
        await start(link)
        _finish(aside, key, time.monotonic() - started)
        link.unlink()
        aside.rename(link)
    except BaseException:
        _discard(root, key)
        raise
    return _warmed(link, fresh=True, pruned=_prune(root, key, keep))


def _finish(aside: Path, key: str, seconds: float) -> None:
    """Seal the files and write the marker."""
    files = seal_tree(aside)
    if files == 0:
        raise CheckFailed("the engine wrote no cache at all", "does it get the environment that Hearth sets?")
    size = sum(path.lstat().st_size for path in aside.rglob("*") if path.is_file())
    facts: dict[str, Any] = {"schema_version": 1, "key": key, "files": files, "bytes": size}
    facts |= {"seconds": round(seconds, 1), "file_program": shutil.which("file") is not None}
    marker = aside / MARKER
    with marker.open("w", encoding="utf-8") as file:
        json.dump({**facts, "made_at": int(time.time())}, file)
        file.flush()
        os.fsync(file.fileno())
    marker.chmod(0o444)


def _warmed(path: Path, *, fresh: bool, pruned: tuple[str, ...] = ()) -> Warmed:
    facts = _facts(path)
    return Warmed(
        path,
        fresh,
        int(facts.get("files", 0)),
        int(facts.get("bytes", 0)),
        float(facts.get("seconds", 0)),
        pruned,
    )


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _discard(root: Path, key: str) -> None:
    """Remove an unfinished cache and the link to it; the error that led here is what gets reported."""
    with contextlib.suppress(OSError):
        if (root / key).is_symlink():
            (root / key).unlink()
        shutil.rmtree(root / f"{_PART}{key}", ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what interrupted warmings left."""
    for path in root.iterdir():
        if path.name.startswith(_PART):
            _discard(root, path.name.removeprefix(_PART))


def _prune(root: Path, key: str, keep: int) -> tuple[str, ...]:
    """Remove finished caches beyond the newest `keep`, never `key`; their names.

    Other folders aren't touched.
    """
    others = [path for path in root.iterdir() if path.name != key and find(root, path.name) is not None]
    others.sort(key=lambda path: (path / MARKER).stat().st_mtime, reverse=True)
    old = others[max(0, keep - 1) :]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return tuple(sorted(path.name for path in old if not path.exists()))


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WarmBusy(f"{root}: another warming is at work there", "wait for it") from error
        yield
