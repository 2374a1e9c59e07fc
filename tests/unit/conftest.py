"""Unit tests that hang are failures, not a stuck run."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("hearth", deadline=None)  # a busy machine is no failure
settings.load_profile("hearth")

LIMIT = 300
"""Seconds for one test; the slowest takes a minute on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT))
