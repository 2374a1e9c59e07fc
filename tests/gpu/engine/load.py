"""Asks an SGLang engine for tokens and measures: time to first token, tokens per second. It warms nothing."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class Answer:
    """One streamed answer: seconds to the first and to the last token, and how many came."""

    first: float
    last: float
    tokens: int


async def ask(session: aiohttp.ClientSession, url: str, prompt: int, tokens: int, salt: int = 0) -> Answer:
    """Stream `tokens` tokens after a prompt of `prompt` tokens. Raises aiohttp's errors and TimeoutError."""
    body = {**_body(prompt, tokens, salt), "stream": True}
    begun = time.perf_counter()
    first = last = 0.0
    seen = 0
    async with session.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            last = time.perf_counter() - begun
            first = first or last
            seen = json.loads(line[5:])["meta_info"]["completion_tokens"]
    return Answer(first, last, seen)


def _body(prompt: int, tokens: int, salt: int) -> dict[str, object]:
    return {
        "input_ids": [2 + (salt * 7919 + i * 31) % 900 for i in range(prompt)],
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }


def client(limit: float = 60.0) -> aiohttp.ClientSession:
    """A session for many connections at once; every answer within `limit` seconds."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=limit),
        trust_env=False,
        read_bufsize=1 << 20,
    )


async def first_token_ms(session: aiohttp.ClientSession, url: str, prompt: int, times: int) -> list[float]:
    """Milliseconds to the first token, one request after another."""
    return [round(1000 * (await ask(session, url, prompt, 1, salt)).first, 2) for salt in range(times)]


async def single_stream(session: aiohttp.ClientSession, url: str, tokens: int) -> float:
    """Tokens per second of one stream, from its first token on."""
    answer = await ask(session, url, 32, tokens)
    return round((answer.tokens - 1) / (answer.last - answer.first), 1)


async def many_at_once(session: aiohttp.ClientSession, url: str, count: int, tokens: int) -> float:
    """Tokens per second of `count` requests of `tokens` tokens at once, prompts of 32 tokens included.

    Not streamed: a client in Python would take part of the time that is measured.
    """
    begun = time.perf_counter()
    numbers = await asyncio.gather(*(_whole(session, url, tokens, salt) for salt in range(count)))
    return round(sum(numbers) / (time.perf_counter() - begun), 1)


async def _whole(session: aiohttp.ClientSession, url: str, tokens: int, salt: int) -> int:
    body = _body(32, tokens, salt)
    async with session.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        return int((await response.json())["meta_info"]["completion_tokens"])
