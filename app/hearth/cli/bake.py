"""`hearth bake`: compile the FP4 kernels ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hearth.errors import ConfigError, MissingError
from hearth.kernels import bake as baking
from hearth.kernels import cuda_home
from hearth.kernels.elf import Arch
from hearth.kernels.needs import load_list
from hearth.kernels.ninja import Progress as Step

_QUIET_SECONDS = 30


def cache_root() -> Path:
    """Where Hearth keeps what can be made again: HEARTH_CACHE, else XDG_CACHE_HOME/hearth."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("HEARTH_CACHE") or Path(base) / "hearth")


def bake(
    out: Annotated[
        Path, typer.Option(help="Libraries go to OUT/NAME/NAME.so, the manifest to OUT/kernels.json.")
    ],
    modules: Annotated[str, typer.Option(help="Module names, comma-separated.")] = "",
    kernel_list: Annotated[Path | None, typer.Option("--list", help="An images/kernels-*.yaml.")] = None,
    archs: Annotated[str, typer.Option(help="GPUs, comma-separated; 12.0f, or the list's own.")] = "",
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile jobs at most (default: cores).")] = None,
    install: Annotated[bool, typer.Option(help="Copy into the installed FlashInfer too.")] = False,
    python: Annotated[Path, typer.Option(help="The interpreter that has FlashInfer.")] = Path(sys.executable),
    cuda: Annotated[
        Path | None, typer.Option("--cuda-home", help="A CUDA toolkit, or a folder of PyPI's packages.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Where objects are kept to go on later.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compile FlashInfer modules for given GPUs, with no GPU in the machine."""
    listed = load_list(kernel_list) if kernel_list else None
    names = [name.strip() for name in modules.split(",") if name.strip()]
    if listed is not None:
        version = _flashinfer_version(python)
        names += [item.name for item in listed.modules if item.applies(version)]
    if not names:
        raise ConfigError("nothing to bake", "say --modules or --list")
    targets = _archs(archs or ",".join(listed.archs if listed else ("12.0f",)))
    where = state or cache_root() / "bake" / "state"
    toolkit = cuda_home.resolve(cuda, _site_packages(python), where / "cuda-home")
    request = baking.Request(tuple(dict.fromkeys(names)), targets, out, where, python, toolkit, jobs, install)
    with _reporter(sys.stderr.isatty()) as report:
        result = baking.bake(request, report)
    _print(result, as_json)


def _archs(text: str) -> tuple[Arch, ...]:
    try:
        return tuple(dict.fromkeys(Arch.parse(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise ConfigError(f"--archs: {error}") from error


def _site_packages(python: Path) -> list[Path]:
    """Import folders of `python` and of this interpreter, in that order."""
    theirs: list[str] = json.loads(_run(python, "import sys, json; print(json.dumps(sys.path))"))
    return [Path(entry) for entry in (*theirs, *sys.path) if entry]


def _flashinfer_version(python: Path) -> str:
    script = "import importlib.metadata as m; print(m.version('flashinfer-python'))"
    return _run(python, script).strip()


def _run(python: Path, script: str) -> str:
    try:
        return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise MissingError(f"{python}: {error.strerror or error}", "say --python") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it failed"])[-1]
        raise MissingError(
            f"{python}: {last}", "say --python of the interpreter that has FlashInfer"
        ) from error


def line_of(step: Step) -> str:
    """One line of progress: module, sources done, seconds, and what is left."""
    if step.end:
        return f"{step.module}: done in {step.elapsed:.0f} s"
    count = "starting" if step.total is None else f"{step.done}/{step.total}"
    left = "" if step.eta is None else f", about {step.eta:.0f} s left"
    return f"{step.module}: {count}, {step.elapsed:.0f} s{left}"


@contextmanager
def _reporter(live: bool) -> Iterator[Callable[[Step], None]]:
    if not live:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bars(progress)


class _Lines:
    """A line whenever a source is done, and every half minute in between: for logs."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}

    def __call__(self, step: Step) -> None:
        done, said = self._last.get(step.module, (-1, 0.0))
        now = time.monotonic()
        if step.end or step.done != done or now - said >= _QUIET_SECONDS:
            self._last[step.module] = (step.done, now)
            typer.echo(line_of(step), err=True)


class _Bars:
    """One bar a module: for a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, step: Step) -> None:
        task = self._tasks.get(step.module)
        if task is None:
            task = self._tasks[step.module] = self._progress.add_task(step.module, total=None, note="")
        note = line_of(step).partition(": ")[2]
        total = max(step.total or 1, 1)
        done = total if step.end else step.done
        self._progress.update(task, completed=done, total=step.total and total, note=note)


def _print(result: baking.Result, as_json: bool) -> None:
    if as_json:
        body = {
            "changed": list(result.changed),
            "installed": str(result.installed) if result.installed else None,
            "libraries": [library.model_dump() for library in result.libraries],
            "seconds": round(result.seconds, 1),
        }
        typer.echo(json.dumps(body))
        return
    for library in result.libraries:
        state = "new" if library.name in result.changed else "unchanged"
        typer.echo(
            f"{library.name}: {', '.join(library.archs) or 'no GPU code'}, {library.size} bytes, {state}"
        )
    place = f", installed in {result.installed}" if result.installed else ""
    typer.echo(f"{len(result.libraries)} libraries in {result.seconds:.1f} s{place}")
