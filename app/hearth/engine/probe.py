"""Asking the engine, over HTTP: its metrics, its resolved arguments, and a request with a known answer.

SGLang's `/health` is left alone: it lies both ways and a probe that piles up can hurt the server.
"""

from __future__ import annotations

import asyncio
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


class Probe:
    """A client of one engine. Every call has its own time limit and says None where nobody answers."""

    def __init__(self, base_url: str, api_key: str = "", admin_api_key: str = "") -> None:
        self._base = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._admin = {"Authorization": f"Bearer {admin_api_key}"} if admin_api_key else self._headers
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def samples(self, timeout: float = 5.0) -> EngineSamples | None:
        """The engine's metrics, or None."""
        text = await self._get("/metrics", timeout, {"Accept": "text/plain; version=0.0.4"})
        return None if text is None else parse_samples(text[1])

    async def server_info(self, timeout: float = 10.0) -> Mapping[str, Any]:
        """The engine's resolved arguments; empty where it can't say. The old path serves SGLang <= 0.5.9."""
        for path in ("/server_info", "/get_server_info"):
            answer = await self._get_json(path, timeout)
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
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return CanaryResult("error", time.monotonic() - begun, f"{type(error).__name__}: {error}")
        verdict, detail = judge(status, text, expect)
        return CanaryResult(verdict, time.monotonic() - begun, detail)

    async def _post(self, path: str, body: Mapping[str, Any], timeout: float) -> tuple[int, str]:
        async with (
            asyncio.timeout(timeout),
            self._open().post(self._base + path, json=body, headers=self._headers) as response,
        ):
            if response.status != 200:
                return response.status, (await response.text())[:500]
            answer = await response.json(content_type=None)
            return 200, str(answer["choices"][0]["text"]) if _has_text(answer) else ""

    async def _get(self, path: str, timeout: float, headers: Mapping[str, str]) -> tuple[int, str] | None:
        try:
            async with (
                asyncio.timeout(timeout),
                self._open().get(self._base + path, headers={**self._admin, **headers}) as response,
            ):
                text = await response.text(errors="replace")
                return (response.status, text) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _get_json(self, path: str, timeout: float) -> Mapping[str, Any] | None:
        try:
            async with (
                asyncio.timeout(timeout),
                self._open().get(self._base + path, headers=self._admin) as response,
            ):
                answer = await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None
        return answer if isinstance(answer, Mapping) else None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use Probe as an async context manager")
        return self._session


def _has_text(answer: object) -> bool:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    return bool(choices) and isinstance(choices, list) and isinstance(choices[0], Mapping)


def judge(status: int, text: str, expect: str | None) -> tuple[str, str]:
    """Verdict (`ok`, `wrong`, `error`) and detail for an answer to the canary."""
    if status != 200:
        return "error", f"HTTP {status}: {text[:200]}"
    if not text:
        return "wrong", "an empty answer"
    if expect is not None and re.search(expect, text) is None:
        return "wrong", f"answered {text[:200]!r}, expected {expect!r}"
    return "ok", text[:200]
