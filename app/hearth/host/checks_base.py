"""What every host check is made of: what was asked of the host, what it should have, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

GIB = 1 << 30
GPU_NONE = "this host has no GPU by its own configuration (gpu: none)"
_LONGEST = 400


class Status(StrEnum):
    """`warn`: it runs, but slower or more fragile than it should. `skip`: not looked at; `why` says why."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Check:
    """One verdict: what was seen, why that matters, and what to do about it."""

    id: str
    status: Status
    seen: str
    why: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """One entry of `checks` in `hearth doctor --json`."""
        return {
            "id": self.id,
            "status": self.status.value,
            "seen": self.seen,
            "why": self.why,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Output:
    """What one probe gave: stdout and stderr together, and the exit status; or why there is nothing."""

    text: str = ""
    code: int = 0
    problem: str = ""
    """Empty, or one of: not installed, no such file, not allowed, no answer in N s."""

    @property
    def there(self) -> bool:
        """Whether there is something to judge."""
        return not self.problem


Facts = Mapping[str, Output]
"""Outputs by probe name (see hearth.host.probes)."""
NOTHING = Output(problem="not asked")


@dataclass(frozen=True)
class Room:
    """Free bytes that a path needs, and what for."""

    path: str
    free: int
    purpose: str


def _default_rooms() -> tuple[Room, ...]:
    """GLM-5-NVFP4 takes about 440 GB; an image about 25 GB, twice while it is replaced."""
    return (
        Room("/var/lib/hearth/models", 600 * GIB, "weights"),
        Room("/var/lib/docker", 80 * GIB, "images"),
        Room("/var/cache/hearth", 40 * GIB, "compiled kernels"),
    )


@dataclass(frozen=True)
class Wanted:
    """What the host should have. The defaults are those of GLM-5-NVFP4 on 8x RTX PRO 6000 Blackwell."""

    gpus: int = 8
    """How many; 0 means a host without GPUs: everything about them is skipped."""
    gpu_name: str = "RTX PRO 6000"
    """Part of the name that every GPU must have; empty for any."""
    driver_min: str = "580.65.06"
    """Oldest driver of CUDA 13.0 (CUDA release notes, table of driver versions)."""
    open_modules: bool = True
    """Blackwell has no proprietary kernel module."""
    link_gen: int = 5
    link_width: int = 16
    power_limit: float | None = None
    """Watts that every GPU should be capped to; None: the card's own default."""
    shm: int = 8 * GIB
    rooms: Sequence[Room] = field(default_factory=_default_rooms)


def passed(name: str, seen: str, why: str = "") -> Check:
    """A verdict of ok."""
    return Check(name, Status.OK, short(seen), why)


def warned(name: str, seen: str, why: str, fix: str) -> Check:
    """A verdict of warn."""
    return Check(name, Status.WARN, short(seen), why, fix)


def failed(name: str, seen: str, why: str, fix: str) -> Check:
    """A verdict of fail."""
    return Check(name, Status.FAIL, short(seen), why, fix)


def skipped(name: str, why: str, fix: str = "") -> Check:
    """Not looked at, and why."""
    return Check(name, Status.SKIP, "", why, fix)


def short(text: str) -> str:
    """Text from outside, on one line of bearable length and without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _LONGEST]).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def listed(items: Iterable[object], most: int = 8) -> str:
    """`a, b, c` with the rest counted."""
    words = [str(item) for item in items]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def version_key(text: str) -> tuple[int, ...]:
    """`580.65.06` as (580, 65, 6); numbers of absurd length count as 0."""
    return tuple(
        int(part) if part.isascii() and part.isdigit() and len(part) < 9 else 0 for part in text.split(".")
    )
