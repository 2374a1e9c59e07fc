"""Fetches weights from a Hugging Face hub: resumable, verified, then never again."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hearth import weights
from hearth.errors import CheckFailed, ConfigError, HearthError, MissingError
from hearth.fetch_bytes import download, part_of
from hearth.fetch_hub import listing
from hearth.fetch_types import PARTS, Busy, NoRoom, Quiet, Request, Watcher, wanted
from hearth.weights import Manifest

SPARE = 1 << 30
"""Bytes that must stay free."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """The folder of parts, for one fetch at a time. Raises Busy or NoRoom."""
    parts = folder / PARTS
    try:
        parts.mkdir(parents=True, exist_ok=True)
        file = (parts / "lock").open("w")
    except OSError as error:
        raise NoRoom(
            f"{folder}: can't be written: {error.strerror}", "name a folder that this user may write"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Busy(f"{folder}: another fetch is at work there", "wait for it") from None
        yield parts


def fetch(request: Request, watcher: Watcher | None = None) -> Manifest:
    """Fetch, verify, write the manifest; returns it. What is there already is kept.

    Raises HearthError: MissingError, Denied, Unreachable, Busy, NoRoom, ConfigError, or CheckFailed for files
    that came damaged. After any of them, or a kill, the same call goes on where it was.
    """
    watcher = watcher or Quiet()
    with locked(request.folder) as parts:
        manifest = listing(request)
        if not manifest.files:
            raise ConfigError(f"{request.repo}: no file is left to fetch", "widen --include")
        _make_room(request.folder, parts, manifest)
        _bring(request, manifest, parts, watcher)
        weights.save(request.folder, manifest)
        shutil.rmtree(parts, ignore_errors=True)
    return manifest


def complete(request: Request) -> Manifest | None:
    """The manifest, where this folder holds this very revision already (by size; `--verify` reads it all)."""
    try:
        found = weights.load(request.folder)
    except HearthError:
        return None
    same = found.repo == request.repo and request.revision in (found.revision, found.commit)
    chosen = all(wanted(file.path, request) for file in found.files)
    return found if same and chosen and weights.same_sizes(request.folder, found.files) else None


def _make_room(folder: Path, parts: Path, manifest: Manifest) -> None:
    """Drop parts of other revisions; then NoRoom unless all that is missing fits."""
    mine = {part_of(parts, file).name for file in manifest.files}
    for old in parts.glob("*.part"):
        if old.name not in mine:
            old.unlink(missing_ok=True)
    left = sum(
        file.size - (weights.size_of(part_of(parts, file)) or 0)
        for file in manifest.files
        if weights.size_of(folder / file.path) != file.size
    )
    free = shutil.disk_usage(folder).free
    if left and left + SPARE > free:
        raise NoRoom(
            f"{folder}: {_gib(free)} free, {_gib(left + SPARE)} needed for what is missing",
            "free space, or name a folder on a larger disk with --to",
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _bring(request: Request, manifest: Manifest, parts: Path, watcher: Watcher) -> None:
    """Download and read back; what is damaged (it may have been there before) is fetched once more."""
    folder = request.folder
    asyncio.run(download(request, manifest, parts, watcher))
    wrong = _read_back(folder, manifest, watcher)
    if wrong:
        asyncio.run(download(request, manifest, parts, watcher))
        wrong = _read_back(folder, manifest, watcher)
    if wrong:
        raise damaged(
            folder, wrong, "twice so: the hub or the way to it is broken; damaged files were removed"
        )


def _read_back(folder: Path, manifest: Manifest, watcher: Watcher) -> dict[str, str]:
    """What is wrong, by path; damaged files are removed."""
    watcher.stage("verify", manifest.size)
    wrong = weights.verify(folder, manifest.files, watcher.advance)
    for file in manifest.files:
        if file.path in wrong:
            (folder / file.path).unlink(missing_ok=True)
    return wrong


def damaged(folder: Path, wrong: dict[str, str], hint: str) -> CheckFailed:
    """The error for files that aren't what they should be."""
    first = "; ".join(f"{path} {text}" for path, text in list(wrong.items())[:3])
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return CheckFailed(f"{folder}: {first}{more}", hint)


def token_from(path: Path | None) -> str:
    """The token in a file, else of HF_TOKEN; empty without either. Raises MissingError or ConfigError."""
    if path is None:
        return os.environ.get("HF_TOKEN", "").strip()
    try:
        token = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file", "write the hub's token into it, mode 0600") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    if not token or any(c.isspace() for c in token):
        raise ConfigError(f"{path}: must hold one token and nothing else", "write the hub's token into it")
    return token
