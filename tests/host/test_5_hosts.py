"""Two hosts at once: one run for both, and what is wrong with one is said of that one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hearth.errors import ExitCode
from tests.host.machine import Machine
from tests.host.operating import Operator


@pytest.fixture(scope="module")
def second(operator: Operator, machine: Machine) -> Iterator[Machine]:
    """A bare host beside the deployed one, in the inventory as gpu2."""
    host = Machine(machine.engine, machine.folder)
    try:
        host.start()
        operator.write_inventory(more=(host,))
        yield host
    finally:
        operator.write_inventory()
        host.remove()


def test_both_are_provisioned_in_one_run(second: Machine, operator: Operator) -> None:
    done = operator.deploy("--tags", "preflight,host_tuning")
    assert done.returncode == 0, done.stdout + done.stderr
    record = operator.record()
    assert record["hosts"] == ["gpu1", "gpu2"]
    changed = {task["host"] for task in record["tasks"] if task["status"] == "changed"}
    assert changed == {"gpu2"}, "gpu1 had it already"
    again = operator.deploy("--tags", "preflight,host_tuning")
    assert again.returncode == 0
    assert not [task for task in operator.record()["tasks"] if task["status"] == "changed"]


def test_one_that_is_held_holds_up_both(second: Machine, operator: Operator) -> None:
    named = ("lock", "gpu2", "--inventory", str(operator.inventory))
    took = operator.hearth(*named, "--why", "changing a card")
    assert took.returncode == 0, took.stderr
    done = operator.deploy("--tags", "host_tuning")
    assert done.returncode == ExitCode.RETRY, done.stdout + done.stderr
    assert "gpu2 is held by" in done.stderr
    assert "gpu1 is free" in operator.hearth("lock", "gpu1", *named[2:]).stdout
    assert "(removed)" in operator.hearth(*named, "--release").stdout


def test_one_that_cannot_be_reached_is_named(second: Machine, operator: Operator) -> None:
    second.ssh("systemctl stop ssh.socket ssh.service")
    done = operator.deploy("--tags", "host_tuning")
    assert done.returncode == ExitCode.UNREACHABLE, done.stdout + done.stderr
    assert "gpu2" in (done.stdout + done.stderr).splitlines()[0]
    assert "gpu1 is free" in operator.hearth("lock", "gpu1", "--inventory", str(operator.inventory)).stdout
