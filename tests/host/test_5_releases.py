"""Releases: a new config serves, rollback goes back, and what doesn't serve goes back by itself."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hearth.errors import ExitCode
from tests.host.machine import NAME, Machine, docker
from tests.host.operating import IMAGE, KEY, Operator, smoke

LACKING = f"{NAME}/cpu-lacking:latest"
OTHER_KEY = "another-key-for-tests-2d90"


def current(machine: Machine) -> str:
    """The id of the release that runs."""
    return machine.ssh("basename $(readlink -f /var/lib/hearth/releases/current)").strip()


def changed(operator: Operator) -> list[str]:
    """The tasks of the newest run that changed anything."""
    return [task["task"] for task in operator.record()["tasks"] if task["status"] == "changed"]


def report(operator: Operator) -> dict[str, Any]:
    """What the newest run's activation reported."""
    said = [task["facts"] for task in operator.record()["tasks"] if "downtime_s" in task["facts"]]
    assert said, operator.record()
    found: dict[str, Any] = said[-1]
    return found


def test_a_change_of_config_is_a_release_and_no_build(operator: Operator, machine: Machine) -> None:
    before = current(machine)
    done = operator.deploy(config=operator.write_config("second.yaml", limits={"stall": 77}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert changed(operator) == ["Add the release", "Activate the release"]
    assert current(machine) != before
    assert report(operator)["ok"]
    assert 0 < report(operator)["downtime_s"] < report(operator)["ready_s"] + 120
    assert f"release {current(machine)} serves" in done.stdout


def test_rollback(operator: Operator, machine: Machine) -> None:
    newer = current(machine)
    done = operator.hearth("rollback", str(operator.inventory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert current(machine) != newer
    operator.until_serving()


@pytest.fixture
def lacking(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image without one of its baked kernels."""
    folder = tmp_path_factory.mktemp("lacking")
    find = "find / -xdev -name 'fp4_quantization_120f.so' -print -delete | grep ."
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nUSER 0\nRUN {find}\nUSER 10001:10001\n")
    docker(machine.engine, "build", "--quiet", "--tag", LACKING, str(folder))
    yield LACKING
    docker(machine.engine, "image", "rm", "--force", LACKING, check=False)


def test_an_image_that_lacks_a_kernel_goes_back(operator: Operator, machine: Machine, lacking: str) -> None:
    before = current(machine)
    config = operator.write_config("strict.yaml", engine={"verify_kernels": True})
    done = operator.deploy("--image-ref", lacking, config=config)
    said = done.stdout + done.stderr
    assert done.returncode == ExitCode.CHECK_FAILED, said
    assert done.stdout.splitlines()[0].startswith("deploy FAILED after")
    assert "doesn't serve" in done.stdout.splitlines()[1]
    assert f"{before} serves again; downtime" in done.stdout.splitlines()[1]
    assert current(machine) == before
    assert report(operator)["rolled_back_to"] == before
    assert report(operator)["downtime_s"] > 0
    assert len(operator.ask()) > 3
    shipped = [
        task["facts"] for task in operator.record()["tasks"] if task["task"] == "Ship from this machine"
    ]
    assert shipped[-1]["layers"] == 1, "only the layer that the host lacked was sent"


def test_a_wrong_answer_goes_back(operator: Operator, machine: Machine) -> None:
    before = current(machine)
    operator.write_inventory(
        hearth_smoke=smoke(prompts=[{"prompt": "the", "expect": "no model says this 4711"}])
    )
    try:
        done = operator.deploy(config=operator.write_config("third.yaml", limits={"stall": 99}))
    finally:
        operator.write_inventory()
    assert done.returncode == ExitCode.CHECK_FAILED, done.stdout + done.stderr
    assert "4711" in done.stdout.splitlines()[1]
    assert current(machine) == before
    assert len(operator.ask()) > 3


def test_the_list_says_what_happened(operator: Operator, machine: Machine) -> None:
    said = json.loads(operator.hearth("releases", str(operator.inventory), "--json").stdout)
    assert said["current"] == current(machine)
    notes = [row["problem"] for row in said["releases"] if not row["proven"]]
    assert any("4711" in note for note in notes), said


def secrets(machine: Machine) -> list[str]:
    """Names of the secrets on the host."""
    return machine.ssh("ls /etc/hearth/secrets").split()


def test_a_renamed_secret_serves_and_the_release_before_finds_its_own(
    operator: Operator, machine: Machine
) -> None:
    before = current(machine)
    config = operator.write_config("renamed.yaml", secrets={"api_key_file": "/run/secrets/client_key"})
    operator.write_inventory(hearth_secrets={"client_key": str(operator.api_key)})
    try:
        done = operator.deploy(config=config)
        assert done.returncode == 0, done.stdout + done.stderr
        assert report(operator)["downtime_s"] > 0
        assert len(operator.ask()) > 3
        again = operator.deploy(config=config)
        assert again.returncode == 0, again.stdout + again.stderr
        assert changed(operator) == []
    finally:
        operator.write_inventory()
    assert secrets(machine) == ["api_key", "client_key"]
    back = operator.hearth("rollback", str(operator.inventory))
    assert back.returncode == 0, back.stdout + back.stderr
    assert current(machine) == before
    operator.until_serving()


def test_a_key_that_a_killed_run_wrote_is_in_force_after_the_next(
    operator: Operator, machine: Machine
) -> None:
    machine.ssh(f"cd /etc/hearth/secrets; printf %s {OTHER_KEY} >api_key; echo nobody reads this >old")
    operator.api_key.write_text(OTHER_KEY)
    try:
        done = operator.deploy()
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Secrets" not in changed(operator)
        assert "Activate the release" in changed(operator)
        assert len(operator.ask(key=OTHER_KEY)) > 3
        with pytest.raises(urllib.error.HTTPError, match="401"):
            operator.ask(key=KEY)
        assert secrets(machine) == ["api_key", "client_key"], "a kept release reads the second"
        before = operator.unit("MainPID")
        assert operator.deploy().returncode == 0
        assert changed(operator) == []
        assert operator.unit("MainPID") == before
        assert "gpu1: would change 0" in operator.deploy("--check").stdout
    finally:
        operator.api_key.write_text(KEY)


def test_a_root_login_needs_no_sudo(operator: Operator, machine: Machine) -> None:
    """Without a user in the inventory: with one, Ansible itself sees that it is root already."""
    said = yaml.safe_load(operator.inventory.read_text())
    del said["all"]["children"]["hearth"]["hosts"]["gpu1"]["ansible_user"]
    inventory = operator.folder / "nobody.yml"
    inventory.write_text(yaml.safe_dump(said))
    machine.ssh("mv /usr/bin/sudo /usr/bin/sudo.away")
    try:
        words = ("--config", str(operator.config), "--tags", "preflight")
        done = operator.hearth("deploy", str(inventory), *words)
    finally:
        machine.ssh("mv /usr/bin/sudo.away /usr/bin/sudo")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_on_the_host_knows_what_runs(operator: Operator, machine: Machine) -> None:
    assert machine.ssh("command -v hearth").strip() == "/usr/local/bin/hearth"
    assert "right:" in machine.ssh("hearth status")
    assert "graph_capture" in machine.ssh("hearth failures")
    forgotten = json.loads(machine.ssh("hearth promote --json"))["forgotten"]
    assert "disabled" in [each["plan"]["prefill"] for each in forgotten]
    assert machine.ssh("stat --format %u /var/lib/hearth/state/plans.json").strip() == "10001"


def test_remove_leaves_weights_and_state(operator: Operator, machine: Machine) -> None:
    done = operator.hearth("host", "remove", str(operator.inventory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.ssh("docker ps --all --quiet").strip() == ""
    assert machine.try_ssh("systemctl cat hearth").returncode != 0
    assert machine.try_ssh("test -e /opt/hearth").returncode != 0
    assert machine.try_ssh("test -L /usr/local/bin/hearth").returncode != 0
    assert machine.try_ssh("test -e /etc/systemd/system/hearth.service.d").returncode != 0
    assert machine.ssh("nft list tables 2>/dev/null; true").strip().count("inet hearth") == 0
    assert "config.json" in machine.ssh("ls /var/lib/hearth/models/tiny")
    assert "plans.json" in machine.ssh("ls /var/lib/hearth/state")
    again = operator.hearth("host", "remove", str(operator.inventory), "--purge")
    assert again.returncode == 0, again.stdout + again.stderr
    assert machine.try_ssh("test -e /var/lib/hearth").returncode != 0
