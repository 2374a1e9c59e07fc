"""The status page in a real headless Chromium, served by the real web port."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import boards
import pytest
import pytest_asyncio
from devtools import Chromium, Tab, chromium, find_chromium

from hearth.board import Board
from hearth.metrics import Metrics
from hearth.states import State
from hearth.web import Web

# One browser for all: everything runs on one event loop.
pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

MISSING = "no chromium here; install it with: apt-get install chromium (or name one in $CHROMIUM)"
PHONE, DESKTOP = (360, 800), (1280, 900)
SIZES = pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
BOARDS: dict[str, Callable[[], Board]] = {
    "serving": boards.serving,
    "stepped_down": boards.stepped_down,
    "downgraded": boards.downgraded,
    "starting": boards.starting,
    "gave_up": boards.gave_up,
}
# Every element that shows text of its own and has less than WCAG's AA contrast (4.5) to what is behind it.
FAINT = """(() => {
  const channel = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const behind = (e) => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] !== 0) return c; } return [255, 255, 255]; };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  return [...document.querySelectorAll("body *")].filter((e) => own(e) && e.getClientRects().length)
    .map((e) => { const s = getComputedStyle(e), svg = e instanceof SVGElement;
      const [a, b] = [light(rgb(svg ? s.fill : s.color)), light(behind(e))];
      return [e.textContent.slice(0, 40), (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]; })
    .filter(([, ratio]) => ratio < 4.5);
})()"""
# What sticks out to the right of the window.
WIDE = """[...document.querySelectorAll("body *")]
  .filter((e) => e.getBoundingClientRect().right > innerWidth + .5)
  .map((e) => e.tagName + " " + e.textContent.slice(0, 40))"""
TEXT = "document.body.innerText"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Chromium]:
    path = find_chromium()
    if path is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(MISSING)
    async with chromium(path) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def serve() -> AsyncIterator[Callable[[Board], object]]:
    started: list[Web] = []

    async def _serve(board: Board) -> Web:
        web = Web(board, Metrics("0.5.21"), "127.0.0.1", 0)
        await web.start()
        started.append(web)
        return web

    yield _serve
    for web in started:
        await web.stop()


def url(web: Web) -> str:
    return f"http://127.0.0.1:{web.port}/"


def keep(name: str) -> Path | None:
    """Where to leave a screenshot; only when asked for with $HEARTH_SCREENSHOTS."""
    folder = os.environ.get("HEARTH_SCREENSHOTS")
    return Path(folder) / f"{name}.png" if folder else None


async def check_fits(tab: Tab) -> None:
    assert await tab.js("document.documentElement.scrollWidth <= innerWidth")
    assert await tab.js(WIDE) == []


@SIZES
@SCHEMES
@pytest.mark.parametrize("name", list(BOARDS))
async def test_fits_reads_and_stays_at_home(browser, serve, name, size, scheme):
    web = await serve(BOARDS[name]())
    async with browser.tab(*size, scheme) as tab:
        await tab.open(url(web))
        assert await tab.js("innerWidth") == size[0]
        await check_fits(tab)
        assert await tab.js(FAINT) == []
        assert tab.errors == []
        assert [request for request in tab.requests if not request.startswith((url(web), "data:"))] == []
        path = keep(f"{name}-{size[0]}-{scheme}")
        if path is not None:
            await tab.screenshot(path)


async def test_serving(browser, serve):
    board = boards.serving()
    board.rates = {"generation": 846.4, "prefill": 4310.0}
    web = await serve(board)
    async with browser.tab() as tab:
        await tab.open(url(web))
        text = await tab.js(TEXT)
        for part in (
            "Serving",
            board.sentence,
            "846",
            "4,310",
            "61.3 %",
            "tc_piecewise",
            "For 3 d 4 h",
            "Passed",
        ):
            assert part in text
        for part in (
            "Loading weights",
            "412 s",
            "9 min 29 s",
            "99.9 %",
            "None since the supervisor",
            "SGLang 0.5.21",
        ):
            assert part in text
        assert "Stepped down" not in text
        assert await tab.js("document.title") == "Serving 846 tok/s · Hearth"
        assert await tab.js("document.querySelector('h1').textContent") == "Serving"
        labels = await tab.js("[...document.querySelectorAll('svg')].map(s => s.getAttribute('aria-label'))")
        assert labels[0].startswith("Generation, last hour: now ")
        assert await tab.js("document.querySelectorAll('svg .curve').length") == 2
        axes = await tab.js("[...document.querySelectorAll('svg text')].map(t => t.textContent)")
        assert axes.count("tokens/s") == axes.count("time, Europe/Berlin") == axes.count("0") == 2


async def test_stepped_down_says_why_and_shows_the_failures(browser, serve):
    web = await serve(boards.stepped_down())
    async with browser.tab(*PHONE) as tab:
        await tab.open(url(web))
        text = await tab.js(TEXT)
        assert "Stepped down: 1 step below the wanted plan" in text
        assert "Wanted piecewise (prefill tc_piecewise, decode full, decode batch 64)" in text
        assert "Because: Graph capture failed (graph_capture in capture_prefill). torch._dynamo.exc" in text
        heads = await tab.js("[...document.querySelectorAll('article h3')].map(e => e.textContent)")
        assert heads == ["Graph capture failed", "Wrong answers", "Engine killed"]
        assert "hearth trace names the op" in text
        assert "step down from tc_piecewise,full,64 to disabled,full,64" in text
        assert await tab.js("document.querySelectorAll('svg .fail').length") == 4
        # The gap in the measurements is a gap in the line.
        assert await tab.js("document.querySelectorAll('#chart-generation .curve').length") == 2


async def test_evidence_opens_by_keyboard_and_stays_open(browser, serve):
    board = boards.stepped_down()
    web = await serve(board)
    async with browser.tab(*PHONE) as tab:
        await tab.open(url(web))
        await tab.js("document.querySelector('article summary').focus()")
        for kind in ("keyDown", "keyUp"):
            await tab.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r",
                           windowsVirtualKeyCode=13)  # fmt: skip
        await tab.until("document.querySelector('article details').open")
        assert "in is_aot" in await tab.js(TEXT)
        board.incidents.append(boards.Incident(time.time(), boards.KILLED, board.plan, "start again"))
        await tab.until("document.querySelectorAll('article').length === 4")
        assert await tab.js("document.querySelectorAll('article details')[1].open")
        await check_fits(tab)


async def test_downgrade_is_said(browser, serve):
    web = await serve(boards.downgraded())
    async with browser.tab() as tab:
        await tab.open(url(web))
        text = await tab.js(TEXT)
        assert "runs less than it was started with" in text
        assert "asked for tc_piecewise, the engine runs disabled" in text
        changed = await tab.js("[...document.querySelectorAll('td.changed')].map(e => e.textContent)")
        assert changed == ["standard", "disabled"]


async def test_starting_shows_phase_progress_and_time(browser, serve):
    web = await serve(boards.starting())
    async with browser.tab(*PHONE) as tab:
        await tab.open(url(web))
        text = await tab.js(TEXT)
        for part in ("Starting", "Loading weights", "checkpoint shards 20/54 ·", " s in this phase"):
            assert part in text
        assert await tab.js("document.getElementById('step-track').getAttribute('aria-valuenow')") == "37"
        # 203 s since the start, 45 s of them in the phases before; loading the page takes a few.
        assert "2 min 38 s" <= text.split("20/54 · ")[1][:10] <= "2 min 59 s"
        assert "hasn't said yet what it really runs" in text
        assert "nothing measured" in text
        tiles = await tab.js("[...document.querySelectorAll('#tiles p')].map(e => e.textContent)")
        assert tiles == ["–"] * 6
        assert "150 s" not in text


async def test_gave_up(browser, serve):
    web = await serve(boards.gave_up())
    async with browser.tab() as tab:
        await tab.open(url(web))
        text = await tab.js(TEXT)
        for part in ("Gave up", "Exit code 70", "no step is left below", "remembered from an earlier run"):
            assert part in text
        assert await tab.js("document.getElementById('hero').dataset.tone") == "bad"


async def test_new_facts_appear_by_themselves(browser, serve):
    board = boards.starting()
    web = await serve(board)
    async with browser.tab() as tab:
        await tab.open(url(web))
        board.state, board.canary_ok, board.sentence = State.SERVING, True, "Serving now."
        await tab.until("document.querySelector('h1').textContent === 'Serving'", 8)
        assert "Serving now." in await tab.js(TEXT)
        assert await tab.js("document.getElementById('step').hidden")


async def test_a_supervisor_that_is_gone_is_not_shown_as_live(browser, serve):
    board = boards.serving()
    board.rates["generation"] = 846.4
    web = await serve(board)
    async with browser.tab(*PHONE) as tab:
        await tab.open(url(web))
        assert "846" in await tab.js(TEXT)
        assert "Live" in await tab.js(TEXT)
        port = web.port
        await web.stop()
        await tab.until("document.querySelector('h1').textContent === 'No answer'", 10)
        text = await tab.js(TEXT)
        assert "The supervisor has not answered since" in text
        assert "Live" not in text
        assert "846" not in text
        assert "Last known: Serving" in text
        assert await tab.js("document.title") == "No answer · Hearth"
        path = keep("no-answer-360")
        if path is not None:
            await tab.screenshot(path)
        again = Web(board, Metrics(), "127.0.0.1", port)
        await again.start()
        await tab.until("document.querySelector('h1').textContent === 'Serving'", 10)
        await again.stop()


async def test_a_hidden_page_asks_for_nothing(browser, serve):
    web = await serve(boards.serving())
    async with browser.tab() as tab:
        await tab.open(url(web))
        await tab.js(
            "Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true});"
            "window.away = true; document.dispatchEvent(new Event('visibilitychange'))"
        )
        before = len(tab.requests)
        await asyncio.sleep(4)
        assert len(tab.requests) == before
        await tab.js("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
        await asyncio.sleep(1)
        assert len(tab.requests) == before + 1


async def test_times_are_the_viewers(browser, serve):
    board = boards.stepped_down()
    board.incidents.append(boards.Incident(1_800_000_000, boards.KILLED, board.plan, "start again"))
    web = await serve(board)
    for zone, said in (
        ("Asia/Tokyo", "15 Jan 2027, 17:00:00"),
        ("America/New_York", "15 Jan 2027, 03:00:00"),
    ):
        async with browser.tab(zone=zone) as tab:
            await tab.open(url(web))
            text = await tab.js(TEXT)
            assert said in text
            assert zone in text


async def test_text_of_the_engine_is_never_markup(browser, serve):
    attack = '</script><img src=x onerror="window.pwned=1"><script>window.pwned=1</script><!--'
    board = boards.stepped_down()
    evil = boards.Failure(boards.FailureKind.UNKNOWN, boards.Phase.LOAD, evidence=(attack,) * 3, hint=attack)
    board.incidents.append(boards.Incident(time.time(), evil, board.plan, attack))
    board.model = board.sentence = board.endpoint = board.progress = board.engine_version = attack
    board.downgrades, board.canary_detail = [attack], attack
    web = await serve(board)
    async with browser.tab(*PHONE) as tab:
        await tab.open(url(web))
        await tab.js("refresh()")
        await check_fits(tab)
        assert await tab.js("window.pwned") is None
        assert await tab.js("document.querySelectorAll('main img, main script').length") == 0
        assert await tab.js("document.getElementById('model').textContent") == attack
        assert tab.errors == []


async def test_a_nan_of_the_engine_is_a_dash(browser, serve):
    board = boards.serving()
    board.kv_usage = board.rates["generation"] = float("nan")
    board.history.add(time.time() + 20, float("nan"), float("inf"))
    web = await serve(board)
    async with browser.tab() as tab:
        await tab.open(url(web))
        assert "NaN" not in await tab.js("document.body.outerHTML")
        assert tab.errors == []
