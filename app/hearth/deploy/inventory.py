"""Which hosts a deploy goes to: names on the command line, or an inventory, to targets with their variables.

`parse_host` and `targets_in` are pure; `resolve` also reads files, through `ansible-inventory`, so that every
form of inventory that Ansible knows is read the way Ansible reads it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hearth.errors import ConfigError, MissingError

DEFAULT = Path("ansible/inventory.yml")
_HOST = re.compile(
    r"(?:(?P<user>[a-z_][a-z0-9_.-]*)@)?(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?"
)
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Target:
    """One host: how to reach it, and the variables that its inventory gives it."""

    name: str
    address: str
    user: str = ""
    port: int | None = None
    local: bool = False
    """This machine itself: no SSH."""
    key: str = ""
    """File with the SSH key; empty for ssh's own choice."""
    ssh_args: tuple[str, ...] = ()
    """More options of ssh."""
    sudo: bool = True
    """Whether sudo is there; without it only root's own login helps."""
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gpus(self) -> bool:
        """Whether the host has GPUs, by its inventory."""
        return str(self.variables.get("gpu", "nvidia")) != "none"

    def ansible(self) -> dict[str, Any]:
        """Its variables for Ansible, connection included."""
        own: dict[str, Any] = {"ansible_host": self.address}
        if self.local:
            own = {"ansible_connection": "local"}
        if self.port:
            own["ansible_port"] = self.port
        if self.user:
            own["ansible_user"] = self.user
        if self.key:
            own["ansible_ssh_private_key_file"] = self.key
        if self.ssh_args:
            own["ansible_ssh_common_args"] = shlex.join(self.ssh_args)
        if not self.sudo:
            own["ansible_become"] = False
        return {**self.variables, **own}


def parse_host(text: str) -> Target:
    """`gpu1`, `ops@gpu1`, `ops@gpu1:2222`, `[2001:db8::1]:22` or `localhost`. Raises ConfigError."""
    found = _HOST.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else None
    if found is None or text.startswith("-") or (port is not None and not 0 < port < 65536):
        raise ConfigError(
            f"{text[:80]!r} is no host", "write gpu1, user@gpu1, user@gpu1:2222, or an inventory file"
        )
    host = found["host"].strip("[]")
    local = host in _LOCAL and not found["user"] and port is None
    return Target(name=host, address=host, user=found["user"] or "", port=port, local=local)


def split_hosts(words: Sequence[str]) -> list[str]:
    """The words of HOST, which may also be separated by commas, each once. Raises ConfigError for none."""
    found = [part for word in words for part in re.split(r"[,\s]+", word) if part]
    if not found:
        raise ConfigError("no host given", "make deploy HOST=gpu1, or hearth deploy gpu1")
    return list(dict.fromkeys(found))


def split_args(text: str, place: str) -> tuple[str, ...]:
    """Options of ssh as words, quoted as for a shell. Raises ConfigError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{place}: {text!r}: {error}", "close the quotes") from error


def targets_in(listing: Mapping[str, Any]) -> dict[str, Target]:
    """The hosts of `ansible-inventory --list`, by name."""
    variables: Mapping[str, Mapping[str, Any]] = listing.get("_meta", {}).get("hostvars", {})
    names = _members(listing, "all") or list(variables)
    return {name: _from_inventory(name, variables.get(name, {})) for name in names}


def is_inventory(word: str) -> bool:
    """Whether a word of HOST names an inventory rather than a host."""
    return "/" in word or Path(word).suffix in (".yml", ".yaml", ".ini", ".json") or Path(word).is_file()


def resolve(words: Sequence[str], inventory: Path | None, key: str = "", ssh_args: str = "") -> list[Target]:
    """The targets that the words name.

    A name is looked up in `inventory` (default: ansible/inventory.yml, where there is one) and is otherwise a
    host's address. `ssh_args` is quoted as for a shell. Raises ConfigError or MissingError.
    """
    more = split_args(ssh_args, "--ssh-args")
    known = _known(inventory)
    found: list[Target] = []
    for word in split_hosts(words):
        if is_inventory(word):
            found += read_inventory(Path(word)).values()
        elif word in known:
            found.append(known[word])
        else:
            found.append(_plain(word, known))
    if not found:
        raise ConfigError(f"{' '.join(words)}: no host in it", "see ansible/inventory.example.yml")
    return [replace(t, key=key or t.key, ssh_args=(*t.ssh_args, *more)) for t in _once(found)]


def read_inventory(path: Path) -> dict[str, Target]:
    """The hosts of an inventory file. Raises MissingError or ConfigError."""
    if not path.exists():
        raise MissingError(
            f"{path}: no such inventory", "cp ansible/inventory.example.yml ansible/inventory.yml"
        )
    tool = Path(sys.executable).with_name("ansible-inventory")
    if not tool.exists():
        raise MissingError("ansible-inventory isn't installed", "make setup, or pip install 'hearth[deploy]'")
    command = [str(tool), "--inventory", str(path), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    problem = _complaint(done.stderr)
    if done.returncode != 0 or problem:
        raise ConfigError(
            f"{path}: {problem or 'Ansible cannot read it'}", "see ansible/inventory.example.yml"
        )
    return targets_in(json.loads(done.stdout))


def to_ansible(targets: Sequence[Target]) -> dict[str, Any]:
    """An inventory of these targets alone, as Ansible reads it."""
    return {"all": {"hosts": {target.name: target.ansible() for target in targets}}}


def _complaint(text: str) -> str:
    for line in text.splitlines():
        if "Failed to parse" in line or "Unable to parse" in line or line.startswith(("ERROR", "[ERROR]")):
            return line.partition("]:")[2].strip()[:300] or line[:300]
    return ""


def _known(inventory: Path | None) -> dict[str, Target]:
    if inventory is not None:
        return read_inventory(inventory)
    return read_inventory(DEFAULT) if DEFAULT.is_file() else {}


def _plain(word: str, known: Mapping[str, Target]) -> Target:
    """A host that the inventory doesn't name as it stands; user and port may still go over its entry."""
    target = parse_host(word)
    entry = known.get(target.name)
    if entry is None:
        return target
    return replace(entry, user=target.user or entry.user, port=target.port or entry.port)


def _once(targets: Sequence[Target]) -> list[Target]:
    return list({target.name: target for target in targets}.values())


def _members(listing: Mapping[str, Any], group: str) -> list[str]:
    said = listing.get(group, {})
    inner = [name for child in said.get("children", []) for name in _members(listing, child)]
    return list(dict.fromkeys([*said.get("hosts", []), *inner]))


def _from_inventory(name: str, said: Mapping[str, Any]) -> Target:
    ssh = split_args(str(said.get("ansible_ssh_common_args", "")), f"{name}: ansible_ssh_common_args")
    rest = {key: value for key, value in said.items() if key not in _OWN}
    return Target(
        name=name,
        address=str(said.get("ansible_host", name)),
        user=str(said.get("ansible_user", "")),
        port=int(said["ansible_port"]) if "ansible_port" in said else None,
        local=said.get("ansible_connection") == "local",
        key=str(said.get("ansible_ssh_private_key_file", "")),
        ssh_args=ssh,
        variables=rest,
    )


_OWN = (
    "ansible_host",
    "ansible_user",
    "ansible_port",
    "ansible_connection",
    "ansible_ssh_private_key_file",
    "ansible_ssh_common_args",
)
