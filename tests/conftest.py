"""How the tests share a machine: what belongs together runs in one process, the longest first.

`make test` runs several processes (pytest-xdist, `--dist loadgroup`). One host, Engine, Prometheus or engine
version is shared by the tests of a group; unit tests fill the gaps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST_FIRST = ("host", "image", "launch", "monitoring", "engine", "kernels", "bake", "browser", "wheels")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))


def _turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(HERE).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


def _group(item: pytest.Item) -> str:
    place = item.path.relative_to(HERE)
    match place.parts[0]:
        case "unit":
            return ""
        case "host" | "image":
            return "docker"  # one Engine, with one cache of layers
        case "launch" | "wheels" as folder:
            return folder
        case "kernels":
            callspec = getattr(item, "callspec", None)
            return f"kernels-{callspec.params.get('flashinfer_version')}" if callspec else "kernels"
        case _:
            return str(place)
