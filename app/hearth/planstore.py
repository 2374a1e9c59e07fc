"""The plan that worked, remembered by fingerprint.

One JSON file: schema, checksum, and the plans. It is written atomically, and a file that can't be trusted is
set aside, never deleted: the engine then starts from the wanted plan. Writers take turns by a lock (`flock`
on the directory), which also makes the one temporary file theirs: what a kill leaves, the next write removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hearth.errors import StateError
from hearth.failure import Failure
from hearth.files import write_whole
from hearth.ladder import GraphPlan

log = logging.getLogger(__name__)

SCHEMA = 1
FILE_NAME = "plans.json"
MAX_BYTES = 4 << 20
"""A larger file isn't ours. 32 plans with all their failures stay far below."""
_KEPT = 32
_FAILURES_KEPT, _EVIDENCE_KEPT, _LINE_KEPT = 16, 10, 300
_LOCK_WAIT = 3.0
_UNTRUSTED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Remembered:
    """A plan that reached READY, the wanted plan it stands in for, and the failures that led to it."""

    plan: GraphPlan
    wanted: GraphPlan
    failures: tuple[Failure, ...] = ()
    saved_at: float = 0.0
    """Unix seconds."""


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A short name for everything that must be equal for a remembered plan to hold.

    `facts`: image digest, engine version, model and revision, engine args, GPU type and count, driver.
    """
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


class PlanStore:
    """Remembered plans in `directory`/plans.json."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME

    def recall(self, key: str, wanted: GraphPlan) -> Remembered | None:
        """The remembered plan for a fingerprint, if it was made for the same wanted plan."""
        entry = self._read().get(key)
        return entry if entry is not None and entry.wanted == wanted else None

    def remember(
        self, key: str, plan: GraphPlan, wanted: GraphPlan, failures: Sequence[Failure] = ()
    ) -> None:
        """Save the plan that works. Raises StateError when the disk refuses."""
        entry = Remembered(plan, wanted, tuple(_short(f) for f in failures[-_FAILURES_KEPT:]), time.time())

        def add(entries: dict[str, Remembered]) -> dict[str, Remembered]:
            entries.pop(key, None)  # newest last: the order counts, not the clock, which may go back
            return dict([*entries.items(), (key, entry)][-_KEPT:])

        self._update(add)

    def forget(self) -> list[Remembered]:
        """Forget every step down; returns what was forgotten. Raises StateError when the disk refuses."""
        if not any(entry.plan != entry.wanted for entry in self._read().values()):
            return []
        forgotten: list[Remembered] = []

        def keep(entries: dict[str, Remembered]) -> dict[str, Remembered]:
            forgotten.extend(entry for entry in entries.values() if entry.plan != entry.wanted)
            return {key: entry for key, entry in entries.items() if entry.plan == entry.wanted}

        self._update(keep)
        return forgotten

    def all(self) -> dict[str, Remembered]:
        """Everything remembered, by fingerprint."""
        return self._read()

    def _read(self) -> dict[str, Remembered]:
        """What the file holds; never fails."""
        try:
            return _decode(_read_file(self.path))
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("%s: can't be read (%s): starting from the wanted plan", self.path, error)
            return {}
        except _UNTRUSTED as doubt:
            return self._read_again(doubt)

    def _read_again(self, doubt: Exception) -> dict[str, Remembered]:
        """Before a file is set aside: a writer may just have replaced it."""
        try:
            with _locked(self.path.parent):
                return self._read_to_replace()
        except OSError as error:
            log.warning("%s: unusable (%s) and can't be moved aside (%s)", self.path, doubt, error)
            return {}

    def _read_to_replace(self) -> dict[str, Remembered]:
        """What the file holds, under the lock; a file that can't be read leaves the place. Raises OSError."""
        try:
            return _decode(_read_file(self.path))
        except FileNotFoundError:
            return {}
        except (OSError, *_UNTRUSTED) as error:
            self._set_aside(error)
            return {}

    def _set_aside(self, error: Exception) -> None:
        number = time.time_ns()
        while (aside := self.path.with_name(f"{FILE_NAME}.unusable-{number}")).exists():
            number += 1
        self.path.replace(aside)
        text = str(error)[:200]
        log.warning(
            "%s: unusable (%s): set aside as %s; starting from the wanted plan", self.path, text, aside.name
        )

    def _update(self, change: Callable[[dict[str, Remembered]], dict[str, Remembered]]) -> None:
        """Read, change and write under the lock."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.parent):
                entries = change(self._read_to_replace())
                path = Path(os.path.realpath(self.path))
                write_whole(path, _encode(entries), lambda file: _like(path, file))
        except OSError as error:
            raise StateError(
                f"{self.path}: can't be written: {error.strerror or error}",
                "check free space and the owner of the directory",
            ) from error


def _short(failure: Failure) -> Failure:
    """A failure small enough to keep: log lines may have any length."""
    evidence = tuple(line[:_LINE_KEPT] for line in failure.evidence[:_EVIDENCE_KEPT])
    return replace(failure, evidence=evidence, hint=failure.hint[:_LINE_KEPT])


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the writers' lock, waiting a little for another writer. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor, time.monotonic() + _LOCK_WAIT)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise OSError(error.errno, "another process holds its lock") from error
            time.sleep(0.005)


def _read_file(path: Path) -> bytes:
    """The content of a regular file of sensible size; ValueError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor: a pipe in its place must not block)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError("far too large")
    return raw


def _like(path: Path, descriptor: int) -> None:
    """Give a new file the owner and mode of the one at `path`."""
    try:
        old = path.stat()
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & 0o777)
        os.fchown(descriptor, old.st_uid, old.st_gid)
    except (FileNotFoundError, PermissionError):
        return


def _checksum(plans: Any) -> str:
    return hashlib.sha256(json.dumps(plans, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _encode(entries: Mapping[str, Remembered]) -> bytes:
    plans = {
        key: {
            "plan": entry.plan.to_json(),
            "wanted": entry.wanted.to_json(),
            "failures": [failure.to_json() for failure in entry.failures],
            "saved_at": entry.saved_at,
        }
        for key, entry in entries.items()
    }
    document = {"schema": SCHEMA, "sha256": _checksum(plans), "plans": plans}
    return (json.dumps(document, indent=2) + "\n").encode()


def _decode(raw: bytes) -> dict[str, Remembered]:
    document = json.loads(raw)
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}; this Hearth writes {SCHEMA}")
    plans = document["plans"]
    if document["sha256"] != _checksum(plans):
        raise ValueError("checksum does not match")
    return {key: _entry(value) for key, value in plans.items()}


def _entry(value: Mapping[str, Any]) -> Remembered:
    return Remembered(
        plan=_plan(value["plan"]),
        wanted=_plan(value["wanted"]),
        failures=tuple(Failure.from_json(failure) for failure in value["failures"]),
        saved_at=float(value["saved_at"]),
    )


def _plan(value: Mapping[str, Any]) -> GraphPlan:
    size = value["decode_max_bs"]
    if size is not None and int(size) < 1:
        raise ValueError(f"decode_max_bs {size!r}")
    return GraphPlan(str(value["prefill"]), str(value["decode"]), None if size is None else int(size))
