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
from rich.text import Text

from hearth.deploy import here
from hearth.errors import Unreachable

LAST = "last-status.json"
DEFAULT = "http://127.0.0.1:9400"


def status(
    url: Annotated[
        str | None,
        typer.Option(
            help=f"The supervisor. Default: of what is deployed here, or {DEFAULT}.", envvar="HEARTH_URL"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Take the address from this config.")
    ] = None,
    release: Annotated[
        Path | None, typer.Option(help="A release's folder: take the address on this host from it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole document.")] = False,
) -> None:
    """Show state, plan wanted and in effect, tokens/s and the last failures.

    When no supervisor answers, shows how the last one ended; not with --url alone.
    """
    named = url is not None and config is None and release is None
    found = None if named else here.find(config, release)
    if found is not None:
        document, live = _fetch(found.supervisor, found.on_host(found.config.paths.state / LAST))
    else:
        document, live = _fetch(url or DEFAULT, None)
    if as_json:
        typer.echo(json.dumps(document if live else {**document, "live": False}))
    else:
        _show(document, live)


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
    table.add_row("phase", Text(_phase(document, live)))
    table.add_row("plan wanted", _plan(plan["wanted"]))
    table.add_row("plan started", f"{_plan(plan['started'])}, {document['ladder_steps']} steps down")
    table.add_row("plan in effect", _plan(plan["effective"]) if plan["known"] else "not known yet")
    rates = document["tokens_per_second"]
    table.add_row("tokens/s", f"{rates['generation']:g} generated, {rates['prefill']:g} prefill")
    requests = document["requests"]
    table.add_row("requests", f"{requests['running']:g} running, {requests['queued']:g} waiting")
    table.add_row("canary", Text(_canary(document.get("canary", {}))))
    table.add_row("restarts", str(document["restarts"]))
    console.print(table)
    for sentence in plan["downgrades"]:
        console.print(f"! the engine switched graphs off by itself: {sentence}", markup=False)
    for failure in document["failures"][-5:]:
        _show_failure(console, failure)


def _phase(document: dict[str, Any], live: bool) -> str:
    """`load, 42 s: Loading shards 3/20`: how long it is in this phase, and how far."""
    phase, spent = document["phase"], dict(document.get("phase_seconds", {}))
    seconds = spent.pop(phase, None)
    if not live or document["state"] != "starting":
        return phase if seconds is None else f"{phase}, {seconds:.0f} s"
    seconds = max(0.0, time.time() - document["state_since"] - sum(spent.values()))
    progress = f": {document['progress']}" if document.get("progress") else ""
    return f"{phase}, {seconds:.0f} s{progress}"


def _canary(canary: dict[str, Any]) -> str:
    """The last answer to the request with a known answer."""
    if not canary.get("detail"):
        return "not asked yet"
    return f"{'right' if canary.get('ok') else 'not right'}: {' '.join(canary['detail'].split())}"


def _plan(plan: dict[str, Any]) -> str:
    size = "" if plan["decode_max_bs"] is None else f", batch {plan['decode_max_bs']}"
    return f"{plan['name']} (prefill {plan['prefill']}, decode {plan['decode']}{size})"


def _show_failure(console: Console, failure: dict[str, Any]) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure["at"]))
    cause = failure["evidence"][0][:200] if failure["evidence"] else ""
    console.print(f"{when} {failure['kind']} in {failure['phase']}: {cause}", markup=False)
    console.print(f"  done: {failure['done']}", markup=False)
