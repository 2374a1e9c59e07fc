"""A real Prometheus, Alertmanager and node exporter with data, ports and configuration of the test's own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from monitoring.rules import FOLDER, files, shortened

from tests.tools import free_port

PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
    "prometheus-node-exporter": "prometheus-node-exporter",
}
RANGES, WAITS = 6, 60
"""How many times shorter the ranges and the waits of the rules are in the test."""
LIMITS = {"restarts_per_hour": 2.0, "gpus": 2.0}
START_LIMIT = 60.0


@contextlib.contextmanager
def process(command: list[str], folder: Path, ready: str) -> Iterator[None]:
    """A process that runs until the end of the block, entered when the URL `ready` answers."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        _wait(running, ready, folder / "log")
        yield
    finally:
        running.terminate()
        running.wait(30)


def _wait(running: subprocess.Popen[bytes], ready: str, log: Path) -> None:
    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end and running.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=2):
            return
        time.sleep(0.1)
    raise AssertionError(f"{running.args}: no answer from {ready}\n{log.read_text(errors='replace')[-2000:]}")


class Webhook:
    """Receives what Alertmanager sends."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        received = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.extend(json.loads(body)["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def firing(self) -> set[str]:
        """Names of the alerts that have arrived as firing."""
        return {alert["labels"]["alertname"] for alert in self.alerts if alert["status"] == "firing"}


@contextlib.contextmanager
def alertmanager(folder: Path, webhook: str) -> Iterator[int]:
    """The committed configuration with a receiver and without its waits; yields the port."""
    port = free_port()
    config = yaml.safe_load((FOLDER.parent / "alertmanager/alertmanager.yml").read_text())
    config["route"].update(receiver="test", group_wait="1s", group_interval="2s")
    config["receivers"].append({"name": "test", "webhook_configs": [{"url": webhook}]})
    folder.mkdir(exist_ok=True)
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml"]
    command += [f"--storage.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with process([*command, "--cluster.listen-address="], folder, f"http://127.0.0.1:{port}/-/ready"):
        yield port


@contextlib.contextmanager
def prometheus(folder: Path, alertmanager_port: int, targets: dict[str, list[Any]]) -> Iterator[str]:
    """The committed configuration and rules, every second and with short durations; yields the URL."""
    port = free_port()
    _write_config(folder, alertmanager_port, targets)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", f"--web.external-url=http://127.0.0.1:{port}/"]
    command += [f"--web.user-assets={FOLDER.parent}"]
    url = f"http://127.0.0.1:{port}"
    with process(command, folder, f"{url}/-/ready"):
        yield url


def _write_config(folder: Path, alertmanager_port: int, targets: dict[str, list[Any]]) -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [
        f"127.0.0.1:{alertmanager_port}"
    ]
    for path in files():
        short = folder / path.relative_to(FOLDER)
        short.parent.mkdir(parents=True, exist_ok=True)
        short.write_text(shortened(path.read_text(), RANGES, WAITS, LIMITS))
    (folder / "targets").mkdir(exist_ok=True)
    for path in (FOLDER / "targets").glob("*.yml"):
        (folder / "targets" / path.name).write_text(yaml.safe_dump(targets.get(path.stem, [])))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))


@contextlib.contextmanager
def node_exporter(folder: Path) -> Iterator[int]:
    """A node exporter that reads `folder`/textfile; yields the port."""
    port = free_port()
    (folder / "textfile").mkdir(parents=True, exist_ok=True)
    command = ["prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{port}"]
    command += [f"--collector.textfile.directory={folder}/textfile"]
    command += ["--collector.filesystem.mount-points-exclude=^/(dev|proc|run|sys|var/.+)($|/)"]
    with process(command, folder, f"http://127.0.0.1:{port}/metrics"):
        yield port
