"""The service stays one: daemon-reload, Docker's restart, a frozen supervisor, a reboot, a bad config."""

from __future__ import annotations

import time

from tests.host.machine import Machine
from tests.host.operating import LIMIT, Operator

RELEASE = "/var/lib/hearth/releases/current"


def container(machine: Machine) -> str:
    """The running container's id."""
    return machine.ssh("docker ps --quiet --no-trunc --filter name=hearth").strip()


def test_daemon_reload_loses_nothing(operator: Operator, machine: Machine) -> None:
    operator.until_serving()
    before = (container(machine), operator.unit("MainPID"))
    machine.ssh("systemctl daemon-reload")
    assert len(operator.ask()) > 3
    assert (container(machine), operator.unit("MainPID")) == before


def test_a_restart_of_docker_is_survived(operator: Operator, machine: Machine) -> None:
    before = container(machine)
    machine.ssh("systemctl restart docker")
    operator.until_serving()
    assert container(machine) == before
    assert operator.unit("NRestarts")["NRestarts"] == "0"


def test_a_frozen_supervisor_is_restarted_by_the_watchdog(operator: Operator, machine: Machine) -> None:
    # tini is the container's first process, the supervisor its child.
    machine.ssh("kill -STOP $(pgrep --parent $(docker inspect --format '{{.State.Pid}}' hearth))")
    ends = time.monotonic() + LIMIT
    while operator.unit("NRestarts")["NRestarts"] == "0":
        assert time.monotonic() < ends, operator.unit("ActiveState", "StatusText")
        time.sleep(2)
    said = machine.ssh("journalctl --unit hearth --output cat --lines 400 --no-pager")
    assert "Watchdog timeout" in said
    operator.until_serving()


def test_a_reboot_brings_it_back_on_its_remembered_plan(operator: Operator, machine: Machine) -> None:
    machine.restart()
    operator.write_inventory()
    operator.until_serving()
    said = operator.status()
    assert said["plan"]["started"]["prefill"] == "disabled"
    assert said["ladder_steps"] >= 1
    assert said["restarts"] == 0, "the planted fault wasn't met again"


def test_a_bad_config_is_not_restart_looped(operator: Operator, machine: Machine) -> None:
    machine.ssh(f"cp -p {RELEASE}/hearth.yaml /root/kept.yaml; echo 'nonsense: 1' >>{RELEASE}/hearth.yaml")
    assert machine.try_ssh("systemctl restart hearth").returncode != 0
    said = operator.unit("ActiveState", "Result", "NRestarts", "ExecMainStatus")
    assert (said["ActiveState"], said["Result"], said["NRestarts"]) == ("failed", "exit-code", "0")
    assert said["ExecMainStatus"] == "78"
    assert "hearth.yaml" in machine.ssh("journalctl --unit hearth --output cat --lines 10 --no-pager")
    machine.ssh(
        f"cp -p /root/kept.yaml {RELEASE}/hearth.yaml; systemctl reset-failed hearth; systemctl start hearth"
    )
    operator.until_serving()
