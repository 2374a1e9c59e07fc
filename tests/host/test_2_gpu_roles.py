"""The tasks of the GPU roles, against recorded outputs of real tools: a healthy host, and what breaks.

The host has no GPU: `nvidia-smi`, `lspci` and `modinfo` there are scripts that print a recording. What
installs the driver and the container toolkit needs NVIDIA's repository and doesn't run here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.machine import ROOT, Machine

RECORDED = ROOT / "tests/fixtures/host"
HEALTHY = RECORDED / "rtx8"
PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: nvidia_driver, tasks_from: verify}
    - ansible.builtin.import_role: {name: host_tuning, tasks_from: verify}
"""
TOOLS = {"nvidia-smi": "nvidia_smi", "lspci": "lspci", "modinfo": "modinfo", "mokutil": "mokutil"}


def recording(name: str) -> str:
    """A recorded output; empty where that tool was missing."""
    path = HEALTHY / f"{name}.txt"
    return path.read_text() if path.is_file() else ""


@pytest.fixture(scope="module")
def recorded(machine: Machine) -> Iterator[Machine]:
    """The host with the recorded tools."""
    for tool, name in TOOLS.items():
        say(machine, tool, recording(name))
    put(machine, "/tmp/recorded/version", recording("driver_version"))
    yield machine
    machine.ssh(f"rm -rf /tmp/recorded {' '.join(f'/usr/local/bin/{tool}' for tool in TOOLS)}")


def put(machine: Machine, path: str, text: str) -> None:
    """Write a file there."""
    words = ["ssh", *machine.ssh_words, "-i", str(machine.key), f"root@{machine.address}"]
    command = f"mkdir -p $(dirname {path}) && cat >{path}"
    subprocess.run([*words, command], input=text, text=True, check=True)


def say(machine: Machine, tool: str, text: str, code: int = 0) -> None:
    """Make a tool there print a text and end with a code."""
    put(machine, f"/tmp/recorded/{tool}", text)
    put(machine, f"/usr/local/bin/{tool}", f"#!/bin/sh\ncat /tmp/recorded/{tool}\nexit {code}\n")
    machine.ssh(f"chmod +x /usr/local/bin/{tool}")


def play(machine: Machine, folder: Path, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Run the roles' tasks against the host."""
    book = folder / "gpu.yml"
    book.write_text(PLAYBOOK)
    said = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(machine.key),
        "ansible_ssh_common_args": " ".join(machine.ssh_words),
        "nvidia_driver_loaded": "/tmp/recorded/version",
        **variables,
    }
    command = [str(ROOT / ".venv/bin/ansible-playbook"), "-i", f"{machine.address},", str(book)]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    environment["ANSIBLE_ROLES_PATH"] = str(ROOT / "ansible/roles")
    return subprocess.run(
        [*command, "-e", json.dumps(said)], capture_output=True, text=True, env=environment, cwd=folder
    )


def fails(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """It stopped, and says all the parts."""
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    for part in parts:
        assert part in said, said


def test_a_healthy_host_passes(recorded: Machine, tmp_path: Path) -> None:
    done = play(recorded, tmp_path, host_tuning_strict_pci=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_seven_cards_answer(recorded: Machine, tmp_path: Path) -> None:
    whole = recording("nvidia_smi")
    cut = re.sub(r"(?s)\t<gpu id=(?:(?!<gpu id=).)*?</gpu>\n", "", whole, count=1)
    say(recorded, "nvidia-smi", cut)
    try:
        fails(play(recorded, tmp_path), "gpu.count", "7 of 8 GPUs")
    finally:
        say(recorded, "nvidia-smi", whole)


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18, "driver.mismatch"),
        ("No devices were found\n", 6, "gpu.driver"),
        ("", 0, "gpu.driver"),
        ("\x00\x1b[31m<nvidia_smi_log><gpu>", 0, "gpu.driver"),
    ],
)
def test_a_broken_nvidia_smi(recorded: Machine, tmp_path: Path, text: str, code: int, part: str) -> None:
    say(recorded, "nvidia-smi", text, code)
    try:
        fails(play(recorded, tmp_path), part)
    finally:
        say(recorded, "nvidia-smi", recording("nvidia_smi"))


def test_proprietary_modules(recorded: Machine, tmp_path: Path) -> None:
    put(recorded, "/tmp/recorded/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.48.01  Mon\n")
    try:
        fails(play(recorded, tmp_path), "driver.module", "proprietary")
    finally:
        put(recorded, "/tmp/recorded/version", recording("driver_version"))


def test_bridges_that_redirect_are_told_or_refused(recorded: Machine, tmp_path: Path) -> None:
    say(recorded, "lspci", (RECORDED / "parts/lspci-acs.txt").read_text())
    try:
        assert play(recorded, tmp_path).returncode == 0
        done = play(recorded, tmp_path, host_tuning_strict_pci=True)
        fails(done, "pci.acs")
    finally:
        say(recorded, "lspci", recording("lspci"))
