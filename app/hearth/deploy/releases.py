"""The releases that a host keeps: a folder each, and two symlinks, `current` and `previous`.

    releases/20261129T215500Z-3fa91c/release.json, hearth.yaml, outcome.json
    releases/current -> 20261129T215500Z-3fa91c

A folder appears whole (written aside, synced, renamed) and a link moves by rename: a crash at any moment
leaves the old or the new state. `outcome.json` says how the last activation of a release ended; a release
without a good one was never proven to serve.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hearth.deploy.release import (
    CONFIG_FILE,
    ID,
    RELEASE_FILE,
    ConfigRef,
    Draft,
    Release,
    parse,
    sha256,
)
from hearth.errors import ConfigError, ExitCode, HearthError, MissingError, StateError
from hearth.files import for_everybody, sync_folder, write_whole
from hearth.yamltext import read

ROOT = Path("/var/lib/hearth/releases")
CURRENT, PREVIOUS = "current", "previous"
OUTCOME_FILE = "outcome.json"
_LOCK = ".lock"
_ASIDE = ".new-"


class Busy(HearthError):
    """Somebody else changes the releases right now."""

    code = ExitCode.RETRY


class NotAllowed(HearthError):
    """The system refuses this to this user."""

    code = ExitCode.PERMISSION


@dataclass(frozen=True)
class Outcome:
    """How the last activation of a release ended."""

    at: float
    """Unix seconds."""
    ok: bool
    reason: str = ""
    """Why not; empty when `ok`."""
    downtime_s: float | None = None
    """Seconds between the last good answer before and the first one after; None where it wasn't measured."""


@dataclass(frozen=True)
class Kept:
    """One folder: its release, or what is wrong with it; how its last activation ended."""

    id: str
    release: Release | None
    problem: str = ""
    outcome: Outcome | None = None

    @property
    def proven(self) -> bool:
        """Whether it was active and passed its smoke test."""
        return self.outcome is not None and self.outcome.ok


class Store:
    """The folder of releases on this host."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root

    def folder(self, release_id: str) -> Path:
        """Where a release lies. Raises MissingError when there is none of that id."""
        folder = self.root / release_id
        if not ID.fullmatch(release_id) or not folder.is_dir():
            known = ", ".join(self.ids()[-5:]) or "none yet"
            raise MissingError(f"{release_id!r}: no such release here", f"there are: {known}")
        return folder

    def ids(self) -> list[str]:
        """Every release, oldest first."""
        try:
            return sorted(path.name for path in self.root.iterdir() if ID.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except PermissionError:
            raise NotAllowed(f"{self.root}: not allowed", "run it as root (sudo)") from None

    def read(self, release_id: str) -> Release:
        """A release whose files are whole. Raises MissingError or ConfigError."""
        return load(self.folder(release_id))

    def kept(self, release_id: str) -> Kept:
        """A release however it is. Raises MissingError."""
        folder = self.folder(release_id)
        outcome = _outcome(folder / OUTCOME_FILE)
        try:
            return Kept(release_id, load(folder), outcome=outcome)
        except HearthError as error:
            return Kept(release_id, None, str(error), outcome)

    def pointed(self, link: str) -> str | None:
        """The id that `current` or `previous` points to, if that release is there."""
        try:
            name = (self.root / link).readlink().name
        except OSError:
            return None
        return name if ID.fullmatch(name) and (self.root / name).is_dir() else None

    def add(self, draft: Draft, config: str) -> tuple[Release, bool]:
        """Keep a new release; whether one was made (not when the current one is just the same).

        Raises StateError when the disk refuses.
        """
        current = self.pointed(CURRENT)
        made = time.gmtime()
        new = Release(
            **draft.model_dump(),
            id=f"{time.strftime('%Y%m%dT%H%M%SZ', made)}-{secrets.token_hex(3)}",
            made_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", made),
            config=ConfigRef(file=CONFIG_FILE, sha256=sha256(config)),
            previous=current,
        )
        running = self.kept(current).release if current else None
        if running is not None and running.content == new.content:
            return running, False
        with _disk(self.root):
            self._write(new, config)
        return new, True

    def _write(self, release: Release, config: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        for left in self.root.glob(f"{_ASIDE}*"):
            shutil.rmtree(left, ignore_errors=True)
        aside = self.root / f"{_ASIDE}{release.id}"
        aside.mkdir(mode=0o755)
        aside.chmod(0o755)
        write_whole(aside / CONFIG_FILE, config.encode(), for_everybody)
        write_whole(aside / RELEASE_FILE, release.to_json().encode(), for_everybody)
        aside.rename(self.root / release.id)
        sync_folder(self.root)

    def point(self, link: str, release_id: str | None) -> None:
        """Move `current` or `previous`, in one step; None removes it. Raises StateError."""
        with _disk(self.root):
            if release_id is None:
                (self.root / link).unlink(missing_ok=True)
            else:
                aside = self.root / f"{_ASIDE}{link}"
                aside.unlink(missing_ok=True)
                aside.symlink_to(release_id)
                aside.rename(self.root / link)
            sync_folder(self.root)

    def note(self, release_id: str, outcome: Outcome | None) -> None:
        """Keep how an activation ended; None while one runs. Raises StateError."""
        path = self.folder(release_id) / OUTCOME_FILE
        with _disk(path):
            if outcome is None:
                path.unlink(missing_ok=True)
            else:
                write_whole(path, (json.dumps(asdict(outcome)) + "\n").encode(), for_everybody)
            sync_folder(path.parent)

    def remove(self, release_id: str) -> None:
        """Delete a release. Raises StateError, also for the current and the previous one."""
        if release_id in (self.pointed(CURRENT), self.pointed(PREVIOUS)):
            raise StateError(f"{release_id}: is in use: it stays")
        folder = self.folder(release_id)
        with _disk(folder):
            aside = self.root / f"{_ASIDE}{release_id}"
            folder.rename(aside)
            shutil.rmtree(aside)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one change at a time. Raises Busy or StateError."""
        with _disk(self.root):
            self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
            handle = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _take(handle, self.root)
            yield
        finally:
            os.close(handle)


def load(folder: Path) -> Release:
    """A release's `release.json`, held against its config's checksum. Raises MissingError or ConfigError."""
    folder = folder.resolve()
    path = folder / RELEASE_FILE
    if not path.is_file():
        raise MissingError(f"{path}: no such file", "deploy first, or name a folder that holds a release")
    release = parse(read(path), str(path), Release)
    config = folder / release.config.file
    if not config.is_file():
        raise MissingError(f"{config}: no such file", "the release is damaged: deploy again")
    if sha256(read(config)) != release.config.sha256:
        raise ConfigError(
            f"{config}: was changed after the release was made", "change your own file and deploy it again"
        )
    return release


def prunable(ids: list[str], keep: int, in_use: set[str]) -> list[str]:
    """Which releases may go so that the newest `keep` stay, and those in use whatever their age (pure)."""
    newest = sorted(ids)[-keep:] if keep > 0 else []
    return [each for each in sorted(ids) if each not in newest and each not in in_use]


def _take(handle: int, root: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 100).decode("utf-8", "replace").strip()
        who = f" ({holder})" if holder else ""
        raise Busy(f"{root}: another `hearth release` is at work{who}", "wait for it, then repeat") from None
    os.truncate(handle, 0)
    os.write(handle, f"pid {os.getpid()} since {time.strftime('%H:%M:%S UTC', time.gmtime())}".encode())


def _outcome(path: Path) -> Outcome | None:
    """None also for a file that can't be trusted: the release then counts as not proven."""
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Outcome(float(said["at"]), said["ok"] is True, str(said["reason"]), said["downtime_s"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """The system's refusals, as errors with a fix."""
    try:
        yield
    except PermissionError as error:
        raise NotAllowed(f"{error.filename or path}: not allowed", "run it as root (sudo)") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise StateError(f"{error.filename or path}: {why}", "free the disk, or repair it") from error
