"""The smoke test: does what was just deployed answer, stream and call tools as it should?

Every check is asked of the engine's own port, at temperature 0, and says what was seen. What counts as right
is decided by functions of the answer alone; the rest is HTTP.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp

from hearth.deploy.release import Asked, LongPrompt, SmokeSpec, Streamed, ToolCall
from hearth.engine.probe import judge

HIDDEN = "7391"
"""The number that the long prompt hides."""
DONE = "[DONE]"
_LIMIT = 4 << 20
_LOST = (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, RecursionError)


@dataclass(frozen=True)
class Target:
    """Where to ask, for which model, with which key ("" for none)."""

    url: str
    model: str
    api_key: str = ""


@dataclass(frozen=True)
class Check:
    """One check: what was seen, whether that is right, and how long it took (seconds)."""

    name: str
    ok: bool
    seen: str
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """One entry of `checks` in `hearth release smoke --json`."""
        return {"name": self.name, "ok": self.ok, "seen": self.seen, "seconds": round(self.seconds, 2)}


Verdict = tuple[bool, str]
"""Whether it is right, and what was seen."""
Ask = Callable[[], Awaitable[Verdict]]
Event = tuple[float, str]
"""Seconds since the request, and the data of one server-sent event."""


async def smoke(target: Target, spec: SmokeSpec, canary: Asked) -> list[Check]:
    """Ask everything, one after the other. Never raises for an engine that answers wrong or not at all."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
    ) as session:
        return await _Asker(session, target, spec).all(canary)


class _Asker:
    def __init__(self, session: aiohttp.ClientSession, target: Target, spec: SmokeSpec) -> None:
        self._session, self._target, self._spec = session, target, spec

    async def all(self, canary: Asked) -> list[Check]:
        return [await self._timed(name, ask) for name, ask in self._plan(canary)]

    def _plan(self, canary: Asked) -> list[tuple[str, Ask]]:
        spec = self._spec
        plan: list[tuple[str, Ask]] = [
            (f"prompt {number}", partial(self._prompt, asked))
            for number, asked in enumerate(spec.prompts or [canary], 1)
        ]
        if spec.stream is not None:
            plan.append(("stream", partial(self._stream, spec.stream)))
        if spec.tool is not None:
            plan.append(("tool", partial(self._tool, spec.tool)))
        if spec.long_prompt is not None:
            plan.append(("long prompt", partial(self._long, spec.long_prompt)))
        return plan

    async def _timed(self, name: str, ask: Ask) -> Check:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._spec.timeout):
                ok, seen = await ask()
        except TimeoutError:
            ok, seen = False, f"no whole answer in {self._spec.timeout:g} s"
        except _LOST as error:
            ok, seen = False, f"{type(error).__name__}: {error}"[:300]
        return Check(name, ok, " ".join(seen.split())[:300], time.monotonic() - begun)

    async def _prompt(self, asked: Asked) -> Verdict:
        return judge_text(
            *await self._post(*self._body(asked.prompt, asked.chat, asked.max_tokens)), asked.expect
        )

    async def _long(self, long: LongPrompt) -> Verdict:
        status, raw = await self._post(*self._body(haystack(long.words), long.chat, long.max_tokens))
        return judge_text(status, raw, long.expect)

    async def _tool(self, tool: ToolCall) -> Verdict:
        path, body = self._body(tool.prompt, True, tool.max_tokens)
        return judge_tool(*await self._post(path, {**body, "tools": [tool_schema(tool)]}), tool)

    async def _stream(self, stream: Streamed) -> Verdict:
        path, body = self._body(stream.prompt, stream.chat, stream.max_tokens)
        request = self._session.post(self._target.url + path, json={**body, "stream": True})
        begun = time.monotonic()
        events: list[Event] = []
        async with request as answer:
            if answer.status != 200:
                return (
                    False,
                    f"HTTP {answer.status}: {(await answer.content.read(200)).decode('utf-8', 'replace')}",
                )
            async for line in answer.content:
                if line.startswith(b"data:"):
                    events.append((time.monotonic() - begun, line[5:].decode("utf-8", "replace").strip()))
        return judge_stream(events, stream)

    def _body(self, prompt: str, chat: bool, max_tokens: int) -> tuple[str, dict[str, Any]]:
        common = {"model": self._target.model, "max_tokens": max_tokens, "temperature": 0}
        if not chat:
            return "/v1/completions", {**common, "prompt": prompt}
        asked = [{"role": "user", "content": prompt}]
        return "/v1/chat/completions", {**common, "messages": asked, **self._spec.chat_body}

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        async with self._session.post(self._target.url + path, json=body) as answer:
            raw = bytearray()
            async for chunk in answer.content.iter_any():
                raw += chunk
                if len(raw) > _LIMIT:
                    raise ValueError(f"an answer of more than {_LIMIT} bytes")
            return answer.status, bytes(raw)


def judge_text(status: int, raw: bytes, expect: str | None) -> Verdict:
    """Whether an answer holds the text that is expected."""
    text = said(_choice(raw)) if status == 200 else raw[:500].decode("utf-8", "replace")
    verdict, detail = judge(status, text, expect)
    return verdict == "ok", f"answered {detail!r}" if verdict == "ok" else detail


def judge_tool(status: int, raw: bytes, tool: ToolCall) -> Verdict:
    """Whether an answer calls the tool with the expected argument."""
    if status != 200:
        return False, f"HTTP {status}: {raw[:200].decode('utf-8', 'replace')}"
    choice = _choice(raw)
    calls = (choice.get("message") or {}).get("tool_calls") or []
    if not calls:
        return False, f"no tool call, but {said(choice)[:150]!r}"
    name, arguments = calls[0]["function"]["name"], calls[0]["function"]["arguments"]
    value = str(json.loads(arguments).get(tool.argument, ""))
    ok = name == tool.name and re.search(tool.expect, value) is not None
    wanted = "" if ok else f", expected {tool.name}({tool.argument} like {tool.expect!r})"
    return ok, f"{name}({arguments}){wanted}"


def judge_stream(events: Sequence[Event], stream: Streamed) -> Verdict:
    """Whether an answer came in pieces, without a long gap, and ended with `[DONE]`."""
    pieces = [(at, data) for at, data in events if data != DONE]
    wrong = next((data for _, data in pieces if json.loads(data).get("error")), None)
    if wrong is not None:
        return False, f"an error in the stream: {wrong[:200]}"
    texts = [at for at, data in pieces if _piece(data)]
    times = [0.0, *(at for at, _ in events)]
    gap = max((b - a for a, b in pairwise(times)), default=0.0)
    seen = f"{len(texts)} chunks with text, longest gap {gap:.2f} s"
    if not events or events[-1][1] != DONE:
        return False, f"{seen}, but the stream was cut: no [DONE] at its end"
    if len(texts) < stream.min_chunks:
        return False, f"{seen}: expected at least {stream.min_chunks} chunks"
    if gap > stream.max_gap:
        return False, f"{seen}: expected at most {stream.max_gap:g} s"
    return True, f"{seen}, ended with [DONE]"


def haystack(words: int) -> str:
    """About `words` words with the hidden number in the middle and a question for it at the end."""
    line = "The grass is green and the sky is blue and the water in the lake is cold today."
    lines = [line] * max(2, words // len(line.split()))
    lines.insert(len(lines) // 2, f"The secret number is {HIDDEN}.")
    return "\n".join([*lines, "What is the secret number? The secret number is"])


def tool_schema(tool: ToolCall) -> dict[str, Any]:
    """The tool as the OpenAI API describes it."""
    parameters = {
        "type": "object",
        "properties": {tool.argument: {"type": "string"}},
        "required": [tool.argument],
    }
    function = {"name": tool.name, "description": f"Looks up {tool.name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def said(choice: Mapping[str, Any]) -> str:
    """The text of one choice: a completion's, or a message's with what was thought before it."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    message = choice.get("message") or choice.get("delta") or {}
    return "".join(str(message.get(key) or "") for key in ("reasoning_content", "content"))


def _piece(data: str) -> str:
    choices = json.loads(data).get("choices") or [{}]
    return said(choices[0])


def _choice(raw: bytes) -> Mapping[str, Any]:
    """The first choice of an answer. Raises ValueError or LookupError for what is none."""
    choice = json.loads(raw)["choices"][0]
    if not isinstance(choice, Mapping):
        raise ValueError("HTTP 200, but no completion in the answer")
    return choice
