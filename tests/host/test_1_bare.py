"""The host that the other tests deploy to is what it says: systemd, SSH, Python, and nothing of ours."""

from __future__ import annotations

from tests.host.machine import Machine


def test_systemd_runs_it(machine: Machine) -> None:
    assert machine.ssh("systemctl is-system-running").strip() == "running"
    assert machine.ssh("cat /proc/1/comm").strip() == "systemd"


def test_it_is_bare(machine: Machine) -> None:
    for tool in ("docker", "hearth", "pip3", "nft"):
        assert machine.try_ssh(f"command -v {tool}").returncode != 0, tool


def test_users(machine: Machine) -> None:
    assert machine.ssh("sudo -n id -u", "admin").strip() == "0"
    assert machine.try_ssh("sudo -n id -u", "guest").returncode != 0
