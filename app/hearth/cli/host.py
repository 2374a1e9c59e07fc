"""`hearth host`: day two of a host, from the operator's machine."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.deploy import Hosts, Inventory, Key, SshArgs, Why, finish
from hearth.deploy import runner
from hearth.deploy.here import CURRENT
from hearth.deploy.inventory import Target, resolve
from hearth.deploy.remote import Said as Ended
from hearth.deploy.remote import refusal, words_for
from hearth.errors import ExitCode, MissingError

host_app = typer.Typer(help="A host's day two: status, logs, doctor, restart, remove.", no_args_is_help=True)
PROGRAM = "/opt/hearth/bin/hearth"
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def on_host(target: Target, *words: str) -> None:
    """Run a verb of the host's own `hearth`, its output going to ours. Raises typer.Exit with its code."""
    shell(target, f"[ -x {PROGRAM} ] || exit 127; exec {PROGRAM} {shlex.join(words)}")


def shell(target: Target, script: str) -> None:
    """Run a script there as root. Raises HearthError where we aren't let in, typer.Exit with its code."""
    try:
        done = subprocess.run(words_for(target, script, root=True), stderr=subprocess.PIPE, text=True)
    except FileNotFoundError as error:
        raise MissingError("ssh isn't installed", "apt-get install openssh-client") from error
    problem = refusal(target, Ended(done.returncode, "", done.stderr))
    if problem is not None:
        raise problem
    typer.echo(done.stderr, err=True, nl=False)
    if done.returncode == 127:
        raise MissingError(f"{target.name}: Hearth isn't there", f"make deploy HOST={target.name}")
    if done.returncode != 0:
        raise typer.Exit(done.returncode if done.returncode > 0 else int(ExitCode.BUG))


@host_app.command()
def status(
    hosts: Hosts, inventory: Inventory = None, key: Key = "", ssh_args: SshArgs = "", as_json: Json = False
) -> None:
    """What Hearth does there now, and why."""
    for target in resolve(hosts, inventory, key, ssh_args):
        if not as_json:
            shell(target, "systemctl show --property=ActiveState,SubState,StatusText hearth")
        on_host(target, "status", "--release", str(CURRENT), *(["--json"] if as_json else []))


@host_app.command()
def logs(
    hosts: Hosts,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    inventory: Inventory = None,
    key: Key = "",
    ssh_args: SshArgs = "",
) -> None:
    """The unit's journal."""
    for target in resolve(hosts, inventory, key, ssh_args):
        more = "--follow" if follow else "--no-pager"
        shell(target, f"exec journalctl --unit hearth --output short-iso --lines {lines} {more}")


@host_app.command()
def doctor(
    hosts: Hosts, inventory: Inventory = None, key: Key = "", ssh_args: SshArgs = "", as_json: Json = False
) -> None:
    """The checks of `hearth doctor`, there; it knows by the release how many GPUs there should be."""
    for target in resolve(hosts, inventory, key, ssh_args):
        more = [] if target.gpus else ["--gpu", "none"]
        on_host(target, "doctor", *more, *(["--json"] if as_json else []))


@host_app.command()
def restart(
    hosts: Hosts, inventory: Inventory = None, key: Key = "", ssh_args: SshArgs = "", why: Why = ""
) -> None:
    """Restart the service; comes back when it serves."""
    for target in resolve(hosts, inventory, key, ssh_args):
        shell(target, "systemctl reset-failed hearth; systemctl restart hearth")
        typer.echo(f"{target.name}: serves")


@host_app.command()
def remove(
    hosts: Hosts,
    purge: Annotated[bool, typer.Option("--purge", help="Weights, state and releases too.")] = False,
    inventory: Inventory = None,
    key: Key = "",
    ssh_args: SshArgs = "",
    why: Why = "",
    root: Annotated[Path, typer.Option(help="The project's folder.")] = Path(),
) -> None:
    """Take Hearth off a host; weights, state and releases stay unless --purge."""
    targets = runner.enter(resolve(hosts, inventory, key, ssh_args))
    job = runner.Job("remove", "remove.yml", tuple(targets), {"hearth_purge": purge})
    finish(*runner.perform(job, runner.new_record(), root / "ansible", why))
