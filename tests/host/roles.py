"""Single task files of the roles, run against a host."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.host.machine import ROOT, Machine

FACTS = "ansible.builtin.setup: {gather_subset: ['!all', '!min', distribution, platform, virtual]}"


def ssh(machine: Machine, command: str, given: bytes) -> None:
    """Run a command there, with this on its standard input."""
    words = ["ssh", *machine.ssh_words, "-i", str(machine.key), f"root@{machine.address}", command]
    subprocess.run(words, input=given, check=True)


def put(machine: Machine, path: str, text: str) -> None:
    """Write a file there."""
    ssh(machine, f"mkdir -p $(dirname {path}) && cat >{path}", text.encode())


def play(
    machine: Machine, folder: Path, *tasks: str, dry: bool = False, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Run these ROLE/FILE in their order; `dry`: in check mode."""
    imports = [
        f"ansible.builtin.import_role: {{name: {role}, tasks_from: {file}}}"
        for role, _, file in (each.partition("/") for each in tasks)
    ]
    book = folder / "book.yml"
    lines = ["- hosts: all", "  gather_facts: false", "  tasks:", *(f"    - {t}" for t in [FACTS, *imports])]
    book.write_text("\n".join(lines))
    said = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(machine.key),
        "ansible_ssh_common_args": " ".join(machine.ssh_words),
        **variables,
    }
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    environment["ANSIBLE_ROLES_PATH"] = str(ROOT / "ansible/roles")
    command = [str(ROOT / ".venv/bin/ansible-playbook"), "-i", f"{machine.address},", str(book)]
    command += ["-e", json.dumps(said), *(["--check"] if dry else [])]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


def tells(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """It stopped, and says all the parts."""
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0, said
    for part in parts:
        assert part in said, said


def changed(done: subprocess.CompletedProcess[str]) -> int:
    """How many tasks of a run that went well changed something."""
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split("changed=")[1].split()[0])
