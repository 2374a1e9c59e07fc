"""The smoke test: judgements as data, and all of it against an HTTP server that answers as it is told."""

import json

import pytest
from aiohttp import web

from hearth.deploy.release import Asked, LongPrompt, SmokeSpec, Streamed, ToolCall
from hearth.deploy.smoke import HIDDEN, Target, haystack, judge_stream, judge_text, judge_tool, smoke

STREAM, TOOL = Streamed(min_chunks=2, max_gap=5), ToolCall()
WORD = json.dumps({"choices": [{"delta": {"content": "a"}}]})
EMPTY = json.dumps({"choices": [{"delta": {"role": "assistant"}}]})


def completion(text):
    return json.dumps({"choices": [{"text": text}]}).encode()


@pytest.mark.parametrize(
    ("status", "raw", "expect", "ok"),
    [
        (200, completion(" Rome, of course"), "Rome", True),
        (200, completion(" Paris"), "Rome", False),
        (200, completion("anything"), None, True),
        (200, completion(""), None, False),
        (200, json.dumps({"choices": [{"message": {"content": "Rome"}}]}).encode(), "Rome", True),
        (
            200,
            json.dumps({"choices": [{"message": {"content": None, "reasoning_content": "Rome"}}]}).encode(),
            "Rome",
            True,
        ),
        (500, b"Rome", "Rome", False),
        (401, b"no key", None, False),
    ],
)
def test_a_text_is_held_against_what_is_expected(status, raw, expect, ok):
    assert judge_text(status, raw, expect)[0] is ok


@pytest.mark.parametrize(
    ("events", "ok", "word"),
    [
        ([(0.1, WORD), (0.2, WORD), (0.3, "[DONE]")], True, "2 chunks"),
        ([(0.1, EMPTY), (0.2, WORD), (0.3, WORD), (0.4, "[DONE]")], True, "2 chunks"),
        ([(0.1, WORD), (0.2, "[DONE]")], False, "at least 2 chunks"),
        ([(0.1, WORD), (0.2, WORD)], False, "no [DONE]"),
        ([(0.1, WORD), (0.2, "[DONE]"), (0.3, WORD)], False, "no [DONE] at its end"),
        ([(0.1, WORD), (9.0, WORD), (9.1, "[DONE]")], False, "at most 5 s"),
        ([(8.0, WORD), (8.1, WORD), (8.2, "[DONE]")], False, "at most 5 s"),
        ([(0.1, WORD), (0.2, WORD), (9.1, "[DONE]")], False, "at most 5 s"),
        ([(0.1, json.dumps({"error": {"message": "CUDA"}})), (0.2, "[DONE]")], False, "CUDA"),
        ([], False, "cut"),
    ],
)
def test_a_stream_comes_in_pieces_without_gaps_and_ends_cleanly(events, ok, word):
    verdict, seen = judge_stream(events, STREAM)
    assert verdict is ok
    assert word in seen


def call(name, arguments):
    message = {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    return json.dumps({"choices": [{"message": message}]}).encode()


@pytest.mark.parametrize(
    ("status", "raw", "ok", "word"),
    [
        (200, call("get_weather", '{"city": "Paris"}'), True, "get_weather"),
        (200, call("get_weather", '{"city": "Rome"}'), False, "expected get_weather"),
        (200, call("other", '{"city": "Paris"}'), False, "other"),
        (200, json.dumps({"choices": [{"message": {"content": "It rains."}}]}).encode(), False, "It rains"),
        (500, b"broken", False, "HTTP 500"),
    ],
)
def test_a_tool_call_is_the_right_one(status, raw, ok, word):
    verdict, seen = judge_tool(status, raw, TOOL)
    assert verdict is ok
    assert word in seen


@pytest.mark.parametrize("words", [10, 500, 6000])
def test_the_number_is_hidden_in_the_middle(words):
    text = haystack(words)
    assert text.count(HIDDEN) == 1
    assert 0.2 < text.index(HIDDEN) / len(text) < 0.8
    assert abs(len(text.split()) - words) < 60


class Answers:
    """An HTTP server on a port of its own that answers as it is told."""

    def __init__(self):
        self.text, self.status, self.seen = "Rome 7391 here", 200, []
        self.done, self.hang = True, False

    async def answer(self, request):
        body = await request.json()
        self.seen.append((request.path, body, request.headers.get("Authorization")))
        if self.status != 200:
            return web.Response(status=self.status, text="broken")
        if body.get("stream"):
            return await self.stream(request)
        if body.get("tools"):
            return web.Response(body=call("get_weather", '{"city": "Paris"}'))
        choice = {"message": {"content": self.text}} if "messages" in body else {"text": self.text}
        return web.json_response({"choices": [choice]})

    async def stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(4):
            await response.write(f"data: {WORD}\n\n".encode())
        if self.hang:
            import asyncio

            await asyncio.sleep(60)
        if self.done:
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def answers():
    made = Answers()
    app = web.Application()
    app.router.add_post("/v1/completions", made.answer)
    app.router.add_post("/v1/chat/completions", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


SPEC = SmokeSpec(stream=Streamed(min_chunks=2), tool=TOOL, long_prompt=LongPrompt(words=50), timeout=20)
CANARY = Asked(prompt="The capital of Italy is", expect="Rome")


async def test_everything_is_asked_with_the_key_at_temperature_0(answers):
    checks = await smoke(Target(answers.url, "m", "key"), SPEC, CANARY)
    assert [(check.name, check.ok) for check in checks] == [
        ("prompt 1", True),
        ("stream", True),
        ("tool", True),
        ("long prompt", True),
    ]
    assert all(key == "Bearer key" for _, _, key in answers.seen)
    assert all(body["temperature"] == 0 and body["model"] == "m" for _, body, _ in answers.seen)
    assert [path for path, _, _ in answers.seen] == ["/v1/completions"] + ["/v1/chat/completions"] * 3


async def test_own_prompts_take_the_place_of_the_canary(answers):
    own = [Asked(prompt="a", expect="Rome", chat=True), Asked(prompt="b", expect="Milan")]
    spec = SmokeSpec(prompts=own, stream=None, long_prompt=None, chat_body={"seed": 1})
    checks = await smoke(Target(answers.url, "m"), spec, CANARY)
    assert [(check.name, check.ok) for check in checks] == [("prompt 1", True), ("prompt 2", False)]
    assert "expected 'Milan'" in checks[1].seen
    assert answers.seen[0][1]["seed"] == 1


async def test_a_wrong_answer_fails_by_name(answers):
    answers.text = "I don't know"
    checks = await smoke(Target(answers.url, "m"), SPEC, CANARY)
    assert {check.name for check in checks if not check.ok} == {"prompt 1", "long prompt"}
    assert "I don't know" in checks[0].seen


async def test_a_cut_stream_fails(answers):
    answers.done = False
    checks = await smoke(Target(answers.url, "m"), SPEC, CANARY)
    assert {check.name for check in checks if not check.ok} == {"stream"}


async def test_a_stream_that_hangs_is_not_waited_for_forever(answers):
    answers.hang = True
    spec = SPEC.model_copy(update={"timeout": 2.0, "tool": None, "long_prompt": None})
    checks = await smoke(Target(answers.url, "m"), spec, CANARY)
    assert [(check.name, check.ok) for check in checks] == [("prompt 1", True), ("stream", False)]
    assert "no whole answer in 2 s" in checks[1].seen


async def test_errors_fail_and_are_shown(answers):
    answers.status = 500
    checks = await smoke(Target(answers.url, "m"), SPEC, CANARY)
    assert not any(check.ok for check in checks)
    assert all("500" in check.seen for check in checks)


async def test_nobody_there_fails_every_check():
    checks = await smoke(Target("http://127.0.0.1:9", "m"), SPEC, CANARY)
    assert not any(check.ok for check in checks)
    assert all("\n" not in check.seen for check in checks)
