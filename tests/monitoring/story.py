"""One engine's story under load, told to a real Prometheus: a capture that fails, a crash, alerts."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitoring.query import Prometheus

from tests.engine.conftest import Hearth
from tests.monitoring.stack import Webhook, alertmanager, node_exporter, prometheus
from tests.monitoring.standin import RecordedPages

ROOT = Path(__file__).parents[2]
HOST = "live"
ALERT_LIMIT = 240.0
SCRIPT = ROOT / "ansible/roles/monitoring/files/hearth_host_metrics.py"


@dataclass
class Story:
    """What is left when the engine is gone: a Prometheus that saw it all, and the alerts that arrived."""

    client: str
    source: Prometheus
    webhook: Webhook
    begin: float
    end: float


class Load:
    """Two clients that chat all the time, with ever new prompts; one of them streams."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._chat, args=(seed,), daemon=True) for seed in (1, 2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _chat(self, seed: int) -> None:
        words = random.Random(seed)
        while not self._stop.is_set():
            prompt = " ".join(words.choice(["red", "blue", "old", "tall", "far"]) for _ in range(60))
            # While the engine restarts nobody answers: that is part of the story.
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask(self._url, prompt, 40, stream=seed == 1)
            self._stop.wait(0.3)

    def abort(self) -> None:
        """Abort whatever runs."""
        request = urllib.request.Request(
            f"{self._url}/abort_request", b'{"abort_all": true}', {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10):
            pass


def ask(url: str, prompt: str, tokens: int, stream: bool = False) -> None:
    """A chat request, answered in whole."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps({**body, "ignore_eos": True, "stream": stream}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def targets(hearth: Hearth, node: int, pages: RecordedPages) -> dict[str, list[Any]]:
    """What Prometheus scrapes: the real ones, and the stand-ins under hosts of their own."""

    def real(port: int, **labels: str) -> dict[str, Any]:
        return {"targets": [f"127.0.0.1:{port}"], "labels": {"host": HOST, **labels}}

    return {
        "hearth": [
            real(hearth.port, model="tiny"),
            pages.target("hearth.txt", "standin-nvitop"),
            pages.target("gpu-fault.txt", "standin-gpu-fault"),
        ],
        "engine": [
            real(hearth.engine_port, model="tiny"),
            pages.target("engine-colon.txt", "standin-colon"),
            pages.target("engine-underscore.txt", "standin-underscore"),
            pages.target("engine-0.5.21.txt", "standin-0.5.21"),
        ],
        "node": [
            real(node),
            pages.target("hearth-host-h200.txt", "standin-nvitop"),
            pages.target("systemd.txt", "standin-systemd"),
        ],
        "gpu": [pages.target("nvitop-h200.txt", "standin-nvitop"), pages.target("dcgm.txt", "standin-dcgm")],
    }


@contextlib.contextmanager
def told(client: str, hearth: Hearth, folder: Path) -> Iterator[Story]:
    """Tell the story; the engine is gone when the block begins."""
    pages, webhook = RecordedPages(), Webhook()
    with contextlib.ExitStack() as stack:
        stack.callback(pages.close)
        stack.callback(webhook.close)
        node = stack.enter_context(node_exporter(folder / "node"))
        subprocess.run([sys.executable, str(SCRIPT), str(folder / "node/textfile")], check=True)
        manager = stack.enter_context(alertmanager(folder / "alertmanager", webhook.url))
        seen = targets(hearth, node, pages)
        source = Prometheus(stack.enter_context(prometheus(folder / "prometheus", manager, seen)))
        begin = time.time()
        live_through(hearth, webhook)
        end = time.time()
        hearth.clean_up()
        wait_for_alert(webhook, "HearthDown")
        yield Story(client, source, webhook, begin, end)


def live_through(hearth: Hearth, webhook: Webhook) -> None:
    """A fallback, load, a crash, and load until both alerts have arrived."""
    hearth.config["engine"]["env"]["HEARTH_FAULT"] = "capture_prefill"
    hearth.start()
    hearth.wait_ready()
    with Load(hearth.engine_url) as load:
        time.sleep(8)
        load.abort()
        time.sleep(4)
        hearth.scheduler().kill()
        hearth.wait_until("the crash", lambda status: len(status["failures"]) == 2)
        hearth.wait_ready()
        wait_for_alert(webhook, "Degraded")
        wait_for_alert(webhook, "CrashLoop")
        time.sleep(12)


def wait_for_alert(webhook: Webhook, name: str) -> None:
    """Until the alert has reached the receiver."""
    end = time.monotonic() + ALERT_LIMIT
    while name not in webhook.firing():
        assert time.monotonic() < end, f"{name} did not arrive; what did: {sorted(webhook.firing())}"
        time.sleep(0.5)
