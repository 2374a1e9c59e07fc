"""The supervisor's web port: `/livez`, `/readyz`, `/metrics`, `/status`, and the status page at `/`.

Read-only, with no state of its own: everything comes from the board and the metrics, on their event loop.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from aiohttp import web

from hearth.board import Board
from hearth.engine.ports import ensure_free
from hearth.errors import PortInUse
from hearth.metrics import Metrics

LOOP_LATE = 30.0
"""Seconds without a turn of the supervisor's loop after which `/livez` says no."""
HOLD_FACTOR, HOLD_MAX = 50.0, 1.0
"""What took t seconds to render is served for 50 t, at most 1 s: never more than 2% of the event loop."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SLOT = '<script type="application/json" id="status">null</script>'
_CLOSING_GRACE = 1.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "hearth",
    "X-Content-Type-Options": "nosniff",
}
# Applied when a response brings no policy of its own: nothing but the page needs anything.
_NOTHING = "default-src 'none'; frame-ancestors 'none'"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Held:
    """A rendered body, rendered anew only as often as its own cost allows."""

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._body = b""
        self._good_until = 0.0

    def get(self) -> bytes:
        """The body, at most `HOLD_MAX` seconds old."""
        began = time.monotonic()
        if began >= self._good_until:
            self._body = self._render()
            ended = time.monotonic()
            self._good_until = ended + min(HOLD_MAX, HOLD_FACTOR * (ended - began))
        return self._body


class Page:
    """The status page: one file with its style and script inline, and the status put in as data."""

    def __init__(self, html: str) -> None:
        self._before, slot, self._after = html.partition(_SLOT)
        if not slot:
            raise ValueError(f"page.html has no {_SLOT}")
        self.policy = _policy(html)

    def render(self, document: bytes) -> bytes:
        """The page with a first status, so that it shows something before its script asks for more."""
        slot = _SLOT.replace("null", escape_for_script(document.decode()))
        return f"{self._before}{slot}{self._after}".encode()


class Web:
    """Serves a board and its metrics on `host` and `port` (0: any free one, see `port` once started)."""

    def __init__(self, board: Board, metrics: Metrics, host: str, port: int) -> None:
        self._board = board
        self._host, self._port = host, port
        self._page = Page(files("hearth").joinpath("page.html").read_text(encoding="utf-8"))
        self._status = Held(self._render_status)
        self._metrics = Held(metrics.render)
        self._root = Held(lambda: self._page.render(self._status.get()))
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._port

    async def start(self) -> None:
        """Listen. Raises PortInUse (naming the owner) or ConfigError (a host that isn't ours)."""
        ensure_free(self._host, self._port)
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=_CLOSING_GRACE)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            await runner.cleanup()
            ensure_free(self._host, self._port)
            raise PortInUse(f"can't listen on {self._host} port {self._port}: {error.strerror}") from error
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port and every connection; does nothing when not started."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def application(self) -> web.Application:
        """The routes. GET and HEAD only; everything else gets one line."""
        app = web.Application(middlewares=[_one_line_errors])
        app.on_response_prepare.append(_add_headers)
        routes = (
            ("/", self._get_page),
            ("/livez", self._get_livez),
            ("/readyz", self._get_readyz),
            ("/metrics", self._get_metrics),
            ("/status", self._get_status),
        )
        for path, handler in routes:
            app.router.add_get(path, handler)
        return app

    async def _get_page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": self._page.policy}
        return web.Response(body=self._root.get(), content_type="text/html", charset="utf-8", headers=headers)

    async def _get_livez(self, _: web.Request) -> web.Response:
        late = time.monotonic() - self._board.loop_turned_at
        if late > LOOP_LATE:
            return _line(503, f"the supervisor's loop has not turned for {late:.0f} s")
        return _line(200, "ok")

    async def _get_readyz(self, _: web.Request) -> web.Response:
        return _line(200, "ok") if self._board.ready else _line(503, _why_not_ready(self._board))

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.get(), headers={"Content-Type": METRICS_TYPE})

    async def _get_status(self, _: web.Request) -> web.Response:
        return web.Response(body=self._status.get(), content_type="application/json")

    def _render_status(self) -> bytes:
        return to_json({**self._board.to_json(), "now": time.time()})


def to_json(document: Any) -> bytes:
    """Strict JSON in ASCII; a number that JSON doesn't have (an engine may report NaN) becomes null."""
    try:
        return json.dumps(document, allow_nan=False).encode("ascii")
    except ValueError:
        return json.dumps(_finite(document), allow_nan=False).encode("ascii")


def escape_for_script(text: str) -> str:
    """JSON that can't end the script element it stands in, nor begin a comment or another element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _policy(html: str) -> str:
    """A policy that admits exactly this page's inline style and script, by hash, and requests to itself."""
    style, script = (_hashes(html, tag) for tag in ("style", "script"))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def _why_not_ready(board: Board) -> str:
    canary = board.canary_detail or "not asked yet"
    why = f"known-answer request: {canary}" if board.state.value == "serving" else board.sentence
    return f"{board.state.value}: {why}"


def _line(status: int, text: str) -> web.Response:
    """One line of plain text, whatever is in it."""
    return web.Response(status=status, text=" ".join(text.split()) + "\n")


@web.middleware
async def _one_line_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        response = _line(405, "only GET and HEAD are answered here")
        response.headers["Allow"] = error.headers["Allow"]
        return response
    except web.HTTPNotFound:
        return _line(404, "not found: there are /, /livez, /readyz, /metrics and /status")


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.setdefault("Content-Security-Policy", _NOTHING)
