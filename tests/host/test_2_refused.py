"""Bad input to `hearth deploy`: one clear line with the fix, an exit code, nothing changed there."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.errors import ExitCode
from tests.host.machine import Machine
from tests.host.operating import Operator

TOUCHED = (
    "ls -d /opt/hearth /var/lib/hearth /etc/hearth /etc/docker /var/lib/hearth-deploy.lock 2>/dev/null; true"
)


@pytest.fixture(autouse=True)
def untouched(machine: Machine) -> Iterator[None]:
    """Whatever is refused leaves the host as it was."""
    before = machine.ssh("dpkg-query -W; ls /etc /opt /var/lib")
    yield
    assert machine.ssh(TOUCHED) == ""
    assert machine.ssh("dpkg-query -W; ls /etc /opt /var/lib") == before


def refused(done: subprocess.CompletedProcess[str], code: ExitCode, *parts: str) -> None:
    """It ended with the code, and one line says all the parts."""
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert any(all(part in line for part in parts) for line in said.splitlines()), said
    assert "Traceback" not in said


def host(operator: Operator, *words: str) -> subprocess.CompletedProcess[str]:
    """`hearth deploy HOST`, without the inventory."""
    return operator.hearth("deploy", *words, "--config", str(operator.config))


def test_a_host_that_nobody_knows(operator: Operator) -> None:
    refused(
        host(operator, "no-such-host.invalid"), ExitCode.UNREACHABLE, "no-such-host.invalid: unknown host"
    )


def test_a_port_where_nothing_listens(operator: Operator, machine: Machine) -> None:
    done = host(operator, f"root@{machine.address}:9")
    refused(done, ExitCode.UNREACHABLE, "nothing listens on SSH port 9", "give the port")


def test_no_route(operator: Operator, machine: Machine) -> None:
    """A network that this machine has no way to: the host itself must not be asked."""
    refuse = ["ip", "route", "add", "unreachable", "203.0.113.0/24"]
    subprocess.run(refuse, check=True)
    try:
        done = host(operator, "root@203.0.113.7")
    finally:
        subprocess.run(["ip", "route", "del", "unreachable", "203.0.113.0/24"], check=True)
    refused(done, ExitCode.UNREACHABLE, "no route to it", "check network")


def test_a_wrong_key(operator: Operator, machine: Machine, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    done = host(operator, f"root@{machine.address}", "--key", str(other))
    refused(done, ExitCode.PERMISSION, "the SSH key is refused", "ssh-copy-id")


def test_no_sudo(operator: Operator, machine: Machine) -> None:
    done = host(operator, f"guest@{machine.address}:2222", "--key", str(machine.key))
    refused(done, ExitCode.PERMISSION, "guest may not use sudo without a password", "/etc/sudoers.d")


def test_an_operating_system_that_is_not_supported(operator: Operator, machine: Machine) -> None:
    machine.ssh(
        "cp --remove-destination /usr/lib/os-release /etc/ && sed -i s/=debian/=devuan/ /etc/os-release"
    )
    machine.ssh("sed -i 's/^PRETTY_NAME=.*/PRETTY_NAME=\"Devuan 5\"/' /etc/os-release")
    try:
        done = operator.deploy()
    finally:
        machine.ssh("ln -sf ../usr/lib/os-release /etc/os-release")
    refused(done, ExitCode.CHECK_FAILED, "Devuan 5 is not supported", "Debian 12, Ubuntu 22.04, Ubuntu 24.04")


def test_a_full_disk_before_an_image_is_built(operator: Operator, machine: Machine) -> None:
    machine.ssh("mount -t tmpfs -o size=16m full /var/lib")
    operator.write_inventory(image_ref="hearth-test/nobody:built")
    try:
        done = operator.deploy()
    finally:
        operator.write_inventory()
        machine.ssh("umount /var/lib")
    assert "building hearth-test" not in done.stderr
    refused(done, ExitCode.CHECK_FAILED, "gpu1: 0 GB free under /var/lib", "are needed")


def test_seven_of_eight_gpus(operator: Operator, machine: Machine) -> None:
    """The kernel's list of devices, as a host has it where one card fell off the bus."""
    make = (
        "for i in 1 2 3 4 5 6 7; do d=/tmp/pci/0000:0$i:00.0; mkdir -p $d; "
        "echo 0x10de >$d/vendor; echo 0x030000 >$d/class; done; "
        "mkdir -p /tmp/pci/0000:09:00.0; echo 0x10de >/tmp/pci/0000:09:00.0/vendor; "
        "echo 0x040300 >/tmp/pci/0000:09:00.0/class"
    )
    machine.ssh(make)
    operator.write_inventory(gpu="nvidia", preflight_pci_devices="/tmp/pci")
    try:
        done = operator.deploy()
    finally:
        operator.write_inventory()
        machine.ssh("rm -r /tmp/pci")
    refused(done, ExitCode.CHECK_FAILED, "7 of 8 GPUs are on the PCI bus", "reseat the missing one")


def test_a_config_with_a_wrong_key(operator: Operator) -> None:
    config = operator.write_config("wrong.yaml", engine={"versoin": "1"})
    refused(operator.deploy(config=config), ExitCode.CONFIG, "wrong.yaml", "engine.versoin")


def test_a_secret_that_nobody_gave(operator: Operator) -> None:
    operator.write_inventory(hearth_secrets={})
    try:
        done = operator.deploy()
    finally:
        operator.write_inventory()
    refused(done, ExitCode.CONFIG, "secrets.api_key_file", "--secret api_key=FILE")


def test_an_image_that_nobody_has(operator: Operator) -> None:
    operator.write_inventory(image_ref="")
    try:
        done = operator.deploy("--image", "no-such-image")
    finally:
        operator.write_inventory()
    refused(done, ExitCode.MISSING, "no image 'no-such-image'", "hearth image list")


def test_a_host_held_by_somebody_else(operator: Operator, machine: Machine) -> None:
    took = operator.hearth("lock", str(operator.inventory), "--why", "changing a card")
    assert took.returncode == 0, took.stderr
    try:
        refused(operator.deploy(), ExitCode.RETRY, "gpu1 is held by", "changing a card", "--release")
        said = operator.hearth("lock", str(operator.inventory))
        assert "changing a card" in said.stdout
    finally:
        freed = operator.hearth("lock", str(operator.inventory), "--release")
    assert "(removed)" in freed.stdout
    assert "is free" in operator.hearth("lock", str(operator.inventory)).stdout


def test_a_dry_run_on_a_bare_host(operator: Operator, image: str) -> None:
    """It tells what would be installed, and does nothing (see the fixture)."""
    done = operator.deploy("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was changed" in done.stdout
    assert "hearth: What a new release would change" in done.stdout
    shutil.rmtree(operator.folder / "state")
