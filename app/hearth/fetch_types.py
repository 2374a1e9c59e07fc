"""What a fetch is asked for, what can go wrong with it, and who is told how it goes."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hearth.errors import ExitCode, HearthError

PARTS = ".hearth-fetch"
"""Folder of parts and of the lock, inside the weights' folder."""
EXCLUDE = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", ".gitattributes")
"""Other formats of the same weights, which the engine doesn't read."""
SILENCE = 60.0
"""Seconds without a byte before a connection is given up and begun again where it was."""


class NoRoom(HearthError):
    """The disk is full, or would be."""

    code = ExitCode.DISK


class Denied(HearthError):
    """The hub wants a token, or the token isn't allowed."""

    code = ExitCode.PERMISSION


class Busy(HearthError):
    """Somebody else fetches into this folder."""

    code = ExitCode.RETRY


class Watcher(Protocol):
    """Who is told how it goes."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins: `download` or `verify`, with its bytes."""

    def advance(self, size: int) -> None:
        """So many bytes more (or fewer, when a part had to be dropped)."""


class Quiet:
    """Tells nobody."""

    def stage(self, name: str, total: int) -> None:
        """Nothing."""

    def advance(self, size: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Request:
    """What to fetch, and where to."""

    repo: str
    folder: Path
    revision: str = "main"
    token: str = field(default="", repr=False)
    endpoint: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = EXCLUDE
    workers: int = 4
    silence: float = SILENCE


def wanted(path: str, request: Request) -> bool:
    """Whether a file is to be fetched."""
    if request.include:
        return any(fnmatch.fnmatch(path, pattern) for pattern in request.include)
    return not any(fnmatch.fnmatch(path, pattern) for pattern in request.exclude)
