"""The bytes of a fetch, over plain HTTP ranges.

huggingface_hub from 1.x on throws the part of a file away when a download breaks (read in 2.4.0,
`_download_to_tmp_and_move`), and Xet downloads have hung at the end of large models (xet-core#883).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from pathlib import Path
from typing import Any

import aiohttp

from hearth import weights
from hearth.errors import HearthError, Unreachable
from hearth.fetch_types import Denied, NoRoom, Request, Watcher
from hearth.weights import Manifest, WeightFile

TRIES = 6
"""Attempts in a row without a single byte more."""
_CHUNK = 1 << 20
_BUFFER = 4 << 20
"""Bytes that a connection may be ahead of the disk: with aiohttp's 64 KiB each write is a small one."""
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


wait = asyncio.sleep
"""Between attempts; tests don't wait."""


def part_of(parts: Path, file: WeightFile) -> Path:
    """Where a file grows: by its place and content, since a repository may hold the same content twice."""
    place = hashlib.sha256(file.path.encode()).hexdigest()
    return parts / f"{place[:16]}-{(file.sha256 or file.blob)[:16]}.part"


async def download(request: Request, manifest: Manifest, parts: Path, watcher: Watcher) -> None:
    missing = [f for f in manifest.files if weights.size_of(request.folder / f.path) != f.size]
    watcher.stage("download", manifest.size)
    watcher.advance(manifest.size - sum(file.size for file in missing))
    gate = asyncio.Semaphore(max(1, request.workers))
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=request.silence, sock_read=request.silence)
    async with aiohttp.ClientSession(
        timeout=timeout, trust_env=True, auto_decompress=False, read_bufsize=_BUFFER
    ) as session:
        fetcher = _Fetcher(request, manifest.commit, parts, watcher, session)
        # Raised outside `except*`: Python before 3.11.4 would wrap it in a group again.
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for file in sorted(missing, key=lambda one: -one.size):
                    group.create_task(_in_turn(gate, fetcher, file))
        except* HearthError as errors:
            failed = _first(errors)
        if failed is not None:
            raise failed from None


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _in_turn(gate: asyncio.Semaphore, fetcher: _Fetcher, file: WeightFile) -> None:
    async with gate:
        await fetcher.fetch(file)


class _Fetcher:
    """Downloads single files into parts, and parts into place."""

    def __init__(
        self, request: Request, commit: str, parts: Path, watcher: Watcher, session: aiohttp.ClientSession
    ) -> None:
        self._request, self._commit, self._parts = request, commit, parts
        self._watcher, self._session = watcher, session

    async def fetch(self, file: WeightFile) -> None:
        """Fetch one file, however often the connection breaks, as long as something comes."""
        part = part_of(self._parts, file)
        try:
            part.touch()
            self._watcher.advance(min(part.stat().st_size, file.size))
            await self._persist(file, part)
            target = self._request.folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
        except OSError as error:
            raise _disk_error(error, self._request.folder, file) from error

    async def _persist(self, file: WeightFile, part: Path) -> None:
        tries, reason = 0, ""
        while (have := part.stat().st_size) != file.size:
            if tries >= TRIES:
                raise Unreachable(
                    f"{file.path}: {reason}, {TRIES} times in a row", "run the same command to go on"
                )
            if have > file.size:
                self._drop(part)
                continue
            if tries:
                await wait(min(60.0, 2.0 ** (tries - 1)))
            reason = await self._try(file, part)
            tries = 0 if part.stat().st_size > have else tries + 1

    async def _try(self, file: WeightFile, part: Path) -> str:
        """One connection. Returns why it ended early, or nothing."""
        have = part.stat().st_size
        try:
            async with self._session.get(self._url(file), headers=self._headers(have)) as answer:
                if answer.status in _LATER:
                    return f"the hub answers {answer.status}"
                self._refuse(answer.status, file)
                if answer.status == 200 and have:  # it doesn't do ranges: begin again
                    self._drop(part)
                await self._receive(answer, part)
        except TimeoutError:
            return f"no byte in {self._request.silence:g} s"
        except aiohttp.ClientError as error:
            return f"the connection broke ({type(error).__name__})"
        return "" if part.stat().st_size == file.size else "the answer was cut short"

    async def _receive(self, answer: aiohttp.ClientResponse, part: Path) -> None:
        with part.open("ab") as stream:
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await asyncio.to_thread(stream.write, chunk)
                self._watcher.advance(len(chunk))

    def _drop(self, part: Path) -> None:
        self._watcher.advance(-part.stat().st_size)
        part.write_bytes(b"")

    def _url(self, file: WeightFile) -> str:
        from huggingface_hub import hf_hub_url

        request = self._request
        return hf_hub_url(request.repo, file.path, revision=self._commit, endpoint=request.endpoint)

    def _headers(self, have: int) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity", "User-Agent": "hearth-fetch"}
        if self._request.token:  # aiohttp drops it when the hub redirects to another host
            headers["Authorization"] = f"Bearer {self._request.token}"
        return headers | ({"Range": f"bytes={have}-"} if have else {})

    def _refuse(self, status: int, file: WeightFile) -> None:
        if status in (401, 403):
            raise Denied(
                f"{file.path}: the hub answers {status}", "give --token-file, and accept the model's terms"
            )
        if status not in (200, 206):
            raise Unreachable(f"{file.path}: the hub answers {status}", "run the same command to try again")


def _disk_error(error: OSError, folder: Path, file: WeightFile) -> HearthError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoom(
            f"{folder}: the disk is full ({file.path})", "free space and run the same command to go on"
        )
    return NoRoom(
        f"{folder}: {file.path} can't be written: {error.strerror or error}", "check the disk and rights"
    )
