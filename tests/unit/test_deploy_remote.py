"""What ssh and sudo say, as one line with the fix."""

from __future__ import annotations

import pytest

from hearth.deploy import gate
from hearth.deploy.gate import problem_of
from hearth.deploy.inventory import Target
from hearth.deploy.remote import NoAccess, Said, refusal, run, ssh_words, words_for
from hearth.errors import Unreachable

HOST = Target("gpu1", "192.0.2.1", user="ops", port=2222, key="/k")
LOCAL = Target("localhost", "localhost", local=True)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("ssh: Could not resolve hostname gpu1: Name or service not known", Unreachable, "unknown host"),
        ("ops@192.0.2.1: Permission denied (publickey).", NoAccess, "the SSH key is refused"),
        ("ssh: connect to host 192.0.2.1 port 2222: No route to host", Unreachable, "no route to it"),
        (
            "ssh: connect to host x port 2222: Connection refused",
            Unreachable,
            "nothing listens on SSH port 2222",
        ),
        ("ssh: connect to host x port 2222: Connection timed out", Unreachable, "no answer on SSH port 2222"),
        ("kex_exchange_identification: Connection closed by remote host", Unreachable, "closes SSH"),
        ("Host key verification failed.", NoAccess, "host key"),
        ('Load key "/k": invalid format\nops@x: Permission denied (publickey).', NoAccess, "key file"),
        ("", Unreachable, "no reason given"),
    ],
)
def test_ssh(text: str, kind: type, said: str) -> None:
    found = refusal(HOST, Said(255, "", text))
    assert type(found) is kind
    assert said in str(found)
    assert "gpu1" in str(found)
    assert found.hint


@pytest.mark.parametrize("text", ["sudo: a password is required", "sudo: a terminal is required to read"])
def test_sudo(text: str) -> None:
    found = refusal(HOST, Said(1, "", text))
    assert isinstance(found, NoAccess)
    assert "ops may not use sudo" in str(found)


def test_a_command_that_fails_is_no_refusal() -> None:
    assert refusal(HOST, Said(1, "", "grep: no such file")) is None
    assert refusal(HOST, Said(0, "", "sudo: unable to resolve host x")) is None


def test_words() -> None:
    words = ssh_words(HOST)
    assert words[0] == "ssh"
    assert words[-1] == "ops@192.0.2.1"
    assert words[-5:-1] == ["-p", "2222", "-i", "/k"]
    assert "BatchMode=yes" in words


def test_this_machine_without_ssh() -> None:
    assert words_for(LOCAL, "true", root=False) == ["sh", "-c", "true"]
    assert run(LOCAL, "echo \"a 'b' $((1+1))\"", root=False).out == "a 'b' 2\n"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("0\ndebian 12 Debian GNU/Linux 12\n/usr/bin/python3\n", ""),
        ("0\nubuntu 24.04 Ubuntu 24.04.1 LTS\n/usr/bin/python3\n", ""),
        ("0\nalpine 3.20 Alpine Linux v3.20\nnone\n", "Alpine Linux v3.20 is not supported"),
        ("0\nubuntu 20.04 Ubuntu 20.04 LTS\n/usr/bin/python3\n", "Ubuntu 20.04 LTS is not supported"),
        ("0\nunknown\nnone\n", "unknown is not supported"),
        ("0\ndebian 12 Debian GNU/Linux 12\nnone\n", "no python3"),
        ("1000\ndebian 12 Debian\n/usr/bin/python3\n", "not root there"),
        ("", "not root there"),
    ],
)
def test_first_look(said: str, problem: str) -> None:
    found = problem_of(HOST, said)
    assert (str(found) if found else "")[: len("gpu1: " + problem)] == (f"gpu1: {problem}" if problem else "")


@pytest.mark.parametrize(("sudo", "become"), [("/usr/bin/sudo", {}), ("none", {"ansible_become": False})])
def test_root_needs_no_sudo(monkeypatch: pytest.MonkeyPatch, sudo: str, become: dict[str, bool]) -> None:
    said = Said(0, f"0\ndebian 12 Debian GNU/Linux 12\n/usr/bin/python3\n{sudo}\n", "")
    monkeypatch.setattr(gate, "run", lambda target, script: said)
    assert gate.enter(LOCAL).ansible() == {"ansible_connection": "local", **become}


def test_the_look_is_a_script_that_a_shell_runs() -> None:
    lines = run(LOCAL, gate._LOOK.strip(), root=False).out.splitlines()
    assert len(lines) == 4
