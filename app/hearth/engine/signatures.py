"""The table of log texts that say what went wrong (`signatures.yaml`), ready to be matched. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from hearth.errors import ConfigError
from hearth.failure import Axis, FailureKind, Phase

_DATA = Path(__file__).with_name("signatures.yaml")
_HALF = 3000
_KEYS = {
    "id",
    "kind",
    "tier",
    "text",
    "if",
    "re",
    "unless",
    "phases",
    "axis",
    "hint",
    "source",
    "live",
    "serving_kind",
    "sticky",
}


class Tier(IntEnum):
    """How much a text says about the cause; lower is better."""

    VERDICT = 0
    """Hardware or host has spoken: outranks whatever the engine said, before or after."""
    CAUSE = 1
    SYMPTOM = 2
    """Fatal, but something more precise may stand beside it."""
    WEAK = 3
    """Says that something died, or is usually the echo of another rank's death."""


@dataclass(frozen=True)
class Signature:
    """One row of the table.

    `globs` are lower-case pieces that have to occur in their order; `patterns` are run on a lower-cased line
    that holds one of `needed`, none of them where one of `unless` stands.
    `phases` limits the row to these phases; `live` are texts of the lines after which the engine must not be
    waited for; `serving_kind` replaces `kind` while the engine serves; `sticky` rows hold even when
    the engine later says that it is ready.
    """

    id: str
    kind: FailureKind
    tier: Tier
    globs: tuple[tuple[str, ...], ...]
    needed: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    unless: tuple[str, ...]
    phases: frozenset[Phase]
    axis: Axis | None
    hint: str
    source: str
    live: tuple[str, ...]
    serving_kind: FailureKind | None
    sticky: bool

    def matches(self, lowered: str) -> bool:
        """Whether the row's text stands in a lower-cased line."""
        if any(text in lowered for text in self.unless):
            return False
        for glob in self.globs:
            if glob[0] in lowered and _in_order(glob, lowered):
                return True
        if not any(text in lowered for text in self.needed):
            return False
        return any(pattern.search(lowered) for pattern in self.patterns)

    def applies(self, phase: Phase) -> bool:
        """Whether the row speaks of this phase."""
        return not self.phases or phase in self.phases


@dataclass(frozen=True)
class Table:
    """All rows in file order (the first that matches a line wins within its tier), and what means nothing.

    `heard` are lower-case texts that count even in a line of the noise.
    """

    signatures: tuple[Signature, ...]
    noise: tuple[tuple[str, ...], ...]
    heard: tuple[str, ...] = ()

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """Lower-case texts, one of which stands in every line that any row matches."""
        rows = self.signatures
        return tuple(
            dict.fromkeys([g[0] for r in rows for g in r.globs] + [t for r in rows for t in r.needed])
        )

    def candidates(self, lines: Sequence[str]) -> list[int]:
        """The places of the lines that a row may match: one search over the whole text for each literal."""
        text = "\n".join(line.lower() for line in lines)
        starts = [0, *(at.end() for at in re.finditer("\n", text))]
        found: set[int] = set()
        for literal in self.literals:
            at = text.find(literal)
            while at >= 0:
                place = bisect_right(starts, at) - 1
                found.add(place)
                end = starts[place + 1] if place + 1 < len(starts) else len(text)
                at = text.find(literal, end)
        return sorted(found)

    def match(self, line: str, phase: Phase) -> list[Signature]:
        """The rows that a line matches in a phase, best tier first."""
        lowered = shorten(line).lower()
        if self.is_noise(lowered):
            return []
        found = [s for s in self.signatures if s.applies(phase) and s.matches(lowered)]
        return sorted(found, key=lambda s: s.tier)

    def is_noise(self, lowered: str) -> bool:
        """Whether a lower-cased line is known to mean nothing, whatever words stand in it."""
        if any(text in lowered for text in self.heard):
            return False
        return any(glob[0] in lowered and _in_order(glob, lowered) for glob in self.noise)


@cache
def table() -> Table:
    """The table that is shipped. Raises ConfigError on a broken file."""
    return parse(_DATA.read_text(encoding="utf-8"))


def parse(text: str) -> Table:
    """Read a table. Raises ConfigError naming the row and the key."""
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    rows = tuple(_signature(row) for row in data["signatures"])
    names = [row.id for row in rows]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"signatures.yaml: {', '.join(sorted(twice))}: written twice")
    return Table(rows, tuple(_glob(text) for text in data["noise"]), tuple(data.get("heard", ())))


def live_signature(line: str) -> Signature | None:
    """The row for a line after which the engine can't be trusted to exit by itself, or None.

    Cheap enough to be called for every line: it looks for a handful of substrings first.
    """
    if len(line) > 2 * _HALF:
        line = shorten(line)
    for text, row in _live():
        if text in line and row.matches(lowered := line.lower()) and not table().is_noise(lowered):
            return row
    return None


def is_fatal_hint(line: str) -> bool:
    """Whether `live_signature` knows this line."""
    return live_signature(line) is not None


def shorten(line: str) -> str:
    """Both ends of a very long line."""
    return line if len(line) <= 2 * _HALF else line[:_HALF] + " " + line[-_HALF:]


@cache
def _live() -> tuple[tuple[str, Signature], ...]:
    return tuple((text, row) for row in table().signatures for text in row.live)


def _in_order(pieces: Sequence[str], text: str) -> bool:
    place = 0
    for piece in pieces:
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def _glob(text: str) -> tuple[str, ...]:
    if text != text.lower():
        raise ConfigError(f"signatures.yaml: {text!r}: write it in lower case")
    return tuple(piece for piece in text.split("*") if piece)


def _signature(row: dict[str, Any]) -> Signature:
    name = str(row.get("id", row))
    unknown = set(row) - _KEYS
    if unknown:
        raise ConfigError(f"signatures.yaml: {name}: no such key: {', '.join(sorted(unknown))}")
    try:
        return Signature(
            id=row["id"],
            kind=FailureKind(row["kind"]),
            tier=Tier[row["tier"].upper()],
            globs=tuple(_glob(text) for text in row.get("text", ())),
            needed=tuple(row["if"]) if "re" in row else (),
            patterns=tuple(re.compile(text) for text in row.get("re", ())),
            unless=tuple(row.get("unless", ())),
            phases=frozenset(Phase(text) for text in row.get("phases", ())),
            axis=Axis(row["axis"]) if "axis" in row else None,
            hint=row["hint"],
            source=row["source"],
            live=tuple(row.get("live", ())),
            serving_kind=FailureKind(row["serving_kind"]) if "serving_kind" in row else None,
            sticky=row.get("sticky", False),
        )
    except (KeyError, ValueError, re.error) as error:
        raise ConfigError(f"signatures.yaml: {name}: {error}") from error
