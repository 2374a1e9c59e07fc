"""Asking the engine, over HTTP: its metrics, its resolved arguments, and a request with a known answer.

SGLang's `/health` is left alone: it lies both ways and a probe that piles up can hurt the server.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from hearth.engine.samples import EngineSamples, parse_samples


@dataclass(frozen=True)
class CanaryResult:
    """How the canary ended: `ok`; `wrong` (an answer, but not the right one), `error` or `timeout`."""

    verdict: str
    seconds: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"


MAX_METRICS, MAX_INFO, MAX_ANSWER = 8 << 20, 4 << 20, 1 << 20
"""Bytes of an answer that are read; a real page of metrics has under 1 MB."""
_UNREADABLE = (aiohttp.ClientError, OSError, ValueError, LookupError, RecursionError, TimeoutError)
_TEXT_JUDGED = 4000


class _TooLarge(ValueError):
    """An answer beyond its limit."""


class Probe:
    """A client of one engine. Every call is bounded in time and memory; None says that nobody answers."""

    def __init__(self, base_url: str, api_key: str = "", admin_api_key: str = "") -> None:
        self._base = base_url.rstrip("/")
        self._headers = _bearer(api_key)
        self._admin = _bearer(admin_api_key) or self._headers
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A new connection for each call: an idle one may be closed by the engine at the moment it is used
        # (uvicorn's keep-alive is 5 s), or lead to the engine before this one.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def samples(self, timeout: float = 5.0) -> EngineSamples | None:
        """The engine's metrics, or None."""
        accept = {"Accept": "text/plain; version=0.0.4"}
        body = await self._get("/metrics", timeout, MAX_METRICS, {**self._headers, **accept})
        return None if body is None else parse_samples(body.decode("utf-8", "replace"))

    async def server_info(self, timeout: float = 10.0) -> Mapping[str, Any]:
        """The engine's resolved arguments; empty where it can't say. The old path serves SGLang <= 0.5.9.

        SGLang wants the API key here (utils/auth.py, level "normal"); the admin key is only tried after it.
        """
        end = time.monotonic() + timeout
        keys = [self._headers] if self._admin == self._headers else [self._headers, self._admin]
        for headers in keys:
            for path in ("/server_info", "/get_server_info"):
                answer = await self._get_json(path, max(0.0, end - time.monotonic()), headers)
                if answer is not None:
                    return answer
        return {}

    async def canary(
        self, model: str, prompt: str, expect: str | None, max_tokens: int, timeout: float
    ) -> CanaryResult:
        """Complete `prompt` at temperature 0 and hold the text against the regular expression `expect`."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": False}
        begun = time.monotonic()
        try:
            status, text = await self._post("/v1/completions", body, timeout)
        except TimeoutError:
            return CanaryResult("timeout", time.monotonic() - begun, f"no answer in {timeout:g} s")
        except _UNREADABLE as error:
            detail = f"{type(error).__name__}: {error}"[:300]
            return CanaryResult("error", time.monotonic() - begun, detail)
        verdict, detail = judge(status, text, expect)
        return CanaryResult(verdict, time.monotonic() - begun, detail)

    async def _post(self, path: str, body: Mapping[str, Any], timeout: float) -> tuple[int, str]:
        async with asyncio.timeout(timeout):
            status, raw = await self._ask("POST", path, MAX_ANSWER, self._headers, body)
        return status, _completion(raw) if status == 200 else raw[:500].decode("utf-8", "replace")

    async def _get(self, path: str, timeout: float, limit: int, headers: Mapping[str, str]) -> bytes | None:
        """The body of a 200, or None for everything else."""
        try:
            async with asyncio.timeout(timeout):
                status, raw = await self._ask("GET", path, limit, headers)
        except _UNREADABLE:
            return None
        return raw if status == 200 else None

    async def _get_json(
        self, path: str, timeout: float, headers: Mapping[str, str]
    ) -> Mapping[str, Any] | None:
        raw = await self._get(path, timeout, MAX_INFO, headers)
        try:
            answer = None if raw is None else json.loads(raw)
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, Mapping) else None

    async def _ask(
        self, method: str, path: str, limit: int, headers: Mapping[str, str], body: object = None
    ) -> tuple[int, bytes]:
        """Status and body. Raises what aiohttp raises, and _TooLarge beyond `limit` bytes."""
        if self._session is None:
            raise RuntimeError("use Probe as an async context manager")
        request = self._session.request(
            method, self._base + path, json=body, headers=headers, allow_redirects=False
        )
        async with request as response:
            raw = bytearray()
            async for chunk in response.content.iter_any():
                raw += chunk
                if len(raw) > limit:
                    raise _TooLarge(f"an answer of more than {limit} bytes")
            return response.status, bytes(raw)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _completion(raw: bytes) -> str:
    """The text of a completion. Raises ValueError for what is none."""
    answer = json.loads(raw)
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    text = first.get("text") if isinstance(first, Mapping) else None
    if not isinstance(text, str):
        raise ValueError("HTTP 200, but no completion in the answer")
    return text


def judge(status: int, text: str, expect: str | None) -> tuple[str, str]:
    """Verdict (`ok`, `wrong`, `error`) and detail for an answer to the canary."""
    if status != 200:
        return "error", f"HTTP {status}: {text[:200]}"
    if not text:
        return "wrong", "an empty answer"
    if expect is not None and re.search(expect, text[:_TEXT_JUDGED]) is None:
        return "wrong", f"answered {text[:200]!r}, expected {expect!r}"
    return "ok", text[:200]
