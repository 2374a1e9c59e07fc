"""`hearth fetch`: weights, once and for all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as Speed

from hearth import weights
from hearth.config import load
from hearth.errors import ConfigError, MissingError
from hearth.fetch import complete, damaged, token_from
from hearth.fetch import fetch as bring
from hearth.fetch_types import EXCLUDE, Busy, Request
from hearth.weights import Manifest


class _Bar:
    """Progress on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, name: str, total: int) -> None:
        self._task = self._progress.add_task(name, total=total)

    def advance(self, size: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, size)


class _Lines:
    """Progress as a line for each tenth, where there is no terminal (a journal, Ansible)."""

    def __init__(self) -> None:
        self._name, self._total, self._done, self._said = "", 0, 0, -1

    def stage(self, name: str, total: int) -> None:
        self._name, self._total, self._done, self._said = name, total, 0, -1
        self.advance(0)

    def advance(self, size: int) -> None:
        self._done += size
        tenth = 10 * self._done // self._total if self._total else 10
        if tenth > self._said:
            self._said = tenth
            typer.echo(f"{self._name}: {10 * tenth}% of {self._total / 1e9:.1f} GB", err=True)


@contextmanager
def _watcher() -> Iterator[_Bar | _Lines]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bar(progress)


def fetch(
    repo: Annotated[
        str | None, typer.Argument(help="Repository on the hub, e.g. nvidia/GLM-5-NVFP4.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Folder. Default: the config's model.path.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit. Default: the config's model.revision, or main.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Take folder and revision from this config.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the hub's token alone. Default: $HF_TOKEN.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only files like this, e.g. '*.json'. Repeat it.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Leave out files like this, besides other formats. Repeat it.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Files at a time.", min=1, max=32)] = 4,
    verify: Annotated[
        Path | None, typer.Option("--verify", help="Only check this folder against its manifest, offline.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is there as JSON.")] = False,
) -> None:
    """Fetch weights from a Hugging Face hub into a folder, check every hash, and write hearth-weights.json.

    Run it again after a break: it goes on where it was. With the manifest there, and nothing missing, it does
    nothing and asks nobody. HF_ENDPOINT names another hub.
    """
    if verify is not None:
        _verify(verify, as_json)
        return
    request = _request(repo, to, revision, config, token_file, include, exclude, workers)
    manifest = complete(request)
    fresh = manifest is None
    if manifest is None:
        manifest = _fetch(request)
    _tell(manifest, request.folder, "fetched" if fresh else "already there", as_json)


def _request(
    repo: str | None,
    to: Path | None,
    revision: str | None,
    config: Path | None,
    token_file: Path | None,
    include: list[str] | None,
    exclude: list[str] | None,
    workers: int,
) -> Request:
    settings = load(config) if config is not None else None
    folder = to or (settings.model.path if settings is not None else None)
    if repo is None:
        raise ConfigError(
            "hearth fetch: no repository", "name one, e.g. hearth fetch nvidia/GLM-5-NVFP4 --to DIR"
        )
    if folder is None:
        raise ConfigError("hearth fetch: no folder", "give --to DIR, or --config FILE")
    asked = revision or (settings.model.revision if settings is not None else "") or "main"
    left_out = (*EXCLUDE, *(exclude or ()))
    token = token_from(token_file)
    endpoint = os.environ.get("HF_ENDPOINT") or None
    return Request(repo, folder, asked, token, endpoint, tuple(include or ()), left_out, workers)


def _fetch(request: Request) -> Manifest:
    try:
        with _watcher() as watcher:
            return bring(request, watcher)
    except KeyboardInterrupt:
        raise Busy(f"{request.folder}: interrupted", "run the same command to go on where it was") from None


def _verify(folder: Path, as_json: bool) -> None:
    if not folder.is_dir():
        raise MissingError(f"{folder}: no such folder", "name the folder of the weights")
    manifest = weights.load(folder)
    with _watcher() as watcher:
        watcher.stage("verify", manifest.size)
        wrong = weights.verify(folder, manifest.files, watcher.advance)
    if as_json:
        typer.echo(json.dumps({"ok": not wrong, "wrong": wrong, **_facts(manifest)}))
    if wrong:
        raise damaged(folder, wrong, "`hearth fetch` gets these again and keeps the rest")
    if not as_json:
        typer.echo(
            f"{folder}: all {len(manifest.files)} files are what {manifest.repo} has at {manifest.commit}"
        )


def _facts(manifest: Manifest) -> dict[str, object]:
    return {
        "repo": manifest.repo,
        "revision": manifest.revision,
        "commit": manifest.commit,
        "fetched_at": manifest.fetched_at,
        "files": len(manifest.files),
        "bytes": manifest.size,
    }


def _tell(manifest: Manifest, folder: Path, how: str, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps({"ok": True, "changed": how == "fetched", "folder": str(folder), **_facts(manifest)})
        )
        return
    size = f"{manifest.size / 1e9:.1f} GB in {len(manifest.files)} files"
    typer.echo(f"{folder}: {how}: {manifest.repo} at {manifest.commit}, {size}, every hash checked.")
    typer.echo(
        f"Write `revision: {manifest.commit}` under model in the config: it is part of the fingerprint."
    )
