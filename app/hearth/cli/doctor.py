"""`hearth doctor`: is this host fit to serve?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hearth.config import Config
from hearth.deploy import here
from hearth.errors import CheckFailed, ConfigError, HearthError, MissingError
from hearth.host.checks import Check, Status, facts_from_json, report
from hearth.host.collect import LIMIT
from hearth.host.doctor import examine, gather, wanted_for

_STYLE = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Deployment config: how many GPUs, where the weights are. Default: the one deployed here.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="How many GPUs there should be, or none. Default: the config's, or 8."),
    ] = None,
    gpu_name: Annotated[
        str | None, typer.Option("--gpu-name", help="Part of the name that every GPU must have; '' for any.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also an all-reduce over all GPUs (a minute; needs them free).")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option("--python", help="The engine's interpreter, for --deep. Default: the config's."),
    ] = None,
    facts: Annotated[
        Path | None,
        typer.Option("--facts", help="Judge recorded facts instead of this host (see --collect)."),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Print this host's facts as JSON and judge nothing.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that one command may take.", min=1)] = LIMIT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document other tools read.")] = False,
) -> None:
    """Check this host: system, driver, GPUs, PCIe, Docker. Each finding says why it matters and what to do.

    Without root some checks are skipped, and say so. Exit code 3 when a check failed.
    """
    settings = _settings(config) if facts is None or config is not None else None
    wanted = wanted_for(settings, _count(gpu), gpu_name)
    found, wanted = (_recorded(facts), wanted) if facts is not None else gather(wanted, timeout)
    if collect:
        typer.echo(json.dumps({name: asdict(output) for name, output in found.items()}, indent=1))
        return
    interpreter = python or (settings.engine.python if settings and config else "python3")
    checks = examine(found, wanted, interpreter if deep else None)
    if as_json:
        typer.echo(json.dumps(report(checks), ensure_ascii=False))
    else:
        _show(checks)
    _fail(checks)


def _settings(config: Path | None) -> Config | None:
    """The config that is named, or of what is deployed here, where that can be read."""
    try:
        found = here.find(config)
    except HearthError as error:
        if config is not None:
            raise
        typer.echo(f"hearth: what is deployed here is not looked at: {error}", err=True)
        return None
    return found.outside if found is not None else None


def _count(gpu: str | None) -> int | None:
    if gpu is None:
        return None
    if gpu == "none":
        return 0
    if gpu.isascii() and gpu.isdigit() and len(gpu) <= 3:
        return int(gpu)
    raise ConfigError(f"--gpu {gpu}: neither none nor a number", "write --gpu none, or --gpu 8")


def _recorded(path: Path) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file", "record one with `hearth doctor --collect`") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not recorded facts: {error}", "record them with --collect") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not recorded facts: not an object", "record them with --collect")
    return facts_from_json(data)


def _show(checks: Sequence[Check]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for check in checks:
        if check.status is not Status.SKIP:
            line = f"{check.status.value:<5} {check.id:<20} {check.seen}"
            console.print(line, style=_STYLE[check.status], markup=False)
    for why, group in _skipped(checks).items():
        console.print(f"skip  {', '.join(group)}: {why}", style=_STYLE[Status.SKIP], markup=False)
    for check in checks:
        if check.status in (Status.WARN, Status.FAIL):
            console.print(f"\n{check.id}: {check.seen}", markup=False)
            console.print(f"  why: {check.why}\n  fix: {check.fix}", markup=False)
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    console.print("\n" + ", ".join(f"{count} {status.value}" for status, count in counts.items()))


def _skipped(checks: Sequence[Check]) -> dict[str, list[str]]:
    """Ids by the reason why they were not looked at."""
    groups: dict[str, list[str]] = {}
    for check in checks:
        if check.status is Status.SKIP:
            groups.setdefault(f"{check.why}{f' ({check.fix})' if check.fix else ''}", []).append(check.id)
    return groups


def _fail(checks: Sequence[Check]) -> None:
    failed = [check for check in checks if check.status is Status.FAIL]
    if failed:
        names = ", ".join(check.id for check in failed)
        noun = "check" if len(failed) == 1 else "checks"
        raise CheckFailed(f"{len(failed)} {noun} failed: {names}", failed[0].fix)
