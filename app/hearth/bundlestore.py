"""Failure bundles on disk: one folder each, named `<UTC time>-<kind>`, so that names sort by time.

A bundle is written aside and renamed. Old ones go by count and by size. Folders and files whose names Hearth
didn't make are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hearth.bundle import FAILURE_FILE
from hearth.errors import StateError
from hearth.failure import Failure

FOLDER = "failures"
MAX_FILE_BYTES = 32 << 20
"""A larger file isn't ours."""
_NAME = re.compile(r"\d{8}T\d{6}\.\d{3}Z-[a-z_]+")
_ASIDE = ".writing-"
_STALE_SECONDS = 600.0
_UNTRUSTED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Bundle:
    """One bundle as it is listed; `problem` says why it can't be read, and is empty where it can."""

    name: str
    path: Path
    document: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


class BundleStore:
    """The bundles in `folder`: at most `keep` of them, and `max_bytes` in all."""

    def __init__(self, folder: Path, keep: int, max_bytes: int) -> None:
        self.folder = folder
        self._keep, self._max_bytes = keep, max_bytes

    def write(self, at: float, kind: str, files: Mapping[str, str]) -> Path:
        """Keep a bundle and prune older ones; the new folder. Raises StateError when the disk refuses."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self.prune(*self.names()[-1:])  # before, too: limits that were lowered make room on a full disk
            aside = self.folder / f"{_ASIDE}{os.getpid()}-{time.monotonic_ns()}"
            try:
                _fill(aside, files)
                path = self._settle(aside, at, kind)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
        except OSError as error:
            raise StateError(
                f"{self.folder}: a failure bundle can't be written: {error.strerror or error}",
                "check free space and the owner of the folder",
            ) from error
        self.prune(path.name)
        return path

    def prune(self, newest: str = "") -> list[str]:
        """Remove the oldest bundles beyond count and size, never `newest`; the names of what went."""
        names = [name for name in self.names() if name != newest]
        sizes = {name: _size(self.folder / name) for name in [*names, newest] if name}
        count, total = len(sizes), sum(sizes.values())
        gone = []
        for name in names:
            if count <= self._keep and total <= self._max_bytes:
                break
            shutil.rmtree(self.folder / name, ignore_errors=True)
            if not (self.folder / name).exists():
                count, total = count - 1, total - sizes[name]
                gone.append(name)
        return gone

    def names(self) -> list[str]:
        """Names of the bundles, oldest first; none where there is no folder. Raises StateError."""
        return bundle_names(self.folder)

    def _sweep(self) -> None:
        """Remove what writers that were killed have left."""
        for left in self.folder.glob(f"{_ASIDE}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(left)

    def _settle(self, aside: Path, at: float, kind: str) -> Path:
        """Give a written folder its name: the next millisecond whose name is free."""
        moment = int(at * 1000)
        taken = {name.partition("-")[0] for name in self.names()}
        while True:
            path = self.folder / f"{_stamp(moment)}-{kind}"
            moment += 1
            if _stamp(moment - 1) in taken:
                continue
            try:
                aside.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                return path


def bundle_names(folder: Path) -> list[str]:
    """Names of the bundles in a folder, oldest first; none where there is no folder. Raises StateError."""
    try:
        found = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateError(f"{folder}: can't be read: {error.strerror}", "run as the user of hearth") from error
    return sorted(name for name in found if _NAME.fullmatch(name))


def read_bundle(path: Path) -> Bundle:
    """A bundle's failure.json; never fails: one that can't be read has a `problem`."""
    try:
        document = json.loads(read_text(path / FAILURE_FILE))
        Failure.from_json(document)
        for key, kind in (("at", (int, float)), ("sentence", str), ("done", str), ("action", str)):
            if not isinstance(document[key], kind):
                raise ValueError(f"{key}: {document[key]!r}")
    except OSError as error:
        return Bundle(path.name, path, problem=f"{FAILURE_FILE}: {error.strerror or error}")
    except _UNTRUSTED as error:
        what = f"{type(error).__name__}: {error}"[:160]
        return Bundle(path.name, path, problem=f"{FAILURE_FILE}: not what Hearth writes ({what})")
    return Bundle(path.name, path, document)


def read_text(path: Path) -> str:
    """A regular file of sensible size as text; any bytes will do. Raises OSError, or ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError("far too large")
    return raw.decode("utf-8", "replace")


def _fill(folder: Path, files: Mapping[str, str]) -> None:
    """Only the owner may look: a log can hold what no rule knows as a secret."""
    folder.mkdir(mode=0o700)
    for name, text in files.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
            file.flush()
            os.fsync(file.fileno())


def _stamp(milliseconds: int) -> str:
    moment = datetime.fromtimestamp(milliseconds // 1000, UTC)
    return f"{moment:%Y%m%dT%H%M%S}.{milliseconds % 1000:03d}Z"


def _size(folder: Path) -> int:
    return sum(_file_sizes(folder))


def _file_sizes(folder: Path) -> Iterator[int]:
    """Bytes that each file takes on the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield (Path(root) / name).lstat().st_blocks * 512
