"""`hearth warm` with a real engine: its caches are kept only if it was ready, and only if there are any."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hearth.errors import ExitCode
from tests.tools import free_port

READY = "The server is fired up and ready to roll"
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
PLAIN = ["-m", "sglang.launch_server"]
# An engine on CPU compiles nothing by itself: a real compile in its main process, before the server starts.
COMPILES = """
import runpy, sys, torch
torch.compile(lambda x: x.sin() * 2 + 1)(torch.ones(64))
sys.argv[0] = "launch_server"
runpy.run_module("sglang.launch_server", run_name="__main__")
"""


def warm(root: Path, engine: list[str], model: str) -> subprocess.CompletedProcess[str]:
    engine += ["--model-path", model, "--device", "cpu", "--attention-backend", "torch_native"]
    engine += ["--sampling-backend", "pytorch", "--max-total-tokens", "2048", "--port", str(free_port())]
    words = ["--root", str(root), "--command", shlex.join(engine), "--engine-version", "0.5.23"]
    words += ["--image-digest", "sha256:test", "--gpu", "none", "--driver", "none", "--ready-line", READY]
    return subprocess.run(
        [sys.executable, "-m", "hearth", "warm", *words, "--json"],
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        check=False,
    )


def kept(root: Path) -> list[Path]:
    """Caches that a later start would take."""
    return [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]


def test_what_an_engine_compiled_is_kept_and_not_made_again(
    tmp_path: Path, engine_python: Callable[[str], str], tiny_model: str
) -> None:
    done = warm(tmp_path, [engine_python("0.5.23"), "-c", COMPILES], tiny_model)
    assert done.returncode == 0, done.stderr[-2000:]
    first = json.loads(done.stdout)
    assert first["fresh"]
    files = [path for path in Path(first["path"]).rglob("*") if path.is_file()]
    assert [path.suffix for path in files].count(".so") >= 1
    assert [path for path in files if path.stat().st_mode & 0o222] == []
    again = json.loads(warm(tmp_path, ["/nonexistent/python"], tiny_model).stdout)
    assert not again["fresh"]
    assert again["path"] == first["path"]


def test_an_engine_that_compiled_nothing_is_no_success(
    tmp_path: Path, engine_python: Callable[[str], str], tiny_model: str
) -> None:
    done = warm(tmp_path, [engine_python("0.5.23"), *PLAIN], tiny_model)
    assert done.returncode == ExitCode.CHECK_FAILED
    assert "wrote no cache at all" in done.stderr.splitlines()[-1]
    assert kept(tmp_path) == []


def test_an_engine_that_ends_leaves_no_cache(tmp_path: Path, engine_python: Callable[[str], str]) -> None:
    done = warm(tmp_path, [engine_python("0.5.23"), *PLAIN], str(tmp_path / "no-model"))
    assert done.returncode == ExitCode.CHECK_FAILED
    assert kept(tmp_path) == []
