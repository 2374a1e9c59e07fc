"""A real Prometheus and Alertmanager watch a real engine under a real `hearth serve`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import Hearth, engine_python, tiny_model
from tests.monitoring import stack
from tests.monitoring.story import Story, told
from tests.tools import installed

__all__ = ["engine_python", "tiny_model"]
CLIENTS = {"0.22.1": "prometheus-client==0.22.1", "newest": "prometheus-client"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            on_a_host = item.path.name == "test_role.py"
            item.add_marker(pytest.mark.host if on_a_host else pytest.mark.monitoring)


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Prometheus, Alertmanager, node exporter and their tools from the distribution."""
    installed(stack.PACKAGES)


def client_folder(tmp_path_factory: pytest.TempPathFactory, client: str) -> Path:
    """A folder with that prometheus-client alone, to be found before any other."""
    folder = tmp_path_factory.mktemp(f"client-{client}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), CLIENTS[client]], check=True)
    ask = "import importlib.metadata as m; print(m.version('prometheus-client'))"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    found = subprocess.check_output([sys.executable, "-c", ask], env=environment, text=True).strip()
    assert client in ("newest", found)
    return folder


@pytest.fixture(scope="module", params=CLIENTS)
def story(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    engine_python: Callable[[str], str],
    tiny_model: str,
) -> Iterator[Story]:
    """The story, told with each prometheus-client in Hearth and in the engine."""
    client = client_folder(tmp_path_factory, request.param)
    folder = tmp_path_factory.mktemp(f"story-{request.param}")
    hearth = Hearth(folder, engine_python("0.5.23"), tiny_model)
    hearth.config["engine"]["env"]["PYTHONPATH"] += os.pathsep + str(client)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(client))
        try:
            with told(request.param, hearth, folder) as story:
                yield story
        finally:
            hearth.clean_up()
