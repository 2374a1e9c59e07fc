"""How one SGLang version spells a graph plan on its command line, and what else goes by version.

The mapping is data (`dialect.yaml`): each row holds a range of releases and the place in SGLang's source
that says so. Versions outside the table have no guess: they are read from the engine's own `--help`
(`Dialect.from_help`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from hearth.errors import ConfigError, UnknownVersion
from hearth.ladder import DISABLED, GraphPlan, Ladder

WORDS = ("piecewise", "standard", "eager")
PIECEWISE = ("breakable", "tc_piecewise")
_BATCH = re.compile(r"[1-9][0-9]{0,5}")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
Words = tuple[str, ...]


@dataclass(frozen=True)
class Style:
    """One way to spell a plan: the command-line words of each backend, and the flag of the decode batch size.

    `steps` and the two `on_request` are backends as in `Dialect`, for engines that only their `--help` tells
    of.
    """

    name: str
    prefill: Mapping[str, Words]
    decode: Mapping[str, Words]
    decode_max_bs: str
    steps: Words
    on_request: Words
    decode_on_request: Words = ()


@dataclass(frozen=True)
class Dialect:
    """What Hearth has to know of one SGLang version, for one model architecture.

    `prefill` and `decode` are the backends in ladder order (first = best), ending with `disabled`;
    `on_request` are prefill backends that are taken when written out but never stepped down to,
    `decode_on_request` such decode backends.
    `decode_first` says whether decode graphs are captured before prefill graphs. `serve_command` starts
    the engine, its first word standing for the interpreter (or for the script beside it). `dsa_prefix` is
    `nsa` or `dsa`, as in `--nsa-decode-backend`. `jit_guard` is the environment that makes a compilation
    while serving fatal.
    """

    version: str
    prefill: Words
    decode: Words
    style: Style = field(repr=False)
    on_request: Words = ()
    decode_on_request: Words = ()
    decode_first: bool = False
    serve_command: Words = ()
    dsa_prefix: str = "dsa"
    jit_guard: Mapping[str, str] = field(default_factory=dict)
    prefill_flags: Words = ()
    reasons: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Why a backend that this version has is refused for the architecture."""

    def resolve(self, graphs: str, decode_max_bs: int | None = None) -> GraphPlan:
        """The plan that `graphs` means here: piecewise, standard, eager, or PREFILL,DECODE[,MAXBS].

        `decode_max_bs` is the largest decode batch (sequences) to capture, None for the engine's default.
        Raises ConfigError, which names what this version allows.
        """
        if graphs in WORDS:
            plan = self._named(graphs, decode_max_bs)
        else:
            prefill, decode, size = self._split(graphs)
            if size and decode_max_bs and size != decode_max_bs:
                raise ConfigError(
                    f"graphs {graphs!r}: the decode batch is given twice: {size} and {decode_max_bs}",
                    "keep one of them",
                )
            plan = GraphPlan(prefill, decode, size or decode_max_bs)
        self._check(plan)
        return plan

    def argv(self, plan: GraphPlan) -> Words:
        """The command-line words of a plan. Raises ConfigError for a backend that this version hasn't."""
        self._check(plan)
        words = list(self.style.prefill[plan.prefill])
        if plan.prefill != DISABLED:
            words += self.prefill_flags
        words += self.style.decode[plan.decode]
        if plan.decode_max_bs is not None and plan.decode != DISABLED:
            words += [self.style.decode_max_bs, str(plan.decode_max_bs)]
        return tuple(words)

    def ladder(self, wanted: GraphPlan) -> Ladder:
        """The ways down from `wanted`. Raises ConfigError as `argv` does."""
        self._check(wanted)
        below = (wanted.decode, DISABLED) if wanted.decode in self.decode_on_request else self.decode
        return Ladder.build(wanted, self.prefill, below)

    def cache_env(self, base: str) -> dict[str, str]:
        """The variables that put every cache of compiled kernels below the directory `base`."""
        known, table = Version(self.version), _table()
        return {
            row["name"]: base if row["path"] == "." else f"{base.rstrip('/')}/{row['path']}"
            for row in table["caches"]
            if known >= Version(row["from"])
        }

    @property
    def crash_env(self) -> dict[str, str]:
        """The variables that let a crashed engine die at once instead of after a minute of dumps."""
        return dict(_table()["crash_env"])

    @classmethod
    def from_help(cls, version: str, help_text: str, arch: str | None = None) -> Dialect:
        """A dialect read from the engine's own `--help`, for versions that aren't in the table.

        Raises UnknownVersion where `version` isn't a version, or the text has no graph flag that Hearth
        knows.
        """
        flags = frozenset(_FLAG.findall(help_text))
        style = next((s for mark, s in _styles() if mark in flags), None)
        if style is None:
            raise UnknownVersion(
                f"SGLang {version}: its --help has none of the CUDA-graph flags that Hearth knows",
                f"use a version from {known_versions()}",
            )
        offered = [n for n in style.decode if _offers(help_text, flags, style.decode[n])]
        row = {
            "prefill": [n for n in style.steps if _offers(help_text, flags, style.prefill[n])],
            "on_request": [n for n in style.on_request if _offers(help_text, flags, style.prefill[n])],
            "decode": [n for n in offered if n not in style.decode_on_request],
            "decode_on_request": [n for n in offered if n in style.decode_on_request],
            "decode_first": style.name != "per_phase",
        }
        return _build(_parsed(version), row, style, arch)

    def _named(self, word: str, decode_max_bs: int | None) -> GraphPlan:
        if word == "piecewise":
            if self.prefill[0] == DISABLED:
                raise ConfigError(
                    f"graphs 'piecewise': SGLang {self.version} has no piecewise prefill graphs{self._why()}",
                    f"write {self._allowed()}",
                )
            return GraphPlan(self.prefill[0], self.decode[0], decode_max_bs)
        return GraphPlan(DISABLED, self.decode[0] if word == "standard" else DISABLED, decode_max_bs)

    def _split(self, graphs: str) -> tuple[str, str, int | None]:
        parts = [part.strip() for part in graphs.split(",")]
        if len(parts) not in (2, 3) or (len(parts) == 3 and not _BATCH.fullmatch(parts[2])):
            raise ConfigError(f"graphs {graphs!r}: not a graph plan", f"write {self._allowed()}")
        return parts[0], parts[1], int(parts[2]) if len(parts) == 3 else None

    def _check(self, plan: GraphPlan) -> None:
        known = {
            "prefill": (*self.prefill, *self.on_request),
            "decode": (*self.decode, *self.decode_on_request),
        }
        for axis, backend in (("prefill", plan.prefill), ("decode", plan.decode)):
            if backend not in known[axis]:
                why = self.reasons.get(backend, "") if axis == "prefill" else ""
                raise ConfigError(
                    f"graphs '{plan}': SGLang {self.version} has no {axis} backend {backend!r}"
                    + (f" here: {why}" if why else ""),
                    f"write {self._allowed()}",
                )
        if plan.decode_max_bs is not None and plan.decode_max_bs < 1:
            raise ConfigError(f"graphs '{plan}': the decode batch must be at least 1")

    def _allowed(self) -> str:
        prefill = "|".join((*self.prefill, *self.on_request))
        decode = "|".join((*self.decode, *self.decode_on_request))
        return f"{', '.join(WORDS)}, or PREFILL,DECODE[,MAXBS] with {prefill} and {decode}"

    def _why(self) -> str:
        return "".join(f"; {name}: {why}" for name, why in self.reasons.items())


def dialect_for(version: str, arch: str | None = None) -> Dialect:
    """The dialect of a release in the table; `arch` is the Hugging Face architecture, None for any other.

    Raises UnknownVersion, which names the releases that are known.
    """
    parsed = _parsed(version)
    row = next((row for row in _table()["dialects"] if _within(parsed, row)), None)
    if row is None:
        raise UnknownVersion(
            f"SGLang {version}: not a version that Hearth knows ({known_versions()})",
            "use a known one, or see what the installed engine takes: hearth plan --probe",
        )
    style = next(s for _, s in _styles() if s.name == row["style"])
    return _build(parsed, row, style, arch)


def known_versions() -> str:
    """The releases in the table, for people."""
    rows = _table()["dialects"]
    return f"{rows[0]['versions'][0]} to {rows[-1]['versions'][1]}"


def _build(version: Version, row: Mapping[str, Any], style: Style, arch: str | None) -> Dialect:
    table = _table()
    near = Version(version.base_version) if version.is_prerelease else version
    special = [e for e in table["exceptions"] if arch in e["archs"] and _within(near, e)]
    without = {name: str(e["why"]) for e in special for name in e.get("without", ())}
    return Dialect(
        version=version.public,
        prefill=tuple(name for name in row["prefill"] if name not in without),
        decode=tuple(row["decode"]),
        style=style,
        on_request=tuple(name for name in row.get("on_request", ()) if name not in without),
        decode_on_request=tuple(row.get("decode_on_request", ())),
        decode_first=bool(row.get("decode_first", False)),
        serve_command=tuple(table["serve_command"]),
        dsa_prefix=[r["value"] for r in table["dsa_prefix"] if version >= Version(r["from"])][-1],
        jit_guard={r["name"]: r["value"] for r in table["jit_guard"] if version >= Version(r["from"])},
        prefill_flags=tuple(word for e in special for word in e.get("prefill_flags", ())),
        reasons=without,
    )


def _parsed(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise UnknownVersion(
            f"SGLang {version!r}: not a version number (known: {known_versions()})", 'write e.g. "0.5.23"'
        ) from None


def _within(version: Version, row: Mapping[str, Any]) -> bool:
    """Whether a row covers a version: post-releases of its last release yes, pre-releases never."""
    first, last = (Version(text) for text in row["versions"])
    return not version.is_prerelease and first <= version and Version(version.base_version) <= last


def _offers(text: str, flags: Iterable[str], words: Words) -> bool:
    """Whether a help text has the words of a backend: the flag, and the value among the flag's choices."""
    if not words:
        return True
    if words[0] not in flags or len(words) == 1:
        return words[0] in flags
    choices = re.search(re.escape(words[0]) + r"[\s=]\s*\{([^}]*)\}", text)
    return choices is None or words[1] in re.split(r"[,\s]+", choices.group(1))


@cache
def _table() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(files("hearth.engine").joinpath("dialect.yaml").read_text("utf-8"))
    return data


@cache
def _styles() -> tuple[tuple[str, Style], ...]:
    """Each style with the flag that gives it away, newest first."""
    return tuple(
        (
            data["mark"],
            Style(
                name,
                {backend: tuple(words) for backend, words in data["prefill"].items()},
                {backend: tuple(words) for backend, words in data["decode"].items()},
                data["decode_max_bs"],
                tuple(data["steps"]),
                tuple(data["on_request"]),
                tuple(data.get("decode_on_request", ())),
            ),
        )
        for name, data in _table()["styles"].items()
    )
