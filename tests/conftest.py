"""How the tests share a machine: what belongs together runs in one process, the longest first.

`make test` runs several processes (pytest-xdist). Tests of a group share one host, Docker Engine, Prometheus
or engine; the short files fill the gaps.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ORDER = (
    "host",
    "image",
    "monitoring/test_role.py",  # at once: an Engine that starts clears the iptables chains of `host`
    "launch",
    "monitoring",
    "engine",
    "kernels",
    "bake",
    "browser",
    "wheels",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        path = str(item.path.relative_to(HERE))
        return next((n for n, start in enumerate(ORDER) if path.startswith(start)), len(ORDER))

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out groups of tests in the order above."""
    # Here, not above: the kernels' own environments run some of these tests, and have no xdist.
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Grouped(config, log)


def group(nodeid: str) -> str:
    """What a test has to run in one process with; its file, where nothing else is shared."""
    place = nodeid.partition("::")[0]
    match Path(place).parts[1]:
        case "host" | "image":
            return "docker"  # one Engine, with one cache of layers
        case "launch" | "wheels" as folder:
            return folder
        case "kernels":
            version = re.search(r"\[(\d+\.\d+\.\d+)", nodeid)
            return f"kernels {version[1]}" if version else place
        case _:
            return place
