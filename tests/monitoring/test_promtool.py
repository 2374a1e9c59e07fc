"""The distribution's own checks of the committed files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from monitoring.rules import FOLDER, files


def check(*command: str) -> str:
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_configuration_and_every_rule() -> None:
    said = check("promtool", "check", "config", "prometheus.yml")
    for path in files():
        assert f"{path.parent.name}/{path.name}" in said


def test_promtool_runs_every_rule_test() -> None:
    tests = sorted(path.name for path in (FOLDER / "tests").glob("*.yml"))
    said = check("promtool", "test", "rules", *(f"tests/{name}" for name in tests))
    assert said.count("SUCCESS") == len(tests)


def test_promtool_finds_a_wrong_rule(tmp_path: Path) -> None:
    """The tests can fail: a threshold that is off by one breaks them."""
    copy = tmp_path / "prometheus"
    shutil.copytree(FOLDER, copy)
    alert = copy / "alerts/gpu.yml"
    alert.write_text(alert.read_text().replace("hearth:gpus:count <", "hearth:gpus:count >"))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests/alerts_gpu.yml"], cwd=copy, capture_output=True
    )
    assert done.returncode != 0


def test_amtool_accepts_the_configuration() -> None:
    check("amtool", "check-config", "../alertmanager/alertmanager.yml")
