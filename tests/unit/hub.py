"""A stand-in for a Hugging Face hub, on loopback: enough of its API for a fetch, and faults on purpose.

No hub can be reached from the machines that run these tests. What it answers follows huggingface_hub 2.4.0's
requests: GET /api/models/REPO/revision/REV?blobs=true, and GET /REPO/resolve/COMMIT/FILE with ranges and a
redirect to another host for large files.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"
LARGE = 1000
"""Bytes from which a file counts as large (LFS)."""


def safetensors(tensors: dict[str, int]) -> bytes:
    """A file in the format, with a tensor of so many bytes under each name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    body = b"".join(bytes([index % 251]) * size for index, size in enumerate(tensors.values()))
    return len(text).to_bytes(8, "little") + text + body


def tiny_model() -> dict[str, bytes]:
    """Two shards with their index, a config, and a format that nobody wants."""
    shards = {
        "model-00001-of-00002.safetensors": {"a": 300_000},
        "model-00002-of-00002.safetensors": {"b": 200_000},
    }
    files = {name: safetensors(tensors) for name, tensors in shards.items()}
    placed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": placed}).encode()
    files["config.json"] = b'{"architectures": ["Tiny"]}'
    files["pytorch_model.bin"] = b"x" * 5000
    return files


@dataclass
class Hub:
    """The stand-in: its files, what it does wrong, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=tiny_model)
    token: str = ""
    cut: dict[str, int] = field(default_factory=dict)
    """Close the connection after so many bytes of this file, each time."""
    once: dict[str, int] = field(default_factory=dict)
    """The same, only the first time."""
    rotten: set[str] = field(default_factory=set)
    """Files of which one byte arrives wrong."""
    rotten_once: set[str] = field(default_factory=set)
    status: dict[str, list[int]] = field(default_factory=dict)
    """Statuses to answer first for a file (or `api`)."""
    ranges: bool = True
    silent: set[str] = field(default_factory=set)
    """Files whose bytes stop coming after the first half, the first time."""
    asked: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    begun: dict[str, list[int]] = field(default_factory=dict)
    """From which byte each request for a file began."""
    leaked: list[str] = field(default_factory=list)
    """Tokens that arrived at the second host."""
    release: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def listing(self) -> dict[str, Any]:
        """What the hub says a repository holds."""
        return {
            "id": REPO,
            "modelId": REPO,
            "sha": COMMIT,
            "siblings": [_row(n, d) for n, d in self.files.items()],
        }


def _row(name: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    row: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
    if len(data) >= LARGE:
        row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return row


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing: the test says what it wants to know."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._api(match[1], match[2])
        elif match := re.fullmatch(rf"/{REPO}/resolve/{COMMIT}/(.+)", path):
            self._resolve(match[1])
        elif match := re.fullmatch(r"/blob/(.+)", path):
            self._blob(match[1])
        else:
            self._error(404)

    def _refused(self, name: str) -> bool:
        waiting = self.hub.status.get(name)
        if waiting:
            self._error(waiting.pop(0))
            return True
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._error(401, "GatedRepo" if name == "api" else "")
            return True
        return False

    def _api(self, repo: str, revision: str) -> None:
        self.hub.asked["api"] += 1
        if self._refused("api"):
            return
        if repo != REPO:
            self._error(404, "RepoNotFound")
        elif revision not in ("main", "v1", COMMIT):
            self._error(404, "RevisionNotFound")
        else:
            self._answer(200, json.dumps(self.hub.listing()).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str) -> None:
        if self._refused(name):
            return
        if len(self.hub.files[name]) < LARGE:
            self._blob(name, own=True)
        else:
            self._answer(302, b"", {"Location": f"http://localhost:{self.hub.port}/blob/{name}"})

    def _blob(self, name: str, own: bool = False) -> None:
        """The bytes, from the host that large files are redirected to."""
        hub = self.hub
        hub.asked[name] += 1
        if not own and "Authorization" in self.headers:
            hub.leaked.append(self.headers["Authorization"])
        data = bytearray(hub.files[name])
        if name in hub.rotten or name in hub.rotten_once:
            data[-1] ^= 1
            hub.rotten_once.discard(name)
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if hub.ranges else None
        at = int(begin[1]) if begin else 0
        hub.begun.setdefault(name, []).append(at)
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(data) - at))
        if begin:
            self.send_header("Content-Range", f"bytes {at}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        self._send(name, bytes(data[at:]))

    def _send(self, name: str, data: bytes) -> None:
        hub = self.hub
        limit = hub.once.pop(name, hub.cut.get(name, len(data)))
        if name in hub.silent:
            hub.silent.discard(name)
            self._write(name, data[: len(data) // 2])
            hub.release.wait(60)
            self.close_connection = True
            return
        self._write(name, data[:limit])
        if limit < len(data):
            self.close_connection = True

    def _write(self, name: str, data: bytes) -> None:
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:
            self.close_connection = True
        self.hub.sent[name] += len(data)

    def _error(self, status: int, code: str = "") -> None:
        self._answer(status, b"{}", {"X-Error-Code": code} if code else {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
