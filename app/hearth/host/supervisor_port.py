"""The supervisor's port, as the launcher asks it: `/livez`, `/readyz`, `/status`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from hearth.host.launch_plan import Look

TIMEOUT = 3.0
_LIMIT = 2 << 20
_LOST = (aiohttp.ClientError, OSError, ValueError, TimeoutError, RecursionError)


class SupervisorPort:
    """Asks a supervisor at one of several addresses: the one that answered last is asked first.

    A container is reached where its port is published, and by its own address in Docker's network, which
    works while Docker Engine is down: the process that serves a published port on loopback dies with it.
    """

    def __init__(self) -> None:
        self._places: list[str] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def at(self, *places: str) -> None:
        """Where to ask from now on (HOST:PORT); what is known already keeps its place."""
        known = [place for place in self._places if place in places]
        self._places = known + [place for place in places if place and place not in known]

    async def look(self) -> Look:
        """What it says now; an empty Look when nobody answers. Takes at most `TIMEOUT` seconds."""
        if not self._places:
            return Look()
        base = f"http://{self._places[0]}"
        livez, readyz, status = await asyncio.gather(
            self._get(f"{base}/livez"), self._get(f"{base}/readyz"), self._get(f"{base}/status")
        )
        if livez is None:
            self._places.append(self._places.pop(0))
        return Look(alive=livez is not None, ready=readyz is not None, document=_document(status))

    async def _get(self, url: str) -> bytes | None:
        """The body of a 200, else None."""
        if self._session is None:
            raise RuntimeError("use SupervisorPort as an async context manager")
        try:
            async with self._session.get(url, allow_redirects=False) as answer:
                body = await answer.content.read(_LIMIT)
                while answer.status == 200 and len(body) < _LIMIT and not answer.content.at_eof():
                    body += await answer.content.read(_LIMIT)
                return body if answer.status == 200 else None
        except _LOST:
            return None


def _document(body: bytes | None) -> Mapping[str, Any] | None:
    try:
        said = None if body is None else json.loads(body)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
