"""What Debian 12's Python 3.11.2 does otherwise than later ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

APP = Path(__file__).parents[2] / "app"
FILES = sorted(APP.rglob("*.py"))


def raised_in_groups(source: str) -> list[int]:
    """Lines that raise a named exception inside `except*`: before 3.11.4 it comes out in a group again."""
    groups = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.TryStar)]
    inside = [line for group in groups for handler in group.handlers for line in ast.walk(handler)]
    return [node.lineno for node in inside if isinstance(node, ast.Raise) and node.exc is not None]


def test_the_search_finds_one() -> None:
    assert raised_in_groups("try:\n    pass\nexcept* OSError as e:\n    raise e.exceptions[0]\n") == [4]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(APP)) for path in FILES])
def test_nothing_is_raised_inside_except_star(path: Path) -> None:
    assert raised_in_groups(path.read_text(encoding="utf-8")) == []
