"""`hearth promote`: try the wanted plan again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hearth.config import load
from hearth.planstore import PlanStore


def promote(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="Deployment config.", envvar="HEARTH_CONFIG")
    ] = Path("/etc/hearth/hearth.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print what was forgotten as JSON.")] = False,
) -> None:
    """Forget remembered step-downs, so that the next start tries the wanted plan.

    Do this after what made it fail was fixed. It takes effect with the next restart of the service.
    """
    forgotten = PlanStore(load(config).paths.state).forget()
    plans = [{"wanted": entry.wanted.to_json(), "plan": entry.plan.to_json()} for entry in forgotten]
    if as_json:
        typer.echo(json.dumps({"forgotten": plans}))
        return
    for entry in forgotten:
        typer.echo(f"Forgot {entry.plan}: the next start tries {entry.wanted}.")
    typer.echo(
        "Now: systemctl restart hearth" if forgotten else "No step down is remembered; nothing to forget."
    )
