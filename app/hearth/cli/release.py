"""`hearth release`: the releases of this host (run on the host; `hearth deploy` calls it over Ansible)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hearth.deploy import releases
from hearth.deploy.activate import Report, activate
from hearth.deploy.onhost import SECRETS, Host, usable
from hearth.deploy.release import CONFIG_FILE, RELEASE_FILE, Draft, parse, with_digest
from hearth.deploy.releases import CURRENT, PREVIOUS, Kept, Store, prunable
from hearth.deploy.systemctl import UNIT, Systemctl
from hearth.errors import CheckFailed, ExitCode, MissingError
from hearth.yamltext import read

release_app = typer.Typer(
    help="The releases of this host: add, activate, go back, list, prune, test.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Root = Annotated[
    Path, typer.Option("--root", help="Folder of the releases.", envvar="HEARTH_RELEASES", show_default=True)
]
Secrets = Annotated[Path, typer.Option("--secrets", help="Folder of the secrets on the host.")]
UnitName = Annotated[str, typer.Option("--unit", help="The systemd unit.")]


@release_app.command()
def add(
    folder: Annotated[Path, typer.Argument(help=f"Folder with {RELEASE_FILE} (a draft) and {CONFIG_FILE}.")],
    root: Root = releases.ROOT,
    as_json: Json = False,
) -> None:
    """Keep FOLDER as a new release; doesn't touch what runs.

    A draft equal to the current release makes no new one ("changed": false).
    """
    store = Store(root)
    draft, config = _draft(folder)
    host = Host(store)
    digest = host.digest(draft)
    draft = draft.model_copy(update={"image": draft.image.model_copy(update={"digest": digest})})
    config = with_digest(config, digest, str(folder / CONFIG_FILE))
    with store.locked():
        release, changed = store.add(draft, config)
        host.keep_image(release)
    current = store.pointed(CURRENT) == release.id
    facts = {
        "id": release.id,
        "changed": changed,
        "current": current,
        "proven": store.kept(release.id).proven,
        "path": str(store.folder(release.id)),
    }
    _print(facts, f"{release.id} {'added' if changed else 'is the current release already'}", as_json)


@release_app.command(name="activate")
def activate_command(
    release_id: Annotated[str, typer.Argument(metavar="ID", help="The release to run.")],
    root: Root = releases.ROOT,
    secrets: Secrets = SECRETS,
    unit: UnitName = UNIT,
    force: Annotated[bool, typer.Option("--force", help="Restart even what runs and is proven.")] = False,
    as_json: Json = False,
) -> None:
    """Run a release: switch, restart, wait for READY, smoke test; otherwise go back to the one before.

    Exits 3 when the release doesn't serve; the report says why, and whether the old one serves again.
    """
    store = Store(root)
    with store.locked():
        report = _activate(store, release_id, secrets, unit, force)
    _finish(report, as_json)


@release_app.command()
def rollback(
    root: Root = releases.ROOT, secrets: Secrets = SECRETS, unit: UnitName = UNIT, as_json: Json = False
) -> None:
    """Run the previous release, as `activate` does; again: back to where it was."""
    store = Store(root)
    with store.locked():
        previous = store.pointed(PREVIOUS)
        if previous is None:
            raise MissingError(f"{root}: no previous release", "hearth release list shows what there is")
        report = _activate(store, previous, secrets, unit, force=True)
    _finish(report, as_json)


@release_app.command(name="list")
def list_command(root: Root = releases.ROOT, as_json: Json = False) -> None:
    """Every release that is kept, newest first."""
    store = Store(root)
    current, previous = store.pointed(CURRENT), store.pointed(PREVIOUS)
    rows = [_row(store.kept(each), current, previous) for each in reversed(store.ids())]
    if as_json:
        typer.echo(json.dumps({"current": current, "previous": previous, "releases": rows}))
    else:
        _show(rows)


@release_app.command()
def prune(
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest to keep.")] = 5,
    root: Root = releases.ROOT,
    as_json: Json = False,
) -> None:
    """Delete old releases and their images; never the current or the previous one."""
    store = Store(root)
    with store.locked():
        in_use = {each for each in (store.pointed(CURRENT), store.pointed(PREVIOUS)) if each}
        removed = prunable(store.ids(), keep, in_use)
        for each in removed:
            store.remove(each)
        images = Host(store).drop_images()
        secrets = Host(store).secrets()
    facts = {
        "changed": bool(removed or images),
        "removed": removed,
        "images_removed": images,
        "kept": store.ids(),
        "secrets": secrets,
    }
    _print(facts, f"removed {len(removed)} releases and {len(images)} images", as_json)


@release_app.command()
def smoke(root: Root = releases.ROOT, secrets: Secrets = SECRETS, as_json: Json = False) -> None:
    """Ask the current release its smoke test. Exits 3 when a check fails."""
    store = Store(root)
    current = store.pointed(CURRENT)
    if current is None:
        raise MissingError(f"{root}: no release is current", "deploy first")
    checks = asyncio.run(Host(store, secrets).smoke(store.read(current)))
    ok = all(check.ok for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "id": current, "checks": [check.to_json() for check in checks]}))
    else:
        for check in checks:
            typer.echo(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.seen} ({check.seconds:.1f} s)")
    if not ok:
        raise typer.Exit(int(ExitCode.CHECK_FAILED))


def _draft(folder: Path) -> tuple[Draft, str]:
    """A draft and its config, which fit together. Raises ConfigError or MissingError."""
    for name in (RELEASE_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise MissingError(f"{folder / name}: no such file", "a release is a folder with both files")
    said, config = folder / RELEASE_FILE, folder / CONFIG_FILE
    draft, text = parse(read(said), str(said), Draft), read(config)
    usable(draft.container, text, str(config))
    return draft, text


def _activate(store: Store, release_id: str, secrets: Path, unit: str, force: bool) -> Report:
    def say(line: str) -> None:
        typer.echo(line, err=True)

    tools = Host(store, secrets).tools(Systemctl(unit), say)
    return asyncio.run(activate(store, release_id, tools, force))


def _finish(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json()))
        if not report.ok:
            raise typer.Exit(int(ExitCode.CHECK_FAILED))
        return
    down = "" if report.downtime_s is None else f"; downtime {report.downtime_s:.1f} s"
    if report.ok:
        how = "serves" if report.changed else "serves already"
        typer.echo(f"{report.id} {how}{down}")
        return
    after = f"{report.rolled_back_to} serves again{down}" if report.rolled_back else "nothing serves now"
    raise CheckFailed(f"{report.id}: {report.reason}; {after}", "fix the cause and deploy again")


def _row(kept: Kept, current: str | None, previous: str | None) -> dict[str, Any]:
    state = {current: CURRENT, previous: PREVIOUS}.get(kept.id, "kept")
    release, outcome = kept.release, kept.outcome
    return {
        "id": kept.id,
        "state": state,
        "proven": kept.proven,
        "problem": kept.problem or (outcome.reason if outcome else ""),
        "made_at": release.made_at if release else None,
        "made_by": release.made_by if release else None,
        "hearth_version": release.hearth_version if release else None,
        "image": release.image.model_dump() if release else None,
        "config_sha256": release.config.sha256 if release else None,
        "downtime_s": outcome.downtime_s if outcome else None,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    if not rows:
        typer.echo("no releases yet")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("release", "state", "by", "image", "proven", "note"):
        table.add_column(title, overflow="fold")
    for row in rows:
        image = f"{row['image']['ref']} {row['image']['digest'][7:19]}" if row["image"] else "?"
        proven = "yes" if row["proven"] else "no"
        table.add_row(row["id"], row["state"], row["made_by"] or "?", image, proven, row["problem"])
    Console(highlight=False, soft_wrap=True).print(table)


def _print(facts: dict[str, Any], sentence: str, as_json: bool) -> None:
    typer.echo(json.dumps(facts) if as_json else sentence)
