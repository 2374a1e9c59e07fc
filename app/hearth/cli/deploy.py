"""`hearth deploy`: a bare host becomes an endpoint, from the operator's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hearth.deploy import order as ordering
from hearth.deploy import runner
from hearth.deploy.inventory import resolve
from hearth.errors import ExitCode

Hosts = Annotated[
    list[str],
    typer.Argument(help="gpu1, user@gpu1:2222, localhost, or an inventory file.", metavar="HOST..."),
]
Inventory = Annotated[
    Path | None, typer.Option("--inventory", "-i", help="Where names are looked up (ansible/inventory.yml).")
]
Key = Annotated[str, typer.Option("--key", help="SSH key file.")]
SshArgs = Annotated[
    str,
    typer.Option("--ssh-args", help="More options of ssh, quoted as for a shell.", envvar="HEARTH_SSH_ARGS"),
]
Why = Annotated[str, typer.Option("--why", help="What others are told while you hold the host.")]


def deploy(
    hosts: Hosts,
    config: Annotated[Path, typer.Option("--config", "-c", help="The deployment config.")] = Path(
        "hearth.yaml"
    ),
    image: Annotated[str, typer.Option(help="An image: images/NAME.yaml.")] = "",
    image_from: Annotated[
        str, typer.Option(help="build (on the host), local (here, shipped), present.")
    ] = "",
    image_ref: Annotated[str, typer.Option(help="Its name, where it isn't named by its content.")] = "",
    check: Annotated[bool, typer.Option("--check", help="Say what would change; change nothing.")] = False,
    secret: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE, a secret that the config reads.")
    ] = None,
    inventory: Inventory = None,
    key: Key = "",
    ssh_args: SshArgs = "",
    why: Why = "",
    tags: Annotated[str, typer.Option(help="Only these parts, as in ansible-playbook.")] = "",
    root: Annotated[Path, typer.Option(help="The project's folder.")] = Path(),
) -> None:
    """Provision hosts, put a release there, prove that it serves; otherwise go back to the one before."""
    secrets = {name: Path(path) for name, path in ordering.pairs(secret or [], "--secret").items()}
    asked = ordering.Order(config, root, image, image_from, image_ref, check, tags, why, secrets)
    ordering.read_config(config)
    targets = runner.enter(resolve(hosts, inventory, key, ssh_args))
    record = runner.new_record()
    job = ordering.job(asked, targets, record, say)
    finish(*runner.perform(job, record, root / "ansible", why))


def say(text: str) -> None:
    """A line on stderr: stdout is for the report."""
    typer.echo(text, err=True)


def finish(code: ExitCode, text: str) -> None:
    """Print a run's report and end with its code."""
    typer.echo(text, nl=False)
    if code is not ExitCode.OK:
        raise typer.Exit(int(code))
