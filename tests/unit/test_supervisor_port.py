"""Asking a supervisor's port: what it says, from the place that answers, within limits."""

import json

import pytest
from aiohttp import web

from hearth.host.launch_plan import Look
from hearth.host.supervisor_port import SupervisorPort

NOBODY = "127.0.0.1:9"


class Supervisor:
    def __init__(self):
        self.status, self.ready, self.alive = b"{}", 503, 200

    async def answer(self, request):
        code = {"/livez": self.alive, "/readyz": self.ready}.get(request.path, 200)
        return web.Response(status=code, body=self.status if request.path == "/status" else b"ok\n")


@pytest.fixture
async def supervisor():
    made, app = Supervisor(), web.Application()
    app.router.add_get("/{any}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.place = f"127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def look(*places, times=1):
    async with SupervisorPort() as port:
        port.at(*places)
        return [await port.look() for _ in range(times)][-1]


async def test_what_it_says(supervisor):
    supervisor.status = json.dumps({"state": "starting"}).encode()
    assert await look(supervisor.place) == Look(True, False, {"state": "starting"})
    supervisor.ready = 200
    assert (await look(supervisor.place)).ready


async def test_a_loop_that_does_not_turn_is_not_alive(supervisor):
    supervisor.alive = 503
    assert not (await look(supervisor.place)).alive


async def test_nobody_says_nothing():
    assert await look(NOBODY) == Look()
    assert await look() == Look()


async def test_the_place_that_answers_is_found_and_kept(supervisor):
    assert (await look(NOBODY, supervisor.place, times=2)).alive
    async with SupervisorPort() as port:
        port.at(NOBODY, supervisor.place)
        assert not (await port.look()).alive
        port.at(NOBODY, supervisor.place)  # said again at each tick: the order that was learned stays
        assert (await port.look()).alive


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"x" * 3_000_000])
async def test_a_status_that_is_none_is_none(supervisor, body):
    supervisor.status = body
    seen = await look(supervisor.place)
    assert seen.document is None
    assert seen.alive
