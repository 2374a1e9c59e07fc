"""Follows the kernel log for Xid errors, from now on.

A container usually may not read /dev/kmsg: it isn't there, or `kernel.dmesg_restrict` asks for CAP_SYSLOG.
Then there is nothing to follow, `start` says why, and NVML is the only witness.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hearth.host.xid import Xid, parse

log = logging.getLogger(__name__)

PATH = Path("/dev/kmsg")
_RECORD = 8192
"""The kernel gives one record a read and refuses a smaller buffer (Documentation/ABI/testing/dev-kmsg)."""
_MOST_AT_ONCE = 200
"""Records in one turn of the loop: a flood must not stop everything else."""


def message(record: str) -> str:
    """The text of a record `6,339,5140900,-;text`; the lines below it (` KEY=value`) are left out."""
    first = record.partition("\n")[0]
    prefix, mark, text = first.partition(";")
    return text if mark and prefix[:1].isdigit() and "," in prefix else first


class KernelLog:
    """Calls `on_xid` on the event loop for each Xid that the driver reports."""

    def __init__(self, on_xid: Callable[[Xid], None], path: Path | None = None) -> None:
        self._on_xid, self._path = on_xid, PATH if path is None else path
        self._fd: int | None = None

    def start(self) -> str:
        """Begin at the log's end. Returns why that can't be done, or nothing."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a pipe has no end to seek to
                os.lseek(self._fd, 0, os.SEEK_END)
            asyncio.get_running_loop().add_reader(self._fd, self._read)
        except OSError as error:
            self.close()
            return f"{self._path}: {os.strerror(error.errno or errno.EIO)}"
        return ""

    def close(self) -> None:
        """Stop following; may be called twice."""
        if self._fd is None:
            return
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # the loop may be gone by now
            asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._fd = None

    def _read(self) -> None:
        for record in self._records():
            found = parse(message(record))
            if found is not None:
                self._on_xid(found)

    def _records(self) -> Iterator[str]:
        for _ in range(_MOST_AT_ONCE):
            try:
                data = os.read(self._fd if self._fd is not None else -1, _RECORD)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten before it was read: the next one follows
                    continue
                log.warning("The kernel log can't be followed any more: %s", error.strerror)
                self.close()
                return
            if not data:
                self.close()
                return
            yield from data.decode(errors="replace").splitlines()
