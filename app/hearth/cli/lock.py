"""`hearth lock`: who works on a host, and taking a dead one's lock away."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from hearth.cli.deploy import Hosts, Inventory, Key, SshArgs
from hearth.deploy import hostlock
from hearth.deploy.inventory import Target, resolve


def lock(
    hosts: Hosts,
    release: Annotated[bool, typer.Option("--release", help="Remove the lock, whoever holds it.")] = False,
    why: Annotated[str, typer.Option("--why", help="Take the lock and keep it, for this reason.")] = "",
    inventory: Inventory = None,
    key: Key = "",
    ssh_args: SshArgs = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say who holds a host and why; with --why hold it yourself; with --release remove a lock."""
    for target in resolve(hosts, inventory, key, ssh_args):
        if release:
            _tell(target, hostlock.force(target), "was held by {} (removed)", as_json)
        elif why:
            _hold(target, why, as_json)
        else:
            _tell(target, hostlock.look(target), "is held by {}", as_json)


def _hold(target: Target, why: str, as_json: bool) -> None:
    """A lock by hand belongs to no process, so nothing takes it for a dead one's."""
    me = hostlock.by_hand(why)
    hostlock.take(target, me, lambda text: typer.echo(text, err=True))
    _tell(target, me, "is held by {}", as_json)


def _tell(target: Target, holder: hostlock.Holder | None, form: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"host": target.name, "holder": asdict(holder) if holder else None}))
    else:
        typer.echo(f"{target.name} {form.format(holder.sentence) if holder else 'is free'}")
