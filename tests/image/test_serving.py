"""The `cpu` image as a host runs it: read-only, no capabilities, no network, its own user, a tiny model.

A fault is planted in the wanted plan, as in the demo: the engine dies in capture, Hearth steps down, and what
was asked for streams out of the container.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hearth.image.look import SEAL

from .conftest import ROOT, TAG
from .served import inside, serving

CHAT = """
import json, sys, urllib.request as r
body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "stream": True}
q = r.Request("http://127.0.0.1:30000/v1/chat/completions", json.dumps(body).encode(),
              {"Content-Type": "application/json"})
for line in r.urlopen(q, timeout=120):
    sys.stdout.write(line.decode())
"""


def config(folder: Path) -> Path:
    """The demo's config, with the image's own places."""
    said = yaml.safe_load((ROOT / "demo/hearth.demo.yaml").read_text())
    said["model"]["path"] = "/models/tiny"
    said["engine"]["python"] = "python3"
    said["engine"]["env"].update(PYTHONPATH="/faults", HEARTH_FAULT="capture_prefill")
    del said["ports"], said["paths"]
    path = folder / "hearth.yaml"
    path.write_text(yaml.safe_dump(said))
    path.chmod(0o644)
    return path


@pytest.fixture(scope="module")
def container(client: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`hearth serve` in a sealed container, and its log printed if a test fails."""
    folder = tmp_path_factory.mktemp("config")
    state = "mode=0750,uid=10001,gid=10001"
    started = client.containers.run(
        TAG,
        detach=True,
        volumes={
            str(config(folder)): {"bind": "/etc/hearth/hearth.yaml", "mode": "ro"},
            str(model): {"bind": "/models/tiny", "mode": "ro"},
            str(ROOT / "tests/faults"): {"bind": "/faults", "mode": "ro"},
        },
        shm_size="1g",
        **{**SEAL, "tmpfs": {**SEAL["tmpfs"], "/var/lib/hearth": state}},
    )
    yield started
    print(started.logs(tail=60).decode("utf-8", "replace"))
    started.remove(force=True, v=True)


def test_the_planted_fault_is_named_and_stepped_down(container: Any) -> None:
    found = serving(container)
    assert [failure["kind"] for failure in found["failures"]] == ["graph_capture"]
    assert found["plan"]["wanted"]["prefill"] == "breakable"
    assert found["plan"]["effective"]["prefill"] == "disabled"
    assert found["ladder_steps"] >= 1


def test_an_answer_streams(container: Any) -> None:
    serving(container)
    code, said = inside(container, "python3", "-c", CHAT)
    assert code == 0, said
    lines = [line for line in said.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 5


def test_who_runs_and_what_pid_1_is(container: Any) -> None:
    serving(container)
    assert inside(container, "id", "-u")[1].strip() == "10001"
    assert inside(container, "cat", "/proc/1/comm")[1].strip() == "tini"
    assert inside(container, "touch", "/opt/hearth/x")[0] != 0
    capabilities = inside(container, "cat", "/proc/1/status")[1]
    assert "CapEff:\t0000000000000000" in capabilities
    assert "NoNewPrivs:\t1" in capabilities


def test_the_health_check_asks_hearth(container: Any) -> None:
    serving(container)
    command = container.image.attrs["Config"]["Healthcheck"]["Test"]
    assert command[0] == "CMD"
    assert inside(container, *command[1:])[0] == 0


def test_a_stop_drains_and_ends_cleanly(container: Any) -> None:
    serving(container)
    container.stop(timeout=120)
    assert container.wait()["StatusCode"] == 0, container.logs(tail=20).decode()
