"""Runs the `inside_*.py` tests in an environment that has torch and a given FlashInfer, with no GPU.

tools/kernel_env.py makes those environments once and caches them. Everything in them is real except the
GPU; each file says what stands in for it.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.wheels.wheel import cache_dir, fetch

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "kernels"
VERSIONS = ("0.6.3", "0.7.2")


@pytest.fixture(scope="session", params=VERSIONS)
def flashinfer_version(request: pytest.FixtureRequest) -> str:
    """Each FlashInfer that the tests run against."""
    return str(request.param)


@pytest.fixture(scope="session")
def kernel_python(flashinfer_version: str) -> Path:
    """The Python of that FlashInfer's environment."""
    return environment(flashinfer_version)


def environment(version: str) -> Path:
    """Make the environment if need be; its Python."""
    command = [sys.executable, str(ROOT / "tools" / "kernel_env.py"), "--flashinfer", version]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"tools/kernel_env.py --flashinfer {version} failed with {done.returncode}"
    return Path(done.stdout.strip().splitlines()[-1])


def unpacked(version: str) -> Path:
    """A real SGLang wheel, unpacked in the cache."""
    folder = cache_dir() / f"sglang-{version}"
    if not folder.exists():
        aside = Path(tempfile.mkdtemp(dir=cache_dir().parent))
        fetch(version)._zip.extractall(aside)
        with contextlib.suppress(OSError):  # another process was first
            aside.rename(folder)
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(kernel_python: Path, flashinfer_version: str, tmp_path: Path) -> Run:
    """Run the environment's Python with the given arguments, hearth importable, caches of its own."""

    def call(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHINFER_", "PYTEST_", "COV_"))}
        env |= {
            "PYTHONPATH": str(ROOT / "app"),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
            "FLASHINFER_CUDA_ARCH_LIST": "12.0f" if flashinfer_version >= "0.7" else "12.0a",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "OMP_NUM_THREADS": "1",
        } | more
        command = [str(kernel_python), *args]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=900)

    return call


@pytest.fixture
def passes(run: Run) -> Callable[[str, int], None]:
    """Run one `inside_*.py` file; at least `least` tests pass, none fails or is skipped."""

    def call(name: str, least: int) -> None:
        done = run(
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(HERE),
            str(HERE / name),
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        summary = done.stdout.strip().splitlines()[-1]
        passed = re.search(r"(\d+) passed", summary)
        assert passed, summary
        assert int(passed[1]) >= least, summary
        assert "skipped" not in summary, summary

    return call
