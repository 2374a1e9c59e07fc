"""Writes the engine's log to our stdout without ever waiting for whoever reads it."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from typing import BinaryIO

FORWARD_BYTES = 8 << 20

logger = logging.getLogger(__name__)


class Forwarder:
    """Writes to a descriptor or binary file in its own thread; what doesn't fit is dropped and counted."""

    def __init__(self, target: BinaryIO | int, limit: int = FORWARD_BYTES) -> None:
        self._file = None if isinstance(target, int) else target
        self._fd = target if isinstance(target, int) else _fileno(target)
        self._limit = limit
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._lost = 0
        self._ending = self._broken = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log-forward", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, block: bytes, lines: int) -> None:
        """Queue a block of so many lines; never waits."""
        with self._changed:
            if self._broken or (self._queued and self._queued + len(block) > self._limit):
                self._lost += lines
                return
            self._own_up()
            self._queue.append(block)
            self._queued += len(block)
            self._changed.notify_all()

    def finish(self, timeout: float) -> bool:
        """Write what is queued and end; False when stdout didn't take it within `timeout` seconds."""
        with self._changed:
            self._own_up()
            self._ending = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _own_up(self) -> None:
        if self._lost:
            note = f"[hearth] {self._lost} log lines not forwarded: stdout is slow\n".encode()
            self._queue.append(note)
            self._queued += len(note)
            self._lost = 0

    def _run(self) -> None:
        while (data := self._next()) is not None:
            try:
                self._write(data)
            except (OSError, ValueError) as error:
                # Nobody reads any more: the engine goes on, its lines are still kept and looked at.
                logger.warning("the log is no longer forwarded to stdout: %s", error)
                self._broken = True
                return

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ending)
            if not self._queue:
                return None
            block = self._queue.popleft()
            self._queued -= len(block)
            return block

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            assert self._file is not None
            self._file.write(data)
            return
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                select.select([], [self._fd], [], 1.0)


def _fileno(file: BinaryIO) -> int | None:
    try:
        return file.fileno()
    except (OSError, ValueError, AttributeError):
        return None
