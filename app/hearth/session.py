"""The processes of a Unix session: what a started program leaves behind, whichever groups it made."""

from __future__ import annotations

import contextlib
import os

import psutil

ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
"""States of a process that runs no more and only waits to be reaped."""


def session_members(session: int) -> list[psutil.Process]:
    """The living processes of the session that the process `session` leads or led."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() not in ENDED:
                found.append(process)
    return found
