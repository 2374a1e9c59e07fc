"""How long clients got no good answer: measured by asking all the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

PACE = 0.5
"""Seconds between two questions."""
Ask = Callable[[], Awaitable[bool]]


class Meter:
    """From the last good answer before the first bad one to the first good one after the last bad one."""

    def __init__(self) -> None:
        self._good: float | None = None  # the last one before it went down
        self._newest: float | None = None
        self._down = False
        self._back: float | None = None

    def begin(self) -> None:
        """The change begins now: what failed before has nothing to do with it."""
        self._good, self._down, self._back = self._newest, False, None

    def saw(self, at: float, good: bool) -> None:
        """An answer, or none, at `at` (seconds of a clock that only goes forward)."""
        if not good:
            self._down, self._back = True, None
            return
        self._newest = at
        if not self._down:
            self._good = at
        elif self._back is None:
            self._back = at

    @property
    def up_before(self) -> bool:
        """Whether any good answer was seen before it went down."""
        return self._good is not None

    @property
    def seconds(self) -> float | None:
        """The downtime; None where nothing answered before, or nothing has answered since."""
        if self._good is None:
            return None
        if not self._down:
            return 0.0
        return None if self._back is None else self._back - self._good


class Watch:
    """Asks every `PACE` seconds while the context lasts; `meter` has what it saw."""

    def __init__(self, ask: Ask) -> None:
        self.meter = Meter()
        self._ask = ask
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        await self._asked.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def until_back(self, patience: float) -> float | None:
        """The downtime, waiting at most `patience` seconds for the first good answer."""
        ends = time.monotonic() + patience
        while self.meter.seconds is None and self.meter.up_before and time.monotonic() < ends:
            await asyncio.sleep(PACE)
        return self.meter.seconds

    async def _watch(self) -> None:
        while True:
            good = await self._ask()
            self.meter.saw(time.monotonic(), good)
            self._asked.set()
            await asyncio.sleep(PACE)
