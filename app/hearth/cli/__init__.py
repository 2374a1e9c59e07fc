"""The `hearth` command: one file a verb. Verbs parse and print; the work is elsewhere."""

from __future__ import annotations

import sys

import typer

from hearth import __version__
from hearth.cli import (
    bake,
    deploy,
    doctor,
    explain,
    failures,
    host,
    image,
    kernels,
    launch,
    lock,
    plan,
    promote,
    release,
    releases,
    rollback,
    serve,
    status,
    trace,
    warm,
)
from hearth.errors import ExitCode, HearthError

app = typer.Typer(
    help="Runs an SGLang engine with the graph plan you asked for, and keeps it serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.command()(launch.launch)
app.command()(status.status)
app.command()(explain.explain)
app.command()(doctor.doctor)
app.command()(failures.failures)
app.command()(plan.plan)
app.command()(promote.promote)
app.command()(trace.trace)
app.command()(bake.bake)
app.command()(warm.warm)
app.add_typer(kernels.kernels_app, name="kernels")
app.add_typer(image.image_app, name="image")
app.add_typer(release.release_app, name="release")
app.command()(deploy.deploy)
app.command()(rollback.rollback)
app.command()(releases.releases)
app.command()(lock.lock)
app.add_typer(host.host_app, name="host")


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
