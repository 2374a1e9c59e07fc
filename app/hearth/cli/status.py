"""`hearth status`: what a supervisor is doing now, and why."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hearth.config import load, parse
from hearth.deploy import releases
from hearth.errors import ConfigError, Unreachable
from hearth.yamltext import read

LAST = "last-status.json"


def status(
    url: Annotated[str, typer.Option(help="The supervisor.", envvar="HEARTH_URL")] = "http://127.0.0.1:9400",
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Take the address from this config.")
    ] = None,
    release: Annotated[
        Path | None, typer.Option(help="A release's folder: take the address on this host from it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole document.")] = False,
) -> None:
    """Show state, plan wanted and in effect, tokens/s and the last failures.

    When no supervisor answers and --config or --release is given, shows how the last one ended.
    """
    last: Path | None = None
    if release is not None:
        url, last = _of_release(release)
    elif config is not None:
        settings = load(config)
        host = settings.ports.supervisor_host
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{settings.ports.supervisor}"
        last = settings.paths.state / LAST
    document, live = _fetch(url, last)
    if as_json:
        typer.echo(json.dumps(document if live else {**document, "live": False}))
    else:
        _show(document, live)


def _of_release(folder: Path) -> tuple[str, Path | None]:
    """Where the release's container is reached on this host, and its last status. Raises ConfigError."""
    release = releases.load(folder)
    path = folder / release.config.file
    settings = parse(read(path), str(path))
    published = release.container.published(settings.ports.supervisor)
    if published is None:
        raise ConfigError(f"{path}: ports.supervisor: {settings.ports.supervisor} isn't published")
    inside = settings.paths.state / LAST
    return f"http://{published.reach}", release.container.on_host(inside)


def _fetch(url: str, last: Path | None) -> tuple[dict[str, Any], bool]:
    try:
        with urllib.request.urlopen(f"{url}/status", timeout=5) as answer:
            return json.load(answer), True
    except (OSError, ValueError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", None) or error
        try:
            return json.loads((last or Path("/nonexistent")).read_text(encoding="utf-8")), False
        except (OSError, ValueError):
            raise Unreachable(
                f"{url}: no supervisor answers: {reason}", "start it (systemctl start hearth), or give --url"
            ) from None


def _show(document: dict[str, Any], live: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not live:
        console.print("No supervisor is running. This is how the last one ended:")
    console.print(f"[bold]{document['state']}[/bold]: ", end="")
    console.print(document["sentence"], markup=False)
    plan = document["plan"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("plan wanted", _plan(plan["wanted"]))
    table.add_row("plan started", f"{_plan(plan['started'])}, {document['ladder_steps']} steps down")
    table.add_row("plan in effect", _plan(plan["effective"]) if plan["known"] else "not known yet")
    rates = document["tokens_per_second"]
    table.add_row("tokens/s", f"{rates['generation']:g} generated, {rates['prefill']:g} prefill")
    requests = document["requests"]
    table.add_row("requests", f"{requests['running']:g} running, {requests['queued']:g} waiting")
    table.add_row("restarts", str(document["restarts"]))
    console.print(table)
    for sentence in plan["downgrades"]:
        console.print(f"! the engine switched graphs off by itself: {sentence}", markup=False)
    for failure in document["failures"][-5:]:
        _show_failure(console, failure)


def _plan(plan: dict[str, Any]) -> str:
    size = "" if plan["decode_max_bs"] is None else f", batch {plan['decode_max_bs']}"
    return f"{plan['name']} (prefill {plan['prefill']}, decode {plan['decode']}{size})"


def _show_failure(console: Console, failure: dict[str, Any]) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure["at"]))
    cause = failure["evidence"][0][:200] if failure["evidence"] else ""
    console.print(f"{when} {failure['kind']} in {failure['phase']}: {cause}", markup=False)
    console.print(f"  done: {failure['done']}", markup=False)
