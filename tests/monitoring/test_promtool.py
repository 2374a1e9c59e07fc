"""The distribution's own checks of the committed files."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from monitoring.dashboards.boards import FAILED
from monitoring.query import fill_in
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


def test_a_failure_is_annotated_and_a_restart_of_hearth_is_not(tmp_path: Path) -> None:
    """Grafana asks once a minute, here at seconds 5; the failure is between the scrapes at 3:00 and 3:15."""
    series = [
        {"series": 'hearth_failures_total{host="gpu1", kind="numerics"}', "values": "0x12 1x40"},
        {"series": 'hearth_failures_total{host="gpu1", kind="hang"}', "values": "3x16 0x36"},
    ]
    seen = [{"labels": '{host="gpu1", kind="numerics"}', "value": 1}]
    asked = [
        {"expr": f"sgn({fill_in(FAILED, 'gpu1')})", "eval_time": f"{minute}m5s", "exp_samples": samples}
        for minute, samples in ((2, []), (4, seen), (5, []), (6, []))
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": asked}
    path = tmp_path / "annotation.yml"
    path.write_text(json.dumps({"tests": [test]}))
    check("promtool", "test", "rules", str(path))


def test_amtool_accepts_the_configuration() -> None:
    check("amtool", "check-config", "../alertmanager/alertmanager.yml")
