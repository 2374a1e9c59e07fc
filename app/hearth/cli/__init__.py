"""The `hearth` command: one file a verb. Verbs parse and print; the work is elsewhere.

A verb's file is imported when it is called: `hearth trace` runs where there is no Docker SDK, and
`hearth serve` doesn't wait for what a deploy needs.
"""

from __future__ import annotations

import errno
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from hearth import __version__
from hearth.errors import ExitCode, HearthError

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
VERBS = (
    *("serve", "launch", "status", "explain", "doctor", "failures", "plan", "promote"),
    *("trace", "bake", "warm", "kernels", "fetch", "image"),
    *("deploy", "rollback", "releases", "lock", "host", "release"),
)
"""In the order of `hearth --help`: running, kernels and weights, deploying."""


class Verbs(TyperGroup):
    """The verbs by name, each from its own file: a function `NAME`, or a group of verbs `NAME_app`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Every verb's name."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb of that name, or None."""
        if cmd_name not in VERBS:
            return None
        module = import_module(f"hearth.cli.{cmd_name}")
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.callback()(lambda: None)
        if hasattr(module, f"{cmd_name}_app"):
            one.add_typer(getattr(module, f"{cmd_name}_app"), name=cmd_name)
        else:
            one.command(cmd_name)(getattr(module, cmd_name))
        group = get_command(one)
        assert isinstance(group, TyperGroup)
        return group.commands[cmd_name]


app = typer.Typer(
    cls=Verbs,
    help="Runs an SGLang engine with the graph plan you asked for, and keeps it serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"hearth {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: runs a verb and turns what a person can act on into one line and an exit code."""
    try:
        app()
    except HearthError as error:
        typer.echo(f"hearth: {error}", err=True)
        sys.exit(error.code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(ExitCode.OK)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        place = f"{error.filename}: " if error.filename else ""
        typer.echo(f"hearth: {place}{error.strerror} (df -h shows which disk; then run it again)", err=True)
        sys.exit(ExitCode.DISK)
