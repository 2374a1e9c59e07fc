"""`hearth failures`: the failure bundles of a host, as a list or one in full."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hearth.bundlestore import FOLDER, Bundle, bundle_names, read_bundle, read_text
from hearth.deploy import here
from hearth.errors import MissingError

_STATE = Path("/var/lib/hearth")
_JSON_FILES = ("phases", "plan", "versions", "gpu")
_TEXT_FILES = {"config": "config.yaml", "kernel": "kernel.txt", "stacks": "stacks.txt", "log": "log.txt"}
_LOG_LINES = 60
_ABSENT = "(not there, or not readable)"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def failures(
    which: Annotated[
        str | None, typer.Argument(metavar="[N]", help="One in full: 1 is the newest; or a bundle's name.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Take the folder from this config.", envvar="HEARTH_CONFIG"),
    ] = None,
    release: Annotated[
        Path | None, typer.Option(help="A release's folder. Default: the one that runs on this host.")
    ] = None,
    path: Annotated[Path | None, typer.Option("--path", help="Folder with the bundles.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole documents.")] = False,
) -> None:
    """List what went wrong and what was done about it, newest first; or show one failure in full."""
    folder = _folder(config, release, path)
    names = bundle_names(folder)[::-1]
    if which is not None:
        _show_one(read_bundle(folder / _chosen(which, names, folder)), as_json)
        return
    bundles = [read_bundle(folder / name) for name in names]
    if as_json:
        listed = [_listed(number, bundle) for number, bundle in enumerate(bundles, 1)]
        typer.echo(json.dumps({"path": str(folder), "failures": listed}, ensure_ascii=False))
    else:
        _print(_list(folder, bundles))


def _folder(config: Path | None, release: Path | None, path: Path | None) -> Path:
    if path is not None:
        if not path.is_dir():
            raise MissingError(f"{path}: no such folder", "give the folder that holds the bundles")
        return path
    found = here.find(config, release)
    return found.path(found.config.paths.state / FOLDER) if found is not None else _STATE / FOLDER


def _chosen(which: str, names: list[str], folder: Path) -> str:
    """The name that a number (1: the newest) or a name stands for."""
    if which in names:
        return which
    if not which.isdecimal():
        raise MissingError(f"{folder}: no failure named {which!r}", "hearth failures lists them")
    if not 1 <= int(which) <= len(names):
        there = f"1 to {len(names)}" if names else "none"
        raise MissingError(f"{folder}: no failure {which}", f"there are: {there}")
    return names[int(which) - 1]


def _listed(number: int, bundle: Bundle) -> dict[str, Any]:
    facts: dict[str, Any] = {"number": number, "name": bundle.name, "path": str(bundle.path)}
    return {**facts, "readable": not bundle.problem, "problem": bundle.problem or None, **bundle.document}


def _list(folder: Path, bundles: list[Bundle]) -> Iterable[str]:
    if not bundles:
        yield f"No failure is kept in {folder}."
    for number, bundle in enumerate(bundles, 1):
        if bundle.problem:
            yield f"{number:>3}  {bundle.name}  unreadable: {bundle.problem}"
        else:
            document = bundle.document
            yield f"{number:>3}  {_time(document)}  {document['kind']} in {document['phase']}"
            yield f"     {_cause(document)}"
            yield f"     done: {document['done']}"


def _time(document: Any) -> str:
    return f"{str(document.get('time', ''))[:19].replace('T', ' ')} UTC"


def _cause(document: Any) -> str:
    evidence = document["evidence"]
    return str(evidence[0])[:200] if evidence else str(document["sentence"])


def _show_one(bundle: Bundle, as_json: bool) -> None:
    parts = _parts(bundle)
    if as_json:
        facts = {"name": bundle.name, "path": str(bundle.path), "problem": bundle.problem or None}
        typer.echo(json.dumps({**facts, "failure": bundle.document or None, **parts}, ensure_ascii=False))
    else:
        _print(_full(bundle, parts))


def _parts(bundle: Bundle) -> dict[str, Any]:
    """The bundle's other files by name; None for one that isn't there or can't be read."""
    documents = {name: _document(bundle.path / f"{name}.json") for name in _JSON_FILES}
    return {**documents, **{name: _text(bundle.path / file) for name, file in _TEXT_FILES.items()}}


def _document(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def _text(path: Path) -> str | None:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return None


def _full(bundle: Bundle, parts: dict[str, Any]) -> Iterable[str]:
    yield from _facts(bundle)
    for name in _JSON_FILES:
        yield from ("", f"-- {name}.json", _readable(parts[name]))
    for name, file in _TEXT_FILES.items():
        if parts[name] is None and name == "stacks":
            continue
        yield from ("", f"-- {file}")
        yield from _end_of(parts[name], bundle.path / file)


def _facts(bundle: Bundle) -> Iterable[str]:
    yield f"{'bundle':<9} {bundle.path}"
    if bundle.problem:
        yield f"{'problem':<9} unreadable: {bundle.problem}"
        return
    document = bundle.document
    yield f"{'time':<9} {_time(document)}"
    for name in ("kind", "phase", "axis"):
        yield f"{name:<9} {document[name]}"
    for number, line in enumerate(document["evidence"]):
        yield f"{'' if number else 'evidence':<9} {line}"
    for name in ("hint", "source", "done"):
        yield f"{name:<9} {document[name]}"
    if document.get("exit_code") is not None:
        yield f"{'exit':<9} {document['exit_code']}: {document.get('exit_meaning')}"


def _readable(document: Any) -> str:
    if document is None:
        return _ABSENT
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000).rstrip()


def _end_of(text: str | None, path: Path) -> Iterable[str]:
    if text is None:
        yield _ABSENT
        return
    lines = text.splitlines()
    long = path.name in ("log.txt", "kernel.txt") and len(lines) > _LOG_LINES
    if long:
        yield f"(the last {_LOG_LINES} of {len(lines)} lines; all: {path})"
    yield from lines[-_LOG_LINES:] if long else lines


def _print(lines: Iterable[str]) -> None:
    """Log lines may hold anything: no control character reaches the terminal."""
    for line in lines:
        for part in line.split("\n"):
            typer.echo(_CONTROL.sub("?", part))
