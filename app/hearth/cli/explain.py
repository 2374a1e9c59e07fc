"""`hearth explain`: what an engine's log says went wrong."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hearth.engine.asked import asked_architecture, asked_arguments, asked_graphs, asked_version
from hearth.engine.classify import classify
from hearth.engine.dialect import dialect_for
from hearth.engine.redact import Redactor
from hearth.errors import ConfigError, HearthError, MissingError
from hearth.failure import Failure, FailureKind
from hearth.ladder import GraphPlan
from hearth.policy import Decision, Rules, decide

_MOST = 128 * 1024 * 1024
_GZIP = b"\x1f\x8b"


def explain(
    log: Annotated[str, typer.Argument(help="Log file (plain, gzip, docker json-file, journalctl), or - .")],
    exit_status: Annotated[
        int | None, typer.Option("--exit-status", help="The engine's exit status; -9 or 137 for SIGKILL.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option("--engine-version", help="SGLang version; default: what the log tells.")
    ] = None,
    graphs: Annotated[
        str | None,
        typer.Option(
            "--graphs",
            help="Asked plan: piecewise, standard, eager or PREFILL,DECODE[,MAXBS]; default: the log's.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document other tools read.")] = False,
) -> None:
    """Read an engine's log and name what went wrong: kind, phase, evidence, what to do, and the next plan."""
    lines = read_log(log)
    failure = _redacted(classify(lines, exit_status))
    plan, decision = _next(failure, lines, engine_version, graphs)
    if as_json:
        next_plan = decision.plan.to_json() if decision is not None and decision.plan is not None else None
        document: dict[str, Any] = {"failure": failure.to_json() if failure else None, "next_plan": next_plan}
        typer.echo(json.dumps(document, ensure_ascii=False))
    else:
        typer.echo("\n".join(_text(failure, plan, decision)))


def read_log(name: str) -> list[str]:
    """The log's lines; of a very large one the last 128 MiB.

    Raises MissingError or ConfigError with one line that says what is wrong with the file.
    """
    data = _bytes(name)
    if not data.strip(b"\0 \r\n\t"):
        raise ConfigError(
            f"{name}: the log is empty", "give the engine's own output, e.g. docker logs NAME 2>&1"
        )
    sample = data[:65536]
    if sample.count(0) * 10 > len(sample) or data.startswith((b"\x7fELF", b"PK\x03\x04")):
        raise ConfigError(f"{name}: not a text log", "give the engine's own output (text, or gzip of it)")
    return data.decode("utf-8", errors="replace").split("\n")


def _redacted(failure: Failure | None) -> Failure | None:
    """Without the secrets that a log line may hold (SGLang prints its API key)."""
    if failure is None:
        return None
    redact = Redactor(())
    return replace(failure, evidence=tuple(redact(line) for line in failure.evidence))


def _bytes(name: str) -> bytes:
    try:
        data = sys.stdin.buffer.read() if name == "-" else _tail_of(Path(name))
        return gzip.decompress(data)[-_MOST:] if data.startswith(_GZIP) else data[-_MOST:]
    except FileNotFoundError:
        raise MissingError(
            f"{name}: no such file", "name the engine's log, or - for standard input"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{name}: is a directory", "name one log file in it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{name}: damaged gzip file: {error}", "unpack what is readable with zcat"
        ) from error
    except OSError as error:
        raise ConfigError(f"{name}: can't be read: {error.strerror or error}") from error


def _tail_of(path: Path) -> bytes:
    with path.open("rb") as file:
        compressed = file.read(2) == _GZIP
        size = file.seek(0, 2)
        file.seek(0 if compressed else max(0, size - _MOST))
        return file.read()


def _next(
    failure: Failure | None, lines: list[str], version: str | None, graphs: str | None
) -> tuple[GraphPlan | None, Decision | None]:
    """The asked plan, and what Hearth would do next; None where the log tells too little."""
    arguments = asked_arguments(lines)
    given = version is not None or graphs is not None
    version = version or asked_version(lines, arguments)
    known = (graphs, None) if graphs else asked_graphs(arguments)
    if version is None or known is None:
        return None, None
    try:
        dialect = dialect_for(version, asked_architecture(lines))
        plan = dialect.resolve(*known)
        ladder = dialect.ladder(plan)
    except HearthError:
        if given:
            raise
        return None, None
    if failure is None:
        return plan, None
    return plan, decide(failure, plan, ladder, [], Rules(), 0.0)


def _text(failure: Failure | None, plan: GraphPlan | None, decision: Decision | None) -> list[str]:
    if failure is None:
        return ["healthy: the engine came up (or stopped as asked) and nothing fatal is in this log"]
    shown = "look at" if failure.kind is FailureKind.UNKNOWN else "evidence"
    rows = [("kind", failure.kind.value), ("phase", failure.phase.value), ("axis", failure.axis.value)]
    rows += [(shown if i == 0 else "", line) for i, line in enumerate(failure.evidence)]
    rows += [("hint", failure.hint), ("source", failure.source)]
    if plan is not None and decision is not None:
        rows.append(("plan", f"{plan} -> {decision.plan or 'stop'}"))
        rows.append(("next", decision.sentence))
    else:
        rows.append(("next", "not known: give --engine-version and --graphs"))
    return [f"{name:<9} {text}" for name, text in rows]
