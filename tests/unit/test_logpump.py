"""A container's log, copied over broken connections."""

import asyncio
import io

from hearth.host import logpump
from hearth.host.dockerd import EngineAway
from hearth.host.logpump import LogPump


async def test_it_goes_on_where_the_connection_broke(monkeypatch):
    monkeypatch.setattr(logpump, "_AGAIN", 0.01)
    since, out = [], io.BytesIO()

    def follow(at):
        since.append(at)
        if len(since) == 1:
            raise EngineAway("isn't up yet")
        if len(since) == 2:
            yield b"one\n"
            raise EngineAway("restarts")
        if len(since) == 3:
            yield b"two\n"

    pump = LogPump(follow, asyncio.get_running_loop(), out)
    pump.start()
    await asyncio.wait_for(pump.ended.wait(), 10)
    while b"two" not in out.getvalue():
        await asyncio.sleep(0.01)
    await pump.close(10)
    assert out.getvalue() == b"one\ntwo\n"
    assert since[:2] == [None, None]  # nothing was read yet: nothing may be left out
    assert since[2] > 0.0


async def test_last_words_are_waited_for_when_it_closes():
    out = io.BytesIO()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def follow(_):
        loop.call_soon_threadsafe(started.set)
        yield b"last words\n"

    pump = LogPump(follow, loop, out)
    pump.start()
    await asyncio.wait_for(started.wait(), 10)
    await pump.close(10)
    assert out.getvalue() == b"last words\n"


async def test_a_closed_output_ends_it(caplog):
    out = io.BytesIO()
    out.close()
    pump = LogPump(lambda _: iter([b"x"]), asyncio.get_running_loop(), out)
    pump.start()
    await pump.close(10)
    assert "can't be written" in caplog.text
