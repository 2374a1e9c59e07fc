"""`hearth image`: build an image from its bill of materials, check it, lock its requirements."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hearth.errors import CheckFailed, ConfigError, ExitCode, Unreachable
from hearth.image import build as building
from hearth.image import check as checking
from hearth.image import lock as locking
from hearth.image import look as looking
from hearth.image.leaks import default_needles
from hearth.image.sbom import digest
from hearth.image.spec import Spec, find, load, load_whole, modules_of
from hearth.image.steps import Step

image_app = typer.Typer(help="The container image: build, check, lock.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="An image: images/NAME.yaml.", metavar="NAME")]
Root = Annotated[Path, typer.Option(help="The project's folder.")]
Tag = Annotated[str, typer.Option(help="Default: hearth/NAME:latest.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_STATES = {"ok": "[green]ok[/green]", "fail": "[bold red]FAIL[/bold red]", "skip": "[yellow]skip[/yellow]"}


@image_app.command("list")
def list_(root: Root = Path()) -> None:
    """Print the images there are."""
    for path in sorted((root / "images").glob("*.yaml")):
        if not path.stem.startswith("kernels-"):
            spec = load(path)
            typer.echo(f"{spec.name}: {spec.title}")


@image_app.command()
def lock(
    names: Annotated[list[str], typer.Argument(help="Images: images/NAME.yaml.", metavar="NAME...")],
    root: Root = Path(),
    upgrade: Annotated[bool, typer.Option(help="Take newer releases; otherwise pins are kept.")] = False,
) -> None:
    """Pin an image's requirements again, with hashes (needs the package index)."""
    for name in names:
        done = locking.lock(find(name, root / "images"), root, upgrade)
        typer.echo(f"{done.path}: {done.packages} packages, {done.size.total / 1e9:.2f} GB to download")
        _pin_base(find(name, root / "images"))


def _pin_base(path: Path) -> None:
    """Pin the base image too, where a Docker Engine and an image registry are at hand; say so where not."""
    base = load(path).base
    try:
        digest_now = building.registry_digest(building.connect(), base.image)
    except Unreachable as error:
        typer.echo(f"{path}: base stays {base.reference}: {error}", err=True)
        return
    path.write_text(locking.pin_base(path.read_text(encoding="utf-8"), digest_now), encoding="utf-8")
    typer.echo(f"{path}: base {base.image}@{digest_now}")


@image_app.command()
def args(name: Name, root: Root = Path(), base: str = "", build_base: str = "") -> None:
    """Print the Dockerfile's arguments, for a build by hand."""
    path = find(name, root / "images")
    spec, _ = load_whole(path)
    request = building.Request(path, root, "", root, base or None, build_base or None)
    for key, value in building.build_args(spec, path.parent, request).items():
        typer.echo(f"--build-arg {shlex.quote(f'{key}={value}')}")


@image_app.command()
def build(
    name: Name,
    root: Root = Path(),
    tag: Tag = "",
    base: Annotated[str, typer.Option(help="Base image, in place of the bill of materials'.")] = "",
    build_base: Annotated[str, typer.Option(help="Base of the build stages alone; none of it is kept.")] = "",
    builder: Annotated[str, typer.Option(help="classic or buildkit.")] = "classic",
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile jobs at most.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder for the log and the SBOM.")] = Path(".run/image"),
    checks: Annotated[bool, typer.Option("--check/--no-check", help="Check the result.")] = True,
) -> None:
    """Build an image, write its SBOM, label it, check it.

    Until it passed its checks it is called TAG-unchecked, and stays so when one failed.
    """
    if builder not in ("classic", "buildkit"):
        raise ConfigError(f"--builder: {builder!r}", "say classic or buildkit")
    path, tag = find(name, root / "images"), tag or f"hearth/{name}:latest"
    new = building.unchecked(tag)
    client = building.connect()
    kind: building.Builder = "classic" if builder == "classic" else "buildkit"
    request = building.Request(path, root, new, logs, base or None, build_base or None, kind, jobs)
    built = building.build(client, request, _Steps())
    spec = load(path)
    listing = looking.sbom_of(spec, looking.probe(client, new, ["packages"]))
    saved = logs / f"{name}.cdx.json"
    saved.write_text(listing, encoding="utf-8")
    final = building.seal(client, new, {f"{building.OWN}.sbom": digest(listing)}) if listing else built.id
    typer.echo(
        f"{tag}: {built.size / 1e9:.2f} GB in {len(built.layers)} layers, {built.seconds:.0f} s, "
        f"{built.cached} of {built.steps} steps from the cache"
    )
    typer.echo(f"id {final}\nSBOM {saved}\nlog {built.log}")
    if checks:
        _check(client, path, root, new, as_json=False)
    building.accept(client, tag)


@image_app.command()
def check(name: Name, root: Root = Path(), tag: Tag = "", as_json: JsonOption = False) -> None:
    """Check an image that was built: start it sealed and look at what it says."""
    path = find(name, root / "images")
    _check(building.connect(), path, root, tag or f"hearth/{name}:latest", as_json)


def _check(client: object, path: Path, root: Path, tag: str, as_json: bool) -> None:
    spec, locks = load_whole(path)
    seen, _ = looking.look(client, tag, spec, default_needles(root), _say)
    found = checking.lines(spec, locks, modules_of(spec, path.parent), seen)
    if as_json:
        body = {"ok": checking.good(found), "checks": [line.to_json() for line in found]}
        typer.echo(json.dumps(body))
    else:
        _table(spec, tag, found)
    if not checking.good(found):
        failed = ", ".join(line.id for line in found if line.status == "fail")
        if as_json:
            raise typer.Exit(ExitCode.CHECK_FAILED)
        raise CheckFailed(f"{tag}: failed: {failed}")


def _table(spec: Spec, tag: str, found: list[checking.Line]) -> None:
    table = Table(title=f"{tag} ({spec.title})", title_justify="left")
    for column in ("check", "", "seen", "fix"):
        table.add_column(column, overflow="fold")
    for line in found:
        table.add_row(line.id, _STATES[line.status], line.seen, line.fix)
    Console(width=None if sys.stdout.isatty() else 160).print(table, markup=True)


def _say(what: str) -> None:
    typer.echo(f"looking at {what}", err=True)


class _Steps:
    """A line a step: when it begins, and how long it took where that was noticeable."""

    def __call__(self, step: Step) -> None:
        place = f"{step.stage} {step.number}/{step.total}"
        if step.seconds is None:
            typer.echo(f"{place}: {step.text[:110]}", err=True)
        elif step.cached:
            typer.echo(f"{place}: from the cache", err=True)
        elif step.seconds >= 1:
            typer.echo(f"{place}: done in {step.seconds:.0f} s", err=True)
