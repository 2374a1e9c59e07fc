"""What a real bake needs, made once: FlashInfer with a CPU torch, and NVIDIA's compiler from PyPI."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "cuda-compiler.lock"


def cache() -> Path:
    """The folder for what is dear to make, one for each content of the lock files."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(os.environ.get("HEARTH_CACHE") or Path(base) / "hearth")
    return root / "bake" / hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]


def kernel_python() -> Path:
    """The interpreter that has FlashInfer 0.7.2 and torch, without a GPU."""
    tool = [sys.executable, str(ROOT / "tools" / "kernel_env.py")]
    done = subprocess.run(tool, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"tools/kernel_env.py failed with {done.returncode}"
    return Path(done.stdout.strip().splitlines()[-1])


def install_toolkit() -> Path:
    """A folder with the compiler packages of the lock, by hash. Installed whole or not at all."""
    place = cache() / "packages"
    if not place.is_dir():
        aside = place.with_name(f"packages.{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--target", str(aside), "-r", str(LOCK)]
        subprocess.run(command, check=True)
        aside.rename(place)
    return place


@pytest.fixture(scope="session")
def python() -> Path:
    return kernel_python()


@pytest.fixture(scope="session")
def toolkit() -> Path:
    return install_toolkit()


class Baker:
    """Runs `hearth bake` as a person would, in a process of its own at low priority."""

    def __init__(self, python: Path, toolkit: Path, state: Path) -> None:
        self.python, self.toolkit, self.state = python, toolkit, state

    def command(self, out: Path, modules: str, archs: str, *more: str) -> list[str]:
        """The command line."""
        words = [sys.executable, "-c", "from hearth.cli import main; main()", "bake", "--json"]
        words += ["--python", str(self.python), "--cuda-home", str(self.toolkit), "--state", str(self.state)]
        return ["nice", *words, "--out", str(out), "--modules", modules, "--archs", archs, *more]

    def run(self, out: Path, modules: str, archs: str, *more: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(self.command(out, modules, archs, *more), capture_output=True, text=True)


@pytest.fixture(scope="session")
def baker(python: Path, toolkit: Path) -> Baker:
    """A bake whose objects are kept from run to run (the compiler runs only where something changed)."""
    return Baker(python, toolkit, cache() / "state")
