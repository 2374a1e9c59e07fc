"""`hearth promote`: try the wanted plan again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from hearth.deploy import here
from hearth.deploy.releases import NotAllowed
from hearth.errors import MissingError
from hearth.planstore import PlanStore


def promote(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Deployment config.", envvar="HEARTH_CONFIG")
    ] = None,
    release: Annotated[
        Path | None, typer.Option(help="A release's folder. Default: the one that runs on this host.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was forgotten as JSON.")] = False,
) -> None:
    """Forget remembered step-downs, so that the next start tries the wanted plan.

    Do this after what made it fail was fixed. It takes effect with the next restart of the service.
    """
    forgotten = PlanStore(_state(config, release)).forget()
    plans = [{"wanted": entry.wanted.to_json(), "plan": entry.plan.to_json()} for entry in forgotten]
    if as_json:
        typer.echo(json.dumps({"forgotten": plans}))
        return
    for entry in forgotten:
        typer.echo(f"Forgot {entry.plan}: the next start tries {entry.wanted}.")
    typer.echo(
        "Now: systemctl restart hearth" if forgotten else "No step down is remembered; nothing to forget."
    )


def _state(config: Path | None, release: Path | None) -> Path:
    """The folder in which the plans are remembered, seen to be there and ours to change."""
    found = here.find(config, release)
    if found is None:
        raise MissingError(f"neither {here.CONFIG} nor {here.CURRENT} is here", "give --config or --release")
    state = found.path(found.config.paths.state)
    if not state.is_dir():
        raise MissingError(
            f"{found.file}: paths.state: {state}: no such folder", "nothing ran here with it yet"
        )
    if not os.access(state, os.R_OK | os.W_OK | os.X_OK):
        raise NotAllowed(f"{state}: not allowed", "run it as root (sudo)")
    return state
