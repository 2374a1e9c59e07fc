"""The self-test's reference and comparison, in the environment that has torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT

pytestmark = pytest.mark.bake


def test_the_reference_and_the_comparison(python: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "app"), "OMP_NUM_THREADS": "1"}
    inside = str(ROOT / "tests" / "bake" / "inside_selftest.py")
    command = ["nice", str(python), "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", inside]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
