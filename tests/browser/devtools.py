"""A real headless Chromium, driven over its DevTools protocol with nothing but aiohttp."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

# --no-sandbox: Chromium refuses to run as root with it, and CI is root. The rest keeps it off the network.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 30.0


def find_chromium() -> str | None:
    """The browser's path; `CHROMIUM` in the environment comes first."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


class Tab:
    """One page. Remembers every request it made, and every error and policy violation it reported."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._count = socket, 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def read(self) -> None:
        """Take in what the browser sends, until it hangs up."""
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._waiting.pop(data["id"]).set_result(data)
            else:
                self._note(data["method"], data["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["exception"].get("description", "?"))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command; its result."""
        self._count += 1
        waiting = self._waiting[self._count] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._count, "method": method, "params": params})
        answer = await asyncio.wait_for(waiting, PATIENCE)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    async def prepare(self, width: int, height: int, scheme: str, zone: str) -> None:
        """Size in CSS pixels, `light` or `dark`, and the viewer's time zone."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        await self.call("Emulation.setTimezoneOverride", timezoneId=zone)

    async def open(self, url: str) -> None:
        """Go there and wait until it is loaded."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), PATIENCE)

    async def js(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 15.0) -> None:
        """Wait until an expression is true."""
        for _ in range(int(seconds / 0.1)):
            if await self.js(expression):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not within {seconds:g} s: {expression}")

    async def screenshot(self, path: Path, whole: bool = True) -> None:
        """A PNG of the whole page, or of what is in view."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize" if whole else "cssLayoutViewport"]
        width = size.get("width", size.get("clientWidth"))
        height = size.get("height", size.get("clientHeight"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


class Chromium:
    """A running browser."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session, self._address = session, address

    @asynccontextmanager
    async def tab(
        self, width: int = 1280, height: int = 900, scheme: str = "light", zone: str = "Europe/Berlin"
    ) -> AsyncIterator[Tab]:
        """A new, empty page of this size."""
        async with self._session.put(f"{self._address}/json/new?about:blank") as response:
            target = await response.json(content_type=None)
        async with self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = Tab(socket)
            reading = asyncio.create_task(tab.read())
            await tab.prepare(width, height, scheme, zone)
            yield tab
            await tab.call("Page.close")
        await reading


@asynccontextmanager
async def chromium(path: str) -> AsyncIterator[Chromium]:
    """Start a browser with an empty profile of its own; it is gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path, *FLAGS, f"--user-data-dir={profile}", stderr=asyncio.subprocess.DEVNULL
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                yield Chromium(session, f"http://127.0.0.1:{port}")
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    for _ in range(int(PATIENCE / 0.1)):
        assert process.returncode is None, f"chromium ended at once with status {process.returncode}"
        if file.exists() and file.read_text():
            return int(file.read_text().splitlines()[0])
        await asyncio.sleep(0.1)
    raise AssertionError(f"chromium opened no DevTools port within {PATIENCE:g} s")
