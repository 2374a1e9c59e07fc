"""Work that may hang (a sick disk, a sick GPU), done where it can hold up neither the loop nor the end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], seconds: float) -> T:
    """The result of `work`, done in a daemon thread: a program waits for asyncio's own threads at its end.

    Raises TimeoutError after `seconds` (the thread goes on), or what `work` raises.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            _tell(loop, answer.set_exception, error, answer)
        else:
            _tell(loop, answer.set_result, value, answer)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await asyncio.wait_for(answer, seconds)


def _tell(
    loop: asyncio.AbstractEventLoop, settle: Callable[[T], None], value: T, answer: asyncio.Future[Any]
) -> None:
    def deliver() -> None:
        if not answer.done():
            settle(value)

    with contextlib.suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(deliver)
