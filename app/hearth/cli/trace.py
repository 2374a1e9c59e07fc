"""`hearth trace`: which FP4 functions can torch.compile trace, and what stops the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from hearth.errors import CheckFailed
from hearth.kernels.trace import Report, Row, check


def trace(
    everything: Annotated[
        bool, typer.Option("--all", help="Every layout, other FP4 functions, and the known attempts as well.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document other tools read.")] = False,
) -> None:
    """Trace this environment's FP4 ops with fullgraph=True, without a GPU; fail if the engine's can't be."""
    report = check(everything)
    typer.echo(json.dumps(report.to_json()) if as_json else "\n".join(text(report)))
    stuck = [row for row in report.ops if row.required and not row.traceable]
    if stuck:
        names = ", ".join(row.op for row in stuck)
        raise CheckFailed(
            f"torch.compile(fullgraph=True) stops in {names}: {stuck[0].reason}", _hint(stuck[0])
        )


def _hint(row: Row) -> str:
    if row.op.startswith("flashinfer."):
        return "install Hearth's plugin in the engine's environment, or use SGLang 0.5.12 or newer"
    return "run `hearth trace --all`, and serve without piecewise graphs until it passes"


def text(report: Report) -> Iterator[str]:
    """The report for a person, line by line."""
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in report.versions.items())
    yield f"{versions}; traced for a pretended SM120, no GPU used"
    yield "traceable  the engine needs it  op"
    for row in report.ops:
        yield f"{_yes(row.traceable):11}{_yes(row.required):21}{row.op}"
        yield from _why(row)
    if report.attempts:
        yield "ways to get flashinfer.fp4_quantize traced:"
    for row in report.attempts:
        yield f"{_yes(row.traceable):11}{row.op}"
        yield from _why(row)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _why(row: Row) -> Iterator[str]:
    if not row.traceable:
        yield from _place("stops at", row)
        for behind in row.obstacles[1:]:
            yield from _place("behind it", behind)


def _place(title: str, row: Row) -> Iterator[str]:
    where = f"{row.frame}: {row.call}" if row.frame else "the call itself"
    inside = f" [{row.inside}]" if row.inside else ""
    yield f"    {title}: {where}"
    yield f"        {row.reason}{inside}"
