"""Monitoring beside the endpoint: the inventory asks for it, a deploy brings it, the next changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.host.machine import MONITORING, Machine
from tests.host.operating import Operator


@pytest.fixture(scope="module")
def asked(operator: Operator) -> Iterator[None]:
    """An inventory with `hearth_monitoring`."""
    operator.write_inventory(hearth_monitoring=True)
    yield
    operator.write_inventory()


def series(machine: Machine, query: str) -> list[dict[str, Any]]:
    """What Prometheus on the host answers to a query."""
    said = json.loads(machine.fetch(f"9090/api/v1/query?query={quote(query)}"))
    found: list[dict[str, Any]] = said["data"]["result"]
    return found


def test_a_deploy_brings_it(asked: None, operator: Operator, machine: Machine) -> None:
    before = operator.unit("MainPID")
    done = operator.deploy()
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(machine.ssh(f"systemctl is-active {MONITORING}").split()) == {"active"}
    assert operator.unit("MainPID") == before, "the endpoint served on"


def test_what_was_deployed_is_scraped_under_its_own_name(
    asked: None, operator: Operator, machine: Machine
) -> None:
    ends = time.monotonic() + 120
    while len(up := series(machine, "up == 1")) < 4 and time.monotonic() < ends:
        time.sleep(2)
    assert {one["metric"]["job"] for one in up} == {"hearth", "engine", "node", "prometheus"}
    models = {one["metric"]["job"]: one["metric"].get("model") for one in up}
    assert (models["hearth"], models["engine"]) == ("tiny", "tiny")
    assert series(machine, "hearth_build_info")


def test_a_second_run_changes_nothing(asked: None, operator: Operator) -> None:
    done = operator.deploy()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [task for task in operator.record()["tasks"] if task["status"] == "changed"] == []
