"""What an inventory may ask for besides: who may reach the endpoint, weights from a hub."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.errors import ExitCode
from tests.host.machine import Machine
from tests.host.operating import Operator
from tests.unit.hub import COMMIT, REPO, Hub

FETCHED = "/var/lib/hearth/models/fetched"


@pytest.fixture
def again(operator: Operator) -> Iterator[None]:
    """The inventory as it was, afterwards."""
    yield
    operator.write_inventory()


def reached(machine: Machine, port: int) -> bool:
    """Whether the port of the host takes a connection from here."""
    try:
        with socket.create_connection((machine.address, port), 5):
            return True
    except OSError:
        return False


def part(operator: Operator, tag: str) -> list[str]:
    """Deploy one part; what it changed."""
    done = operator.deploy("--tags", tag)
    assert done.returncode == 0, done.stdout + done.stderr
    return [task["task"] for task in operator.record()["tasks"] if task["status"] == "changed"]


def test_only_the_allowed_reach_the_endpoint(again: None, operator: Operator, machine: Machine) -> None:
    with socket.create_connection((machine.address, 22)) as connection:
        own = connection.getsockname()[0]
    assert reached(machine, 30000)
    operator.write_inventory(firewall_allow=["192.0.2.0/24", "2001:db8::/32"])
    assert "Rules" in part(operator, "firewall")
    assert not reached(machine, 30000)
    assert reached(machine, 22)
    assert machine.fetch("30000/health") is not None, "the host itself"
    assert part(operator, "firewall") == []
    operator.write_inventory(firewall_allow=["192.0.2.0/24", own])
    assert "Rules" in part(operator, "firewall")
    assert len(operator.ask()) > 3


def test_a_network_that_is_none(again: None, operator: Operator) -> None:
    operator.write_inventory(firewall_allow=["everybody"])
    done = operator.deploy("--tags", "firewall")
    assert done.returncode != ExitCode.OK
    assert "firewall_allow: everybody is not a network: write it like 192.0.2.0/24" in done.stdout


@pytest.fixture
def hub(machine: Machine) -> Iterator[Hub]:
    """A stand-in for the hub, on the host's own loopback by a tunnel: it redirects to `localhost`."""
    with Hub(token="a-token-5d2") as running:
        there = f"{running.port}:127.0.0.1:{running.port}"
        words = ["ssh", *machine.ssh_words, "-i", str(machine.key), "-o", "ExitOnForwardFailure=yes", "-N"]
        tunnel = subprocess.Popen([*words, "-R", there, f"root@{machine.address}"])
        try:
            yield running
        finally:
            tunnel.terminate()
            tunnel.wait()


def test_weights_from_a_hub(
    again: None, hub: Hub, operator: Operator, machine: Machine, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(hub.token)
    asked = {"model_from": "fetch", "model_source": REPO, "model_revision": COMMIT, "model_path": FETCHED}
    operator.write_inventory(**asked, model_endpoint=hub.url, model_token_file=str(token))
    assert part(operator, "model") == ["Folder of the weights", "Fetch"]
    there = set(machine.ssh(f"ls {FETCHED}").split())
    assert there == (set(hub.files) - {"pytorch_model.bin"}) | {"hearth-weights.json"}
    assert machine.try_ssh("ls /run/hearth-hub-token").returncode != 0
    assert machine.ssh(f"grep -rc {hub.token} {FETCHED}; true").count(":0") == len(there)
    before = hub.asked.total()
    assert part(operator, "model") == []
    assert hub.asked.total() == before, "with everything there, nobody is asked"


def test_a_hub_that_refuses(again: None, hub: Hub, operator: Operator) -> None:
    operator.write_inventory(
        model_from="fetch", model_source=REPO, model_path=f"{FETCHED}-2", model_endpoint=hub.url
    )
    done = operator.deploy("--tags", "model")
    assert done.returncode != ExitCode.OK
    assert "give --token-file" in done.stdout
