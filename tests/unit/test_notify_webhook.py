"""The webhook: a real HTTP server gets what it must, and nothing waits for a bad one."""

import asyncio
import json
import logging
import socket
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from hearth.config import Notify
from hearth.errors import ConfigError, MissingError
from hearth.notify import MOST_PENDING, Notifier, Target, read_target

TOKEN = "T0kenInThePath42"
DOCUMENT = {"schema": 1, "event": "step_down", "text": "é"}


def target(url, timeout=5.0, headers=None):
    return Target(url, headers or {}, frozenset({"step_down", "give_up"}), timeout)


@asynccontextmanager
async def receiver(answers=(200,), delay=0.0):
    """A server that gives each answer once, then the last one; yields its port and what it got."""
    got, left = [], list(answers)

    async def take(request):
        got.append((request.path, dict(request.headers), await request.text()))
        await asyncio.sleep(delay)
        status = left.pop(0) if len(left) > 1 else left[0]
        headers = {"Location": "/elsewhere"} if 300 <= status < 400 else {}
        return web.Response(status=status, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1], got
    finally:
        await runner.cleanup()


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_document_is_posted_once_with_its_headers():
    async with receiver() as (port, got):
        notifier = Notifier(
            target(f"http://127.0.0.1:{port}/{TOKEN}?a=b", headers={"Authorization": "Bearer x"})
        )
        notifier.post(DOCUMENT)
        assert await notifier.close()
    ((path, headers, body),) = got
    assert path == f"/{TOKEN}"
    assert json.loads(body) == DOCUMENT
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer x"
    assert headers["User-Agent"].startswith("hearth/")


@pytest.mark.parametrize(
    ("answers", "tries"),
    [((503, 429, 204), 3), ((500,), 4), ((404,), 1), ((302,), 1), ((401,), 1)],
    ids=["taken at last", "never", "not found", "redirect", "refused"],
)
async def test_what_may_pass_is_tried_again_and_what_is_final_is_not(answers, tries, caplog):
    async with receiver(answers) as (port, got):
        notifier = Notifier(target(f"http://127.0.0.1:{port}/{TOKEN}"), waits=(0.01, 0.01, 0.01))
        with caplog.at_level(logging.WARNING):
            notifier.post(DOCUMENT)
            assert await notifier.close()
    assert len(got) == tries
    assert {path for path, _, _ in got} == {f"/{TOKEN}"}, "a redirect isn't followed"
    said = [record.getMessage() for record in caplog.records]
    if answers[-1] == 204:
        assert not said
    else:
        assert said == [
            f"Webhook http://127.0.0.1:{port}/***: not told of step_down: it answered {answers[-1]}"
        ]


async def test_nobody_there_is_said_once_without_the_address(caplog):
    url = f"http://127.0.0.1:{closed_port()}/{TOKEN}"
    notifier = Notifier(target(url), waits=(0.01,))
    notifier.post(DOCUMENT)
    assert await notifier.close()
    (record,) = caplog.records
    assert "ConnectionRefusedError" in record.getMessage()
    assert TOKEN not in caplog.text


async def test_a_host_that_does_not_exist_is_no_crash(caplog):
    notifier = Notifier(target(f"http://nowhere.invalid/{TOKEN}"), waits=())
    notifier.post(DOCUMENT)
    assert await notifier.close(60)
    assert "not told of step_down" in caplog.text
    assert TOKEN not in caplog.text


async def test_an_exit_waits_no_longer_than_it_may(caplog):
    async with receiver(delay=30) as (port, got):
        notifier = Notifier(target(f"http://127.0.0.1:{port}/{TOKEN}", timeout=60))
        notifier.post(DOCUMENT)
        while not got:
            await asyncio.sleep(0.01)
        assert not await notifier.close(0.1)
    assert "still unsent" in caplog.text
    assert TOKEN not in caplog.text


async def test_a_receiver_that_never_answers_does_not_pile_up(caplog):
    async with receiver(delay=30) as (port, _):
        notifier = Notifier(target(f"http://127.0.0.1:{port}/{TOKEN}", timeout=60), waits=())
        for _ in range(MOST_PENDING + 2):
            notifier.post(DOCUMENT)
        assert caplog.text.count("too slow") == 2


async def test_without_a_target_nothing_happens():
    notifier = Notifier(None)
    assert not notifier.wants("give_up")
    notifier.post(DOCUMENT)
    assert await notifier.close()


def test_only_the_chosen_events_are_wanted():
    notifier = Notifier(target("http://h/"))
    assert notifier.wants("give_up")
    assert not notifier.wants("ready_again")


def test_address_and_headers_come_from_files(tmp_path):
    (tmp_path / "url").write_text(f"https://hooks.example/{TOKEN}\n")
    (tmp_path / "auth").write_text("Bearer abcdefghij\n")
    settings = Notify(url_file=tmp_path / "url", header_files={"Authorization": tmp_path / "auth"})
    found = read_target(settings)
    assert found.url == f"https://hooks.example/{TOKEN}"
    assert found.headers == {"Authorization": "Bearer abcdefghij"}
    assert found.shown == "https://hooks.example/***"
    assert {TOKEN, "abcdefghij"} <= set(found.secrets)
    assert TOKEN not in found.shown
    assert read_target(Notify()) is None


BAD_FILES = {
    "empty": ("", ConfigError, "not one line of text"),
    "two lines": ("https://h/a\nhttps://h/b", ConfigError, "not one line of text"),
    "no address": ("hooks.example/T0kenInThePath42", ConfigError, "not a web address"),
    "another scheme": ("file:///T0kenInThePath42", ConfigError, "not a web address"),
    "a user": ("https://me:T0kenInThePath42@h/", ConfigError, "not a web address"),
    "not ASCII": ("https://h/é", ConfigError, "not plain ASCII"),
    None: (None, MissingError, "no such file"),
}


@pytest.mark.parametrize(("text", "error", "said"), BAD_FILES.values(), ids=[str(name) for name in BAD_FILES])
def test_a_bad_file_is_one_line_that_names_it_and_not_its_content(tmp_path, text, error, said):
    path = tmp_path / "url"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=said) as caught:
        read_target(Notify(url_file=path))
    assert f"notify.url_file: {path}" in str(caught.value)
    assert "T0ken" not in str(caught.value)
