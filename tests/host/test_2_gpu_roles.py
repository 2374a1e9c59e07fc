"""The tasks of the GPU roles, against recorded outputs of real tools: a healthy host, and what breaks.

The host has no GPU: `nvidia-smi`, `lspci` and `modinfo` there are scripts that print a recording. What
installs driver and toolkit: test_2_packages.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.machine import ROOT, Machine
from tests.host.roles import play, put, tells

RECORDED = ROOT / "tests/fixtures/host"
HEALTHY = RECORDED / "rtx8"
DRIVER = "580.159.04"
"""The one of the recording."""
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


def say(machine: Machine, tool: str, text: str, code: int = 0) -> None:
    """Make a tool there print a text and end with a code."""
    put(machine, f"/tmp/recorded/{tool}", text)
    put(machine, f"/usr/local/bin/{tool}", f"#!/bin/sh\ncat /tmp/recorded/{tool}\nexit {code}\n")
    machine.ssh(f"chmod +x /usr/local/bin/{tool}")


def verify(machine: Machine, folder: Path, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Let the roles judge the host."""
    said = {"nvidia_driver_loaded": "/tmp/recorded/version", "nvidia_driver_version": DRIVER, **variables}
    return play(machine, folder, "nvidia_driver/verify", "host_tuning/verify", **said)


def test_a_healthy_host_passes(recorded: Machine, tmp_path: Path) -> None:
    done = verify(recorded, tmp_path, host_tuning_strict_pci=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_seven_cards_answer(recorded: Machine, tmp_path: Path) -> None:
    whole = recording("nvidia_smi")
    cut = re.sub(r"(?s)\t<gpu id=(?:(?!<gpu id=).)*?</gpu>\n", "", whole, count=1)
    say(recorded, "nvidia-smi", cut)
    try:
        tells(verify(recorded, tmp_path), "gpu.count", "7 of 8 GPUs")
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
        tells(verify(recorded, tmp_path), part)
    finally:
        say(recorded, "nvidia-smi", recording("nvidia_smi"))


def test_proprietary_modules(recorded: Machine, tmp_path: Path) -> None:
    put(recorded, "/tmp/recorded/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.48.01  Mon\n")
    try:
        tells(verify(recorded, tmp_path), "driver.module", "proprietary")
    finally:
        put(recorded, "/tmp/recorded/version", recording("driver_version"))


def test_another_driver_than_the_one_wanted(recorded: Machine, tmp_path: Path) -> None:
    done = verify(recorded, tmp_path, nvidia_driver_version="595.45.04")
    tells(done, "another driver than 595.45.04 is loaded")


def test_bridges_that_redirect_are_told_or_refused(recorded: Machine, tmp_path: Path) -> None:
    say(recorded, "lspci", (RECORDED / "parts/lspci-acs.txt").read_text())
    try:
        assert verify(recorded, tmp_path).returncode == 0
        done = verify(recorded, tmp_path, host_tuning_strict_pci=True)
        tells(done, "pci.acs")
    finally:
        say(recorded, "lspci", recording("lspci"))
