"""The FP4 ops on this machine's GPU (`make test-gpu`): what ops_check.py finds, judged.

HEARTH_GPU_PYTHON is the interpreter with torch (CUDA) and FlashInfer; HEARTH_GPU_PAYLOAD a payload for a
machine where FlashInfer isn't installed (tests/gpu/payload.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
PYTHON = os.environ.get("HEARTH_GPU_PYTHON", sys.executable)
PAYLOAD = os.environ.get("HEARTH_GPU_PAYLOAD", "installed")
HOPPER = "import torch; assert torch.cuda.get_device_capability() == (9, 0)"
Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if subprocess.run([PYTHON, "-c", HOPPER], capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON}: no torch with a Hopper GPU (set HEARTH_GPU_PYTHON)")
    out = tmp_path_factory.mktemp("ops") / "ops.json"
    script = Path(__file__).with_name("ops_check.py")
    subprocess.run([PYTHON, str(script), PAYLOAD, str(out)], check=True)
    found: Results = json.loads(out.read_text())
    return found


def test_no_step_failed(results: Results) -> None:
    failed = {n: v["error"] for n, v in results.items() if isinstance(v, dict) and "error" in v}
    assert failed == {}


def test_every_way_quantizes_like_the_reference(results: Results) -> None:
    assert {
        name: v["status"] for name, v in results["selftest"].items() if name != "chosen"
    } == dict.fromkeys(("direct", "hearth", "builtin"), "ok")


def test_opcheck_passes_for_every_layout(results: Results) -> None:
    assert results["opcheck"]["not_ok"] == {}
    assert results["opcheck"]["count"] >= 30


def test_a_replayed_graph_is_bit_exact(results: Results) -> None:
    assert results["graph"]["all_equal"]


def test_our_op_compiles_whole_and_the_raw_function_does_not(results: Results) -> None:
    seen = results["compiled"]
    ours = {title: verdict for title, verdict in seen.items() if title.startswith("hearth ")}
    assert set(ours.values()) == {"bit-exact"}
    assert len(ours) == 4
    assert "bit-exact" not in [verdict for title, verdict in seen.items() if title.startswith("direct ")]


def test_without_a_compiler_only_the_library_made_ahead_of_time_works(results: Results) -> None:
    assert results["sealed"]["nvcc_found"] is None
    assert results["sealed"]["aot"]["first"] > 0
    assert "MissingJITCacheError" in results["sealed"]["without_aot"]
