"""The baked kernels, checked before any weight is loaded.

A library for another GPU loads, runs and computes nothing, without an error, so the check includes a numeric
self-test on the GPU. It runs with the engine's interpreter: Hearth's own has no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from hearth.failure import Failure, FailureKind, Phase

LIMIT = 300.0
"""Seconds; importing torch and FlashInfer takes ten."""


async def check_kernels(python: str, env: Mapping[str, str], limit: float = LIMIT) -> Failure | None:
    """`hearth kernels verify --self-test` in the engine's environment: the Failure, or None for a pass."""
    words = (python, "-m", "hearth", "kernels", "verify", "--self-test", "--json")
    try:
        process = await asyncio.create_subprocess_exec(
            *words, env=dict(env), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return _failure(f"{python} can't be run: {error.strerror}")
    try:
        out, err = await asyncio.wait_for(process.communicate(), limit)
    except TimeoutError:
        return _failure(f"no answer from the kernel check in {limit:g} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return judge(out.decode(errors="replace"), err.decode(errors="replace"))


def judge(out: str, err: str) -> Failure | None:
    """What the check printed, as a Failure or None."""
    try:
        report = json.loads(out)
        problems = _problems(report)
        passed = report["ok"] is True
    except (ValueError, KeyError, TypeError, AttributeError):
        last = err.strip().splitlines()[-1:] or ["it printed nothing"]
        return _failure(f"the kernel check did not run: {last[0]}")
    return None if passed else _failure(*(problems or ["the kernel check failed without a reason"]))


def _problems(report: Mapping[str, Any]) -> list[str]:
    found = [str(line) for failure in report["failures"] for line in failure["evidence"]]
    test = report.get("self_test") or {}
    return [*found, f"self-test: {test['reason']}"] if test.get("status") == "fail" else found


def _failure(*evidence: str) -> Failure:
    return Failure(
        FailureKind.MISSING_ARTIFACT,
        Phase.SPAWN,
        evidence=evidence,
        hint="build the image again (hearth bake); engine.verify_kernels: false skips this check",
        source="hearth: kernel check",
    )
