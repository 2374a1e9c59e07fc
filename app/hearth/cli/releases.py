"""`hearth releases`: the releases that hosts keep."""

from __future__ import annotations

import typer

from hearth.cli.deploy import Hosts, Inventory, Key, SshArgs
from hearth.cli.host import on_host
from hearth.deploy.inventory import resolve


def releases(
    hosts: Hosts,
    inventory: Inventory = None,
    key: Key = "",
    ssh_args: SshArgs = "",
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the releases of each host: which runs, which was proven, who made it."""
    for target in resolve(hosts, inventory, key, ssh_args):
        on_host(target, "release", "list", *(["--json"] if as_json else []))
