"""Files that are whole on the disk or not there, whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, content: bytes, prepare: Callable[[int], None] | None = None) -> None:
    """Write aside, flush, rename, flush the folder: at any moment either the old or the new file is there.

    The file is its owner's alone (0600) unless `prepare`, called with its descriptor, changes that. One
    writer at a time. Raises OSError and leaves nothing beside the old file then.
    """
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if prepare is not None:
                prepare(descriptor)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def for_everybody(descriptor: int) -> None:
    """For `write_whole`: everybody may read it."""
    os.fchmod(descriptor, 0o644)


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries: names made, changed or removed in it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
