"""Stand-in for exporters that can't run here: serves recorded pages, whose counters grow as time passes.

Pages (tests/monitoring/pages), and where they are from:
- nvitop-h200.txt, hearth-host-h200.txt: recorded on a host with two NVIDIA H200 (driver 580.159.04).
- engine-colon.txt, engine-underscore.txt: recorded from SGLang 0.5.23 on CPU, asked as Prometheus 2 asks,
  with prometheus-client 0.22.1 and 0.26.0; only what the rules read.
- engine-0.5.21.txt: recorded from SGLang 0.5.21 in the same way, with prometheus-client 0.22.1; what the
  rules and Hearth itself read.
- hearth.txt: recorded from Hearth under the same load.
- systemd.txt: the lines of node exporter 1.5 on a systemd host, for a unit that is active.
- dcgm.txt, gpu-fault.txt: not recorded, but written as DCGM exporter's fields and Hearth's code have it.
"""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGES = Path(__file__).parent / "pages"
COUNTERS = ("_total", "_bucket", "_sum", "_count")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)")


def grown(page: str, factor: float, now: float) -> str:
    """The page with its counters multiplied and its timestamps set to now."""
    return "\n".join(_line(line, factor, now) for line in page.splitlines()) + "\n"


def _line(line: str, factor: float, now: float) -> str:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return line
    name, labels, value = found[1], found[2] or "", float(found[3])
    if name.endswith("_timestamp_seconds"):
        value = now
    elif name.endswith(COUNTERS):
        value *= factor
    return f"{name}{labels} {value}"


class RecordedPages:
    """Serves each page under its file name."""

    def __init__(self) -> None:
        began = time.time()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                now = time.time()
                page = (PAGES / self.path.strip("/")).read_text()
                body = grown(page, 1 + (now - began) / 10, now).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def target(self, page: str, host: str) -> dict[str, object]:
        """A target of Prometheus for one page."""
        labels = {"host": host, "model": "standin", "standin": "yes", "__metrics_path__": f"/{page}"}
        return {"targets": [self.address], "labels": labels}
