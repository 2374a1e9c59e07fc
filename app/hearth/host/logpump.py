"""A container's output, copied to our own: what systemd hands on to the journal."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from hearth.host.dockerd import EngineError

log = logging.getLogger(__name__)

Follow = Callable[[float | None], Iterator[bytes]]
"""Output from a time (Unix seconds; None: all of it) on, until the container ends or the connection does."""
_AGAIN = 1.0


class LogPump:
    """A thread that copies until the container ends, over restarts of Docker Engine.

    `ended` is set each time the stream ends: a hint to look at the container at once.
    """

    def __init__(self, follow: Follow, loop: asyncio.AbstractEventLoop, out: BinaryIO | None = None) -> None:
        self._follow, self._loop = follow, loop
        self._out = out or sys.stdout.buffer
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="container log", daemon=True)
        self.ended = asyncio.Event()

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    async def close(self, patience: float) -> None:
        """The container has ended: give its last words up to `patience` seconds to arrive."""
        self._closed.set()
        await asyncio.to_thread(self._thread.join, patience)

    def _copy(self) -> None:
        since: float | None = None
        while True:
            try:
                for chunk in self._follow(since):
                    self._out.write(chunk)
                    self._out.flush()
                    since = time.time()
            except EngineError as error:
                log.debug("the container's log stops: %s", error)
            except (OSError, ValueError) as error:  # our own output is closed
                log.warning("the container's log can't be written: %s", error)
                return
            self._hint()
            if self._closed.wait(_AGAIN):
                return

    def _hint(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.ended.set)
