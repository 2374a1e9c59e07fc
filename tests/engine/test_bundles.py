"""What failures of a real engine leave: bundles with stacks, documents at a webhook, no secret in either."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.engine.conftest import Hearth, gone

KEY = "Zx9-planted-Key!q7"
TOKEN = "T0kenInThePath42"


class Receiver:
    """A webhook in a thread of its own: what it got, oldest first."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._start())
        started.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/{rest:.*}", self._take)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]

    async def _take(self, request: web.Request) -> web.Response:
        self.got.append((request.path, await request.json()))
        return web.Response()

    def wait_for(self, event: str) -> dict[str, Any]:
        """The newest document of that event, once it is there."""
        end = time.monotonic() + 60
        while not (found := [document for _, document in self.got if document["event"] == event]):
            assert time.monotonic() < end, f"no {event} among {self.got}"
            time.sleep(0.05)
        return found[-1]

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def webhook() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


def bundles(hearth: Hearth) -> list[Path]:
    return sorted((hearth.folder / "state/failures").iterdir())


def test_a_hang_in_capture_leaves_stacks_and_the_step_down_is_told(hearth: Hearth, webhook: Receiver) -> None:
    for name, text in (("key", KEY), ("url", f"http://127.0.0.1:{webhook.port}/{TOKEN}")):
        (hearth.folder / name).write_text(text)
    hearth.config["secrets"] = {"api_key_file": str(hearth.folder / "key")}
    hearth.config["notify"] = {"url_file": str(hearth.folder / "url")}
    hearth.config["engine"]["env"]["HEARTH_FAULT"] = "capture_hang"
    hearth.config["limits"]["phases"] = {"capture_prefill": {"silence": 15}}
    hearth.config["canary"].update(interval=5, timeout=30)
    hearth.start()
    status = hearth.wait_ready()
    (bundle,) = bundles(hearth)
    assert bundle.name.endswith("-hang")
    assert status["failures"][0]["bundle"] == bundle.name
    document = json.loads((bundle / "failure.json").read_text())
    assert (document["kind"], document["phase"], document["action"]) == (
        "hang",
        "capture_prefill",
        "step_down",
    )
    stacks = (bundle / "stacks.txt").read_text()
    assert "block (hearth_faults.py:" in stacks, stacks
    assert stacks.count("== process ") >= 3, "main, scheduler, detokenizer"
    phases = json.loads((bundle / "phases.json").read_text())
    assert phases["silent_seconds"] > 14
    assert phases["seconds"]["capture_prefill"] > 14
    assert {"spawn", "init", "load", "capture_prefill"} <= set(phases["seconds"])
    versions = json.loads((bundle / "versions.json").read_text())
    assert versions["engine_environment"]["sglang"] == "0.5.23"
    assert versions["engine_environment"]["torch"].startswith("2.")
    log = (bundle / "log.txt").read_text()
    assert "== capture_prefill, " in log
    assert "Capture target prefill CUDA graph begin" in log.partition("== capture_prefill")[2]
    told = webhook.wait_for("step_down")
    assert told["bundle"] == bundle.name
    assert told["plan"]["next"]["prefill"] == "disabled"
    assert told["failure"]["kind"] == "hang"
    assert webhook.wait_for("ready_again")["downtime_seconds"] > 1


def test_a_stopped_scheduler_leaves_its_stack_too(hearth: Hearth) -> None:
    stopped = hearth.scheduler()
    stopped.send_signal(signal.SIGSTOP)
    status = hearth.wait_until("the hang", lambda s: len(s["failures"]) == 2, 300)
    assert (status["failures"][-1]["kind"], status["failures"][-1]["phase"]) == ("hang", "serving")
    stacks = (bundles(hearth)[-1] / "stacks.txt").read_text()
    (mine,) = [part for part in stacks.split("== process ") if part.startswith(f"{stopped.pid}:")]
    assert "stopped" in mine.splitlines()[0]
    assert "event_loop" in mine, mine
    assert hearth.process is not None
    hearth.process.send_signal(signal.SIGTERM)
    assert hearth.wait_exit(120) == 0
    assert gone(hearth)


def test_giving_up_is_told_before_the_end(hearth: Hearth, webhook: Receiver) -> None:
    hearth.config["engine"]["env"]["HEARTH_FAULT"] = "capture_prefill"
    hearth.config["graphs"]["ladder"] = {"enabled": False}
    assert hearth.cli("promote", "-c", str(hearth.config_file)).returncode == 0
    hearth.start()
    assert hearth.wait_exit() == 70
    told = [document for _, document in webhook.got if document["event"] == "give_up"]
    assert [(document["exit_code"], document["failure"]["kind"]) for document in told] == [
        (70, "graph_capture")
    ]
    newest = bundles(hearth)[-1]
    assert newest.name.endswith("-graph_capture")
    assert told[0]["bundle"] == newest.name
    assert not (newest / "stacks.txt").exists()


def test_hearth_failures_lists_and_shows_them(hearth: Hearth) -> None:
    listed = hearth.cli("failures", "-c", str(hearth.config_file), "--json")
    assert listed.returncode == 0, listed.stderr
    failures = json.loads(listed.stdout)["failures"]
    assert [failure["kind"] for failure in failures] == ["graph_capture", "hang", "hang"]
    shown = hearth.cli("failures", "-c", str(hearth.config_file), "3")
    assert "block (hearth_faults.py:" in shown.stdout
    assert "Capture target prefill CUDA graph begin" in shown.stdout


def test_no_secret_is_in_a_bundle_a_document_or_the_log(hearth: Hearth, webhook: Receiver) -> None:
    files = [file for bundle in bundles(hearth) for file in bundle.iterdir()]
    assert len(files) == 26
    for file in files:
        text = file.read_text()
        assert KEY not in text, file
        assert TOKEN not in text, file
    assert "'api_key': '***'" in (bundles(hearth)[0] / "log.txt").read_text(), "0.5.23 prints the key"
    assert yaml.safe_load((bundles(hearth)[0] / "config.yaml").read_text())["model"]["served_name"] == "tiny"
    assert {path for path, _ in webhook.got} == {f"/{TOKEN}"}
    assert KEY not in json.dumps([document for _, document in webhook.got])
    log = hearth.log.read_text(errors="replace")
    assert KEY not in log
    assert TOKEN not in log
