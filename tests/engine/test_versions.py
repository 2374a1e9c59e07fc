"""A second SGLang version: clean start and stop, with secrets and without a fault."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import Hearth, get

KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def older(
    tmp_path_factory: pytest.TempPathFactory, engine_python: Callable[[str], str], tiny_model: str
) -> Iterator[Hearth]:
    folder = tmp_path_factory.mktemp("older")
    runner = Hearth(folder, engine_python("0.5.21"), tiny_model, "0.5.21")
    key = folder / "api-key"
    key.write_text(KEY + "\n")
    runner.config["secrets"] = {"api_key_file": str(key)}
    runner.start()
    yield runner
    runner.clean_up()


def test_it_serves(older: Hearth) -> None:
    status = older.wait_ready()
    assert status["failures"] == []
    assert status["engine_version"] == "0.5.21"


def test_the_api_key_is_asked_for(older: Hearth) -> None:
    assert get(f"{older.engine_url}/v1/models")[0] == 401
    request = urllib.request.Request(
        f"{older.engine_url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def test_the_api_key_is_nowhere_to_be_read(older: Hearth) -> None:
    assert KEY not in Path(older.log).read_text(errors="replace")
    assert KEY not in get(f"{older.url}/status")[1]
    for process in older.engine_processes():
        assert KEY not in " ".join(process.cmdline())
        assert KEY not in str(process.environ())


def test_it_stops_cleanly(older: Hearth) -> None:
    assert older.process is not None
    older.process.send_signal(signal.SIGTERM)
    assert older.wait_exit(120) == 0
    assert not older.engine_processes()
