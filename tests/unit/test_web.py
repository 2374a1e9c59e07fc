"""The web port: what each address answers, to whom, and what it costs."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from hearth import web as module
from hearth.board import Board, Incident
from hearth.errors import PortInUse
from hearth.failure import Failure, FailureKind, Phase
from hearth.ladder import GraphPlan
from hearth.metrics import Metrics
from hearth.states import State
from hearth.web import Held, Web, escape_for_script, to_json

PLAN = GraphPlan("breakable", "full", 32)
ATTACK = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>&"


@pytest.fixture
def board() -> Board:
    return Board(wanted=PLAN, plan=PLAN, model="tiny", engine_version="0.5.23")


@pytest.fixture
async def client(board):
    web = Web(board, Metrics("0.5.23"), "127.0.0.1", 0)
    async with TestClient(TestServer(web.application())) as running:
        yield running


async def test_livez_follows_the_supervisors_loop(client, board):
    assert (await client.get("/livez")).status == 200
    board.loop_turned_at = time.monotonic() - module.LOOP_LATE - 5
    answer = await client.get("/livez")
    assert answer.status == 503
    assert re.fullmatch(r"the supervisor's loop has not turned for 3[56] s\n", await answer.text())


@pytest.mark.parametrize("state", [state for state in State if state is not State.SERVING])
async def test_readyz_is_no_in_every_state_but_serving(client, board, state):
    board.state, board.canary_ok, board.sentence = state, True, "One thing.\nAnother."
    answer = await client.get("/readyz")
    assert answer.status == 503
    assert await answer.text() == f"{state.value}: One thing. Another.\n"


async def test_readyz_needs_the_known_answer(client, board):
    board.state = State.SERVING
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (503, "serving: known-answer request: not asked yet\n")
    board.canary_detail = "expected '4', got '!!'"
    assert "expected '4', got '!!'" in await (await client.get("/readyz")).text()
    board.canary_ok = True
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (200, "ok\n")


async def test_metrics_is_the_text_format(client):
    answer = await client.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'hearth_build_info{engine_version="0.5.23"' in await answer.text()


async def test_status_is_the_board_and_the_time(client, board):
    board.incidents.append(Incident(1.5, Failure(FailureKind.OOM, Phase.LOAD), PLAN, "stop"))
    document = await (await client.get("/status")).json()
    assert abs(document.pop("now") - time.time()) < 5
    assert document == json.loads(json.dumps(board.to_json()))


async def test_status_stays_json_when_the_engine_reports_no_numbers(client, board):
    board.state = State.SERVING
    board.kv_usage, board.passes = float("nan"), {"decode_none": float("inf")}
    board.history.add(100.0, float("nan"), 1.0)
    document = json.loads(await (await client.get("/status")).text(), parse_constant=pytest.fail)
    assert document["kv_usage"] is None
    assert document["graph_passes"] == {"decode_none": None}
    assert document["history"] == [[100.0, None, 1.0]]


async def test_page_carries_the_status_and_no_markup_from_it(client, board):
    board.model = board.sentence = ATTACK
    board.incidents.append(
        Incident(1.0, Failure(FailureKind.UNKNOWN, Phase.INIT, evidence=(ATTACK,), hint=ATTACK), PLAN, ATTACK)
    )
    html = await (await client.get("/")).text()
    assert "<img" not in html
    assert "alert(1)</script>" not in html
    assert html.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="status">(.*?)</script>', html)
    assert data is not None
    first = json.loads(data[1])
    assert first["model"] == first["failures"][0]["evidence"][0] == ATTACK


async def test_page_has_one_style_and_one_script_and_the_policy_names_their_hashes(client):
    answer = await client.get("/")
    html, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    assert html.count("<style") == html.count("<style>") == 1
    assert html.count("<script>") == 1
    assert len(re.findall(r"(?:style|script)-src 'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none';")
    assert module._hashes(html, "script") in policy


async def test_page_asks_nobody_else_and_makes_no_html_from_text(client):
    html = await (await client.get("/")).text()
    outside = set(re.findall(r"https?://[^\s\"'`<]+", html)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way not in html
    assert not re.search(r"<[^>]* (?:style|on\w+)=", html)


@pytest.mark.parametrize("path", ["/", "/livez", "/readyz", "/metrics", "/status", "/nowhere"])
async def test_every_answer_has_the_headers(client, path):
    answer = await client.get(path, headers={"Host": "evil.example", "Origin": "http://evil.example"})
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Server"] == "hearth"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert not [name for name in answer.headers if name.startswith("Access-Control")]
    assert "evil" not in f"{answer.headers} {await answer.text()}"


@pytest.mark.parametrize("path", ["/", "/livez", "/readyz", "/metrics", "/status"])
async def test_head_is_get_without_a_body(client, path):
    head, get = await client.head(path), await client.get(path)
    assert head.status == get.status
    assert head.headers["Content-Type"] == get.headers["Content-Type"]
    assert await head.read() == b""


@pytest.mark.parametrize("path", ["/<script>", "/status/", "/livez/x", "/..%2f..%2fetc/passwd", "/page.html"])
async def test_an_unknown_path_gets_one_plain_line(client, path):
    answer = await client.get(path)
    assert answer.status == 404
    assert answer.content_type == "text/plain"
    assert await answer.text() == "not found: there are /, /livez, /readyz, /metrics and /status\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/status"])
async def test_only_get_and_head(client, method, path):
    answer = await client.request(method, path, data=b"x" if method != "TRACE" else None)
    assert answer.status == 405
    assert set(answer.headers["Allow"].split(",")) == {"GET", "HEAD"}
    assert await answer.text() == "only GET and HEAD are answered here\n"


async def test_start_chooses_a_port_and_stop_frees_it(board):
    web = Web(board, Metrics(), "127.0.0.1", 0)
    await web.start()
    port = web.port
    assert port > 0
    with socket.create_connection(("127.0.0.1", port), 2):
        async with asyncio.timeout(30):  # aiohttp's own grace is 60 s
            await web.stop()
    await web.stop()
    again = Web(board, Metrics(), "127.0.0.1", port)
    await again.start()
    await again.stop()


async def test_a_taken_port_names_its_owner(board):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            PortInUse, match=rf"port {port} on 127\.0\.0\.1 is taken by process \d+: .*python"
        ):
            await Web(board, Metrics(), "127.0.0.1", port).start()


async def test_a_port_lost_after_the_check_is_still_a_named_error(board, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "ensure_free", lambda host, port: calls.append(port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"can't listen on 127.0.0.1 port {port}"):
            await Web(board, Metrics(), "127.0.0.1", port).start()
    assert calls == [port, port]


class Clock:
    """A clock that only rendering and `pass_` move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: float) -> None:
        self.now, self.cost, self.renders = 100.0, cost, 0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.held = Held(self._render)

    def _render(self) -> bytes:
        self.now += self.cost
        self.renders += 1
        return b"%d" % self.renders

    def asked_every(self, pause: float, seconds: float) -> int:
        """How often it is rendered when it is asked for at this pace."""
        before, end = self.renders, self.now + seconds
        while self.now < end:
            self.held.get()
            self.now += pause
        return self.renders - before


@pytest.mark.parametrize("cost", [0.0002, 0.001, 0.005, 0.02])
def test_rendering_takes_two_percent_of_the_loop_however_often_it_is_asked_for(monkeypatch, cost):
    clock = Clock(monkeypatch, cost)
    assert clock.asked_every(0.0001, 10.0) * cost <= 0.0201 * 10.0


@pytest.mark.parametrize("cost", [0.0, 0.02, 5.0])
def test_no_body_is_older_than_a_second(monkeypatch, cost):
    clock = Clock(monkeypatch, cost)
    assert clock.held.get() == b"1"
    clock.now += module.HOLD_MAX
    assert clock.held.get() == b"2"


LEAVES = st.none() | st.booleans() | st.floats() | st.text()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10))
def test_any_status_survives_the_script_element(document):
    text = escape_for_script(to_json(document).decode())
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text, parse_constant=pytest.fail) == json.loads(to_json(document))


def test_a_page_without_a_place_for_the_status_is_refused():
    with pytest.raises(ValueError, match="has no <script"):
        module.Page("<html></html>")
