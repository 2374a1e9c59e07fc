"""The probe against a small server that answers right, wrong, late, for ever, or with rubbish."""

import asyncio
import gzip
import json
import time
import tracemalloc
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hearth.engine.probe import MAX_ANSWER, MAX_METRICS, Probe, judge

PAGE = 'sglang:num_running_reqs{model_name="m"} 3.0\n'
GOOD = {"choices": [{"text": " 4", "index": 0}]}
CANARY = ("m", "2 + 2 =", r"\b4\b", 8, 1.0)


@asynccontextmanager
async def serving(handler, api_key="", admin_api_key=""):
    """A probe of a server that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with (
        TestServer(app) as server,
        Probe(str(server.make_url("/")), api_key, admin_api_key) as probe,
    ):
        yield probe


@asynccontextmanager
async def raw(answer):
    """A probe of a TCP server whose `answer(writer)` says anything at all."""

    async def talk(reader, writer):
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with Probe(f"http://127.0.0.1:{port}") as probe:
            yield probe
    finally:
        server.close()


async def all_calls(probe, timeout=0.5):
    """Every call: (samples, server info, canary), and how long they took together."""
    begun = time.monotonic()
    answers = (
        await probe.samples(timeout),
        await probe.server_info(timeout),
        await probe.canary(*CANARY[:4], timeout),
    )
    return (*answers, time.monotonic() - begun)


async def test_right_answers():
    asked = []

    async def answer(request):
        asked.append((request.method, request.path))
        if request.path == "/metrics":
            return web.Response(text=PAGE)
        if request.path == "/server_info":
            return web.json_response({"version": "0.5.23"})
        body = await request.json()
        assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == (
            "m",
            "2 + 2 =",
            8,
            0,
        )
        return web.json_response(GOOD)

    async with serving(answer) as probe:
        samples, info, canary, _ = await all_calls(probe, 5.0)
    assert samples.running == 3.0
    assert info == {"version": "0.5.23"}
    assert (canary.verdict, canary.ok, canary.detail) == ("ok", True, " 4")
    assert 0 < canary.seconds < 5
    assert asked == [("GET", "/metrics"), ("GET", "/server_info"), ("POST", "/v1/completions")]


async def test_the_old_path_of_server_info():
    async def answer(request):
        return web.json_response({"old": 1}, status=200 if request.path == "/get_server_info" else 404)

    async with serving(answer) as probe:
        assert await probe.server_info() == {"old": 1}


@pytest.mark.parametrize(("accepted", "found"), [("user", True), ("admin", True), ("other", False)])
async def test_server_info_wants_the_api_key_and_takes_the_admin_key_as_a_last_try(accepted, found):
    seen = []

    async def answer(request):
        seen.append(request.headers.get("Authorization"))
        ok = seen[-1] == f"Bearer {accepted}"
        return web.json_response({"version": "x"}, status=200 if ok else 401)

    async with serving(answer, "user", "admin") as probe:
        assert bool(await probe.server_info()) is found
        assert seen[0] == "Bearer user"
        seen.clear()
        await probe.canary(*CANARY)
        assert seen == ["Bearer user"]


async def test_keys_go_nowhere_else_by_a_redirect():
    paths = []

    async def answer(request):
        paths.append(request.path)
        raise web.HTTPFound("/elsewhere")

    async with serving(answer, "user") as probe:
        samples, info, canary, _ = await all_calls(probe)
    assert "/elsewhere" not in paths
    assert (samples, info, canary.verdict) == (None, {}, "error")


BAD_BODIES = {
    "empty": b"",
    "no json": b"<html>502</html>",
    "half json": b'{"choices": [{"te',
    "a list": b"[1]",
    "null": b"null",
    "no choices": b"{}",
    "empty choices": b'{"choices": []}',
    "choices is text": b'{"choices": "abc"}',
    "a choice is null": b'{"choices": [null]}',
    "a chat answer": b'{"choices": [{"message": {"content": "4"}}]}',
    "text is null": b'{"choices": [{"text": null}]}',
    "text is a number": b'{"choices": [{"text": 4}]}',
    "not utf-8": b'\xff\xfe{"choices"',
    "deep": b"[" * 500_000,
    "gzip nobody asked for": gzip.compress(json.dumps(GOOD).encode()),
    "huge number": b'{"choices": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_a_200_that_holds_no_completion_is_an_error_and_not_a_wrong_answer(body):
    async def answer(request):
        headers = {"Content-Type": "application/json; charset=no-such-charset"}
        return web.Response(body=body, headers=headers)

    async with serving(answer) as probe:
        samples, _, canary, _ = await all_calls(probe, 5.0)
    assert (samples.running, samples.tokens) == (0.0, {})
    assert canary.verdict == "error"
    assert 0 < len(canary.detail) <= 300


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_other_statuses(status):
    async def answer(request):
        return web.Response(status=status, text="no " * 100_000)

    async with serving(answer) as probe:
        samples, info, canary, _ = await all_calls(probe, 5.0)
    assert (samples, info) == (None, {})
    assert canary.verdict == "error"
    assert canary.detail.startswith(f"HTTP {status}: no no")
    assert len(canary.detail) < 300


async def test_nobody_listens():
    async with Probe("http://127.0.0.1:1") as probe:
        samples, info, canary, took = await all_calls(probe)
    assert (samples, info, canary.verdict) == (None, {}, "error")
    assert took < 30


@pytest.mark.parametrize("url", ["http://", "http://[::1", "ftp://x", "", "http://no.such.host.invalid"])
async def test_an_address_that_cannot_be_reached(url):
    async with Probe(url) as probe:
        samples, info, canary, _ = await all_calls(probe, 2.0)
    assert (samples, info) == (None, {})
    assert canary.verdict in ("error", "timeout")


async def test_a_key_that_cannot_be_sent():
    async def answer(request):
        return web.Response()

    async with serving(answer, "line\nbreak") as probe:
        samples, info, canary, _ = await all_calls(probe)
    assert (samples, info, canary.verdict) == (None, {}, "error")


async def silence(writer):
    await asyncio.sleep(30)


async def drip(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1\r\n{\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def drip_headers(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless_continue(writer):
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [silence, drip, drip_headers, endless_continue])
async def test_every_call_ends_in_time(answer):
    async with raw(answer) as probe:
        samples, info, canary, took = await all_calls(probe, 0.3)
    assert (samples, info) == (None, {})
    assert canary.verdict in ("timeout", "error")
    assert took < 30


async def test_a_hang_is_a_timeout_that_says_how_long_it_waited():
    async with raw(silence) as probe:
        result = await probe.canary(*CANARY[:4], 0.2)
    assert (result.verdict, result.detail) == ("timeout", "no answer in 0.2 s")
    assert 0.2 <= result.seconds < 30


async def rubbish(writer):
    writer.write(bytes(range(256)) * 10)


async def nothing(writer):
    pass


async def short(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{}")


async def huge_header(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10_000_000)
    await writer.drain()


@pytest.mark.parametrize("answer", [rubbish, nothing, short, huge_header])
async def test_what_is_no_http_is_an_error(answer):
    async with raw(answer) as probe:
        samples, info, canary, _ = await all_calls(probe, 2.0)
    assert (samples, info, canary.verdict) == (None, {}, "error")


async def endless_body(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def test_an_endless_body_takes_little_memory():
    async with raw(endless_body) as probe:
        tracemalloc.start()
        samples, info, canary, _ = await all_calls(probe, 20.0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (samples, info) == (None, {})
    assert canary.verdict == "error"
    assert str(MAX_ANSWER) in canary.detail
    assert peak < 4 * MAX_METRICS


async def test_a_gzip_bomb_is_not_unpacked():
    bomb = gzip.compress(b"x" * 50_000_000, 6)

    async def answer(request):
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip", "Content-Type": "text/plain"})

    async with serving(answer) as probe:
        tracemalloc.start()
        await all_calls(probe, 5.0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20_000_000


async def test_calls_after_a_restart_of_the_engine_meet_the_new_one():
    """No connection is kept that leads to the engine before, or that it closes while it is used."""

    async def answer(request):
        return web.json_response(GOOD)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    first = TestServer(app)
    await first.start_server()
    async with Probe(str(first.make_url("/"))) as probe:
        assert (await probe.canary(*CANARY)).ok
        port = first.port
        await first.close()
        assert (await probe.canary(*CANARY)).verdict == "error"
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        second = TestServer(app, port=port)
        await second.start_server()
        assert (await probe.canary(*CANARY)).ok
        await second.close()


def test_a_probe_is_used_as_a_context_manager():
    with pytest.raises(RuntimeError, match="context manager"):
        asyncio.run(Probe("http://x").samples())


@pytest.mark.parametrize(
    ("status", "text", "expect", "verdict"),
    [
        (200, "4", None, "ok"),
        (200, " The answer is 4.", r"\b4\b", "ok"),
        (200, "44", r"\b4\b", "wrong"),
        (200, "!!!!", "4", "wrong"),
        (200, "", None, "wrong"),
        (200, "x" * 100_000 + "4", "4", "wrong"),
        (503, "", None, "error"),
        (500, "4", "4", "error"),
    ],
)
def test_judge(status, text, expect, verdict):
    found, detail = judge(status, text, expect)
    assert found == verdict
    assert len(detail) < 500
