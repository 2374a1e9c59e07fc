from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from hearth.cli import plan as verb
from hearth.errors import ConfigError, HearthError, MissingError

APP = typer.Typer(add_completion=False)
APP.command()(verb.plan)


def run(*args: str) -> Result:
    return CliRunner().invoke(APP, list(args), catch_exceptions=False)


def test_text_shows_one_flag_a_line_and_the_ways_down() -> None:
    assert run("-v", "0.5.23", "-g", "breakable,full,32").stdout.splitlines() == [
        "SGLang 0.5.23, piecewise: prefill breakable, decode full",
        "Ways down: prefill breakable > disabled; decode full > disabled",
        "python3 -m sglang.launch_server \\",
        "    --cuda-graph-backend-prefill breakable \\",
        "    --cuda-graph-backend-decode full \\",
        "    --cuda-graph-max-bs-decode 32",
    ]


def test_json_has_exactly_the_promised_keys() -> None:
    made = json.loads(run("-v", "0.5.11", "-g", "piecewise", "-a", "GlmMoeDsaForCausalLM", "--json").stdout)
    assert list(made) == ["engine_version", "plan", "argv", "env"]
    assert made["engine_version"] == "0.5.11"
    assert made["plan"] == {"prefill": "tc_piecewise", "decode": "full", "decode_max_bs": None}
    assert made["argv"] == ["python3", "-m", "sglang.launch_server", "--enforce-piecewise-cuda-graph"]
    assert made["env"]["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"
    assert "PATH" not in made["env"]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ([], ConfigError),
        (["-v", "0.5.24"], ConfigError),
        (["-v", "0.5.23", "-g", "tc_piecewise,full"], ConfigError),
        (["--probe", "--engine-python", "/no/such/python"], MissingError),
        (["--probe", "--engine-python", sys.executable], MissingError),
    ],
)
def test_errors(args: list[str], error: type[HearthError]) -> None:
    with pytest.raises(error) as caught:
        run(*args)
    assert "\n" not in str(caught.value)


def engine(path: Path, help_code: str) -> str:
    """An interpreter whose sglang is a two-line module of version 0.5.77."""
    (path / "sglang").mkdir()
    (path / "sglang" / "__init__.py").touch()
    (path / "sglang" / "launch_server.py").write_text(help_code)
    (path / "sglang-0.5.77.dist-info").mkdir()
    (path / "sglang-0.5.77.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.77\n")
    script = path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


PARSER = """
import argparse
p = argparse.ArgumentParser(prog="sglang")
p.add_argument("--model-path")
p.add_argument("--cuda-graph-backend-prefill", choices=["full", "breakable", "disabled"])
p.add_argument("--cuda-graph-backend-decode", choices=["full", "disabled"])
p.add_argument("--cuda-graph-max-bs-decode", type=int)
p.parse_args()
"""


def test_probe_asks_the_installed_engine(tmp_path: Path) -> None:
    made = json.loads(run("--probe", "--engine-python", engine(tmp_path, PARSER), "--json").stdout)
    assert made["engine_version"] == "0.5.77"
    assert made["plan"]["prefill"] == "breakable"


def test_probe_of_an_engine_that_cannot_start_shows_its_last_words(tmp_path: Path) -> None:
    broken = engine(tmp_path, "raise ImportError('libcuda.so.1: cannot open shared object file')")
    with pytest.raises(MissingError, match=r"libcuda\.so\.1: cannot open"):
        run("--probe", "--engine-python", broken)
