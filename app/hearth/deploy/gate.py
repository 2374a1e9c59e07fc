"""The first look at a host, before Ansible: can we get in, and is it a host that Hearth knows?"""

from __future__ import annotations

from dataclasses import replace

from hearth.deploy.inventory import Target
from hearth.deploy.remote import run
from hearth.errors import CheckFailed, HearthError

SYSTEMS = {
    ("debian", "12"): "Debian 12",
    ("ubuntu", "22.04"): "Ubuntu 22.04",
    ("ubuntu", "24.04"): "Ubuntu 24.04",
}
_LOOK = """
id -u; (. /etc/os-release 2>/dev/null && echo "$ID $VERSION_ID $PRETTY_NAME") || echo unknown
command -v python3 || echo none
command -v sudo || echo none
"""


def enter(target: Target) -> Target:
    """The target, with what was seen. Changes nothing.

    Raises a HearthError with the fix where this host can't be deployed to.
    """
    said = run(target, _LOOK.strip())
    problem = problem_of(target, said.out)
    if problem is not None:
        raise problem
    return replace(target, sudo=has_sudo(said.out))


def has_sudo(said: str) -> bool:
    """Whether the look found sudo (pure)."""
    return said.splitlines()[3:4] != ["none"]


def problem_of(target: Target, said: str) -> HearthError | None:
    """What the look says against the host (pure)."""
    lines = [*said.splitlines(), "", "", ""]
    user, system, python = lines[0], lines[1].split(" ", 2), lines[2]
    if user != "0":
        return CheckFailed(f"{target.name}: not root there: {said[:80]!r}", "look at sudo on the host")
    if tuple(system[:2]) not in SYSTEMS:
        named = system[2] if len(system) > 2 else " ".join(system)
        return CheckFailed(
            f"{target.name}: {named} is not supported", f"install {', '.join(SYSTEMS.values())}"
        )
    if python == "none":
        return CheckFailed(f"{target.name}: no python3", "apt-get install python3 on the host")
    return None
