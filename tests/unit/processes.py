"""What tests ask of processes they don't own."""

from __future__ import annotations

import psutil

from hearth.session import ENDED


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and waits for its parent, or is just being reaped, doesn't."""
    try:
        return psutil.Process(pid).status() not in ENDED
    except psutil.NoSuchProcess:
        return False
