"""The plan that worked, remembered by fingerprint.

One JSON file: schema, checksum, and the plans. It is written atomically, and a file that can't be trusted is
set aside, never deleted: the engine then starts from the wanted plan.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hearth.errors import StateError
from hearth.failure import Failure
from hearth.ladder import GraphPlan

log = logging.getLogger(__name__)

SCHEMA = 1
FILE_NAME = "plans.json"
_KEPT = 32


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
        entries = self._read()
        entries[key] = Remembered(plan, wanted, tuple(failures), time.time())
        newest = sorted(entries.items(), key=lambda item: item[1].saved_at)[-_KEPT:]
        self._write(dict(newest))

    def forget(self) -> list[Remembered]:
        """Forget every step down; returns what was forgotten. Raises StateError when the disk refuses."""
        forgotten = [entry for entry in self._read().values() if entry.plan != entry.wanted]
        if forgotten:
            self._write({k: e for k, e in self._read().items() if e.plan == e.wanted})
        return forgotten

    def all(self) -> dict[str, Remembered]:
        """Everything remembered, by fingerprint."""
        return self._read()

    def _read(self) -> dict[str, Remembered]:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("%s: can't be read (%s): starting from the wanted plan", self.path, error)
            return {}
        try:
            return _decode(raw)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._set_aside(error)
            return {}

    def _set_aside(self, error: Exception) -> None:
        aside = self.path.with_name(f"{FILE_NAME}.unusable-{time.time_ns()}")
        try:
            self.path.replace(aside)
        except OSError as moving:
            log.warning("%s: unusable (%s) and can't be moved aside (%s)", self.path, error, moving)
            return
        log.warning(
            "%s: unusable (%s): set aside as %s; starting from the wanted plan", self.path, error, aside.name
        )

    def _write(self, entries: Mapping[str, Remembered]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace_file(self.path, _encode(entries))
        except OSError as error:
            raise StateError(
                f"{self.path}: can't be written: {error.strerror or error}",
                "check free space and the owner of the directory",
            ) from error


def _replace_file(path: Path, content: bytes) -> None:
    """Write aside, flush, rename, flush the directory: at any moment either the old or the new file is there."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


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
    return GraphPlan(str(value["prefill"]), str(value["decode"]), None if size is None else int(size))
