"""Hearth and a real SGLang on this machine's GPU (`make test-gpu`): what scenario.py finds, judged.

HEARTH_GPU_PYTHON is the interpreter with torch (CUDA), SGLang 0.5.17 and Hearth's own requirements;
HEARTH_GPU_SITE an unpacked payload (payload.py) for a machine where SGLang isn't installed. About ten minutes
on an H200.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]
PYTHON = os.environ.get("HEARTH_GPU_PYTHON", sys.executable)
SITE = os.environ.get("HEARTH_GPU_SITE", "")
ROOT = Path(__file__).resolve().parents[3]
HAS_ENGINE = "import torch, sglang, pydantic; assert torch.cuda.is_available()"
Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    paths = ":".join(filter(None, (SITE, str(ROOT / "app"))))
    env = {**os.environ, "PYTHONPATH": paths}
    if subprocess.run([PYTHON, "-c", HAS_ENGINE], env=env, capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON}: no GPU with torch and SGLang (set HEARTH_GPU_PYTHON, HEARTH_GPU_SITE)")
    out = tmp_path_factory.mktemp("engine")
    command = [PYTHON, str(Path(__file__).with_name("scenario.py")), "main", "--seconds", "1800"]
    command += ["--out", str(out), "--work", str(out / "work"), *(["--site", SITE] if SITE else [])]
    subprocess.run(command, env=env, check=True)
    found: Results = json.loads((out / "results.json").read_text())
    return found


def step(results: Results, name: str) -> Any:
    assert "error" not in results[name], results[name]
    return results[name]["result"]


def test_every_plan_runs_as_asked(results: Results) -> None:
    for name, start in step(results, "starts").items():
        assert start["plan"]["downgrades"] == [], name
    after = results["passes"]["after"]
    assert "prefill_none" not in after["breakable"]
    assert "prefill_none" not in after["tc_piecewise"]
    assert "decode_cuda_graph" not in after["eager"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sigkill", "engine_killed"), ("sigstop", "hang"), ("illegal-access", "graph_replay")],
)
def test_a_fault_is_named_and_the_engine_comes_back(results: Results, name: str, kind: str) -> None:
    found = step(results, name)
    assert found["failure"]["kind"] == kind
    assert found["seconds_to_memory_free"] is not None
    assert found["seconds_to_ready"] is not None


def test_seed_story(results: Results) -> None:
    raw, op = step(results, "seed-story"), step(results, "seed-op")
    assert [f["kind"] for f in raw["failures"]] == ["graph_capture"]
    assert (raw["failures"][0]["axis"], raw["plan"]["started"]["prefill"]) == ("prefill", "breakable")
    assert (op["failures"], op["plan"]["effective"]["prefill"]) == ([], "tc_piecewise")


def test_memory_that_runs_out_in_capture_halves_the_batch(results: Results) -> None:
    found = step(results, "capture-oom")
    assert {f["kind"] for f in found["failures"]} == {"oom"}
    assert found["plan"]["started"]["decode_max_bs"] in (1024, 2048)


def test_sealed_run_compiles_nothing(results: Results) -> None:
    found = step(results, "sealed")
    assert found["failures"] == []
    assert (found["tokens"], found["compiles"]) == (64, ["hearth_runtime_compiles_total 0.0"])
    assert found["changed"] == []


def test_a_stranger_is_named(results: Results) -> None:
    assert step(results, "stranger")["named_holder"]
