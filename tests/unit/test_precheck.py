"""The kernel check before a start: what it prints becomes a Failure, and no way of failing passes."""

import json
import sys
from pathlib import Path

import pytest

from hearth.failure import FailureKind, Phase
from hearth.precheck import check_kernels, judge

GOOD = {"ok": True, "libraries": [], "failures": [], "self_test": {"status": "pass"}}
MISSING = {"kind": "missing_artifact", "evidence": ["fp4: missing"]}


def test_a_pass_is_no_failure():
    assert judge(json.dumps(GOOD), "") is None


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({**GOOD, "ok": False, "failures": [MISSING]}, "fp4: missing"),
        (
            {**GOOD, "ok": False, "self_test": {"status": "fail", "reason": "wrote nothing"}},
            "self-test: wrote nothing",
        ),
        ({**GOOD, "ok": False}, "without a reason"),
        ({**GOOD, "ok": "yes"}, "without a reason"),
    ],
)
def test_what_is_wrong_is_named(report, said):
    failure = judge(json.dumps(report), "")
    assert failure is not None
    assert (failure.kind, failure.phase) == (FailureKind.MISSING_ARTIFACT, Phase.SPAWN)
    assert said in failure.evidence[0]


@pytest.mark.parametrize("out", ["", "[]", "null", '{"libraries": []}', "Traceback"])
def test_an_answer_that_is_none_fails(out):
    failure = judge(out, "first\nNo module named hearth\n")
    assert failure is not None
    assert "No module named hearth" in failure.evidence[0]


async def test_an_interpreter_without_hearth_fails(tmp_path: Path):
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('No module named hearth')\n")
    program.chmod(0o755)
    failure = await check_kernels(str(program), {})
    assert failure is not None
    assert "No module named hearth" in failure.evidence[0]


async def test_an_interpreter_that_is_not_there_fails():
    failure = await check_kernels("/nonexistent/python", {})
    assert failure is not None
    assert "can't be run" in failure.evidence[0]


async def test_a_check_that_hangs_fails_and_leaves_nothing(tmp_path: Path):
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    program.chmod(0o755)
    failure = await check_kernels(str(program), {}, limit=0.5)
    assert failure is not None
    assert "no answer" in failure.evidence[0]
