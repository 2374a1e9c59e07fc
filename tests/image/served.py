"""A container of the image that serves: asked from inside, since nothing is published."""

from __future__ import annotations

import json
import time
from typing import Any

LIMIT = 1500.0
"""Seconds for two engine starts on a busy machine."""
GET = "import sys,urllib.request as r;print(r.urlopen('http://localhost:9400' + sys.argv[1]).read().decode())"


def inside(container: Any, *command: str) -> tuple[int, str]:
    """Run a command in the container."""
    code, said = container.exec_run(list(command))
    return code, said.decode("utf-8", "replace")


def status(container: Any) -> dict[str, Any]:
    """What /status says; empty where nothing answers yet."""
    code, said = inside(container, "python3", "-c", GET, "/status")
    found: dict[str, Any] = json.loads(said) if code == 0 else {}
    return found


def serving(container: Any) -> dict[str, Any]:
    """The status once the engine serves."""
    ends = time.monotonic() + LIMIT
    while time.monotonic() < ends:
        container.reload()
        assert container.status == "running", container.logs(tail=40).decode()
        found = status(container)
        if found.get("ready"):
            return found
        time.sleep(3)
    raise AssertionError(f"not ready after {LIMIT} s: {container.logs(tail=40).decode()}")
