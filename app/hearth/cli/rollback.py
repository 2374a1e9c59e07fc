"""`hearth rollback`: a host goes back to the release before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.deploy import Hosts, Inventory, Key, SshArgs, Why, finish
from hearth.deploy import runner
from hearth.deploy.inventory import resolve


def rollback(
    hosts: Hosts,
    inventory: Inventory = None,
    key: Key = "",
    ssh_args: SshArgs = "",
    why: Why = "",
    root: Annotated[Path, typer.Option(help="The project's folder.")] = Path(),
) -> None:
    """Run the release before the current one again; it must pass its smoke test."""
    targets = runner.enter(resolve(hosts, inventory, key, ssh_args))
    job = runner.Job("rollback", "rollback.yml", tuple(targets), {})
    finish(*runner.perform(job, runner.new_record(), root / "ansible", why))
