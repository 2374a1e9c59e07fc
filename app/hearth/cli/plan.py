"""`hearth plan`: how an SGLang version spells a graph plan."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import Annotated

import typer

from hearth.engine.command import engine_env
from hearth.engine.dialect import Dialect, dialect_for
from hearth.errors import ConfigError, MissingError
from hearth.ladder import GraphPlan

_CACHE = "/var/cache/hearth"
_HELP_SECONDS = 300
_VERSION_CODE = "import importlib.metadata as m; print(m.version('sglang'))"
_Run = subprocess.CompletedProcess[str]


def plan(
    engine_version: Annotated[
        str | None,
        typer.Option("--engine-version", "-v", help="SGLang release, e.g. 0.5.23 or 0.5.12.post1."),
    ] = None,
    graphs: Annotated[
        str,
        typer.Option("--graphs", "-g", help="piecewise, standard, eager, or PREFILL,DECODE[,MAXBS]."),
    ] = "piecewise",
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch", "-a", help="Architecture in the model's config.json: GlmMoeDsaForCausalLM for GLM-5."
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Read what the installed engine takes from its own --help (half a minute)."
        ),
    ] = False,
    engine_python: Annotated[
        str, typer.Option("--engine-python", help="With --probe: the interpreter that has sglang.")
    ] = "python3",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print engine_version, plan, argv and env as JSON.")
    ] = False,
) -> None:
    """Print how an SGLang version is told a graph plan, and the ways down from it.

    Starts nothing. Shown are the words that Hearth puts before your engine.args: the start command and the
    graph flags, without model, host and port. With --json also the environment that Hearth sets.

    Best plan of a release:  hearth plan -v 0.5.23

    For GLM-5, which some releases treat apart:  hearth plan -v 0.5.11 -a GlmMoeDsaForCausalLM

    No prefill graphs, decode graphs up to batch 32:  hearth plan -v 0.5.23 -g disabled,full,32

    What an installed engine takes:  hearth plan --probe --engine-python /opt/sglang/bin/python
    """
    dialect = _dialect(engine_version, arch, engine_python if probe else None)
    wanted = dialect.resolve(graphs)
    print_plan = _print_json if as_json else _print_text
    print_plan(dialect, wanted)


def _dialect(version: str | None, arch: str | None, probe_python: str | None) -> Dialect:
    if probe_python is not None:
        return Dialect.from_help(version or _installed_version(probe_python), _help(probe_python), arch)
    if version is None:
        raise ConfigError("--engine-version: missing", "give an SGLang release, or --probe the installed one")
    return dialect_for(version, arch)


def _installed_version(python: str) -> str:
    done = _run([python, "-c", _VERSION_CODE])
    if done.returncode:
        raise MissingError(f"{python}: has no sglang", "name its interpreter with --engine-python")
    return done.stdout.strip()


def _help(python: str) -> str:
    """The engine's own --help. Raises MissingError with the engine's last words where it prints none."""
    done = _run([python, "-m", "sglang.launch_server", "--help"])
    if done.returncode or "--model-path" not in done.stdout:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise MissingError(
            f"{python} -m sglang.launch_server --help: {last}",
            "name the engine's interpreter with --engine-python",
        )
    return done.stdout


def _run(command: list[str]) -> _Run:
    # argparse folds its help to the terminal's width; a wide one keeps each flag beside its choices.
    environment = {**os.environ, "COLUMNS": "400"}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=_HELP_SECONDS,
            check=False,
        )
    except OSError as error:
        raise MissingError(
            f"{command[0]}: {error.strerror}", "name the engine's interpreter with --engine-python"
        ) from error
    except subprocess.TimeoutExpired:
        raise MissingError(f"{shlex.join(command)}: no answer in {_HELP_SECONDS} s") from None


def _print_json(dialect: Dialect, wanted: GraphPlan) -> None:
    facts = {
        "engine_version": dialect.version,
        "plan": wanted.to_json(),
        "argv": [*dialect.serve_command, *dialect.argv(wanted)],
        "env": engine_env(dialect, {}, cache=_CACHE, base={}),
    }
    typer.echo(json.dumps(facts, indent=2))


def _print_text(dialect: Dialect, wanted: GraphPlan) -> None:
    ladder = dialect.ladder(wanted)
    typer.echo(f"SGLang {dialect.version}, {wanted.name}: prefill {wanted.prefill}, decode {wanted.decode}")
    typer.echo(f"Ways down: prefill {' > '.join(ladder.prefill)}; decode {' > '.join(ladder.decode)}")
    lines = [shlex.join(dialect.serve_command), *_lines(dialect.argv(wanted))]
    typer.echo(" \\\n    ".join(lines))


def _lines(words: tuple[str, ...]) -> list[str]:
    """One flag with its value on each line."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]
