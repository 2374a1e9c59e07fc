"""YAML that a person wrote, read without surprises: what can't be meant is an error that names the line.

Differs from plain PyYAML (which follows YAML 1.1) in this: a key written twice, an alias, a tag and a NUL are
errors; a file is at most `MAX_BYTES`; keys are text; `0123`, `1:30` and `2024-01-01` are text, not 83, 90 and
a date. yes, no, on and off still stand for true and false.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from hearth.errors import ConfigError, MissingError

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
_START = "copy hearth.example.yaml and change it"
_STR = "tag:yaml.org,2002:str"
_KINDS = frozenset({"str", "int", "float", "bool", "null", "map", "seq"})
_HINTS = (
    ("\\t", "indent with spaces, not with a tab"),
    ("mapping values are not allowed", 'put text that has ": " in it in quotes, and check the indentation'),
    ("another document", "keep one document: remove the --- line and what follows"),
)


def read(path: Path) -> str:
    """The text of a file. Raises MissingError, or ConfigError for what is no small UTF-8 text."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise MissingError(f"{path}: (file): no such file: {_START}, or name another with --config") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: (file): is a directory: name the file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: (file): can't be read: {reason}: check its owner and mode") from error
    return _decode(raw, str(path))


def _decode(raw: bytes, name: str) -> str:
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name}: (file): larger than 1 MiB: name a config file, which is a few KB of YAML")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}: line {line}: not UTF-8 text: save the file as UTF-8") from error


def compose(text: str, name: str) -> yaml.MappingNode:
    """The tree of a YAML mapping; `name` stands for the file in errors. Raises ConfigError."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {_problem(error, text)}") from error
    except RecursionError:
        raise ConfigError(f"{name}: (file): nested too deeply: write it flatter") from None
    finally:
        if loader is not None:
            loader.dispose()
    if node is None:
        raise ConfigError(f"{name}: (file): is empty: {_START}")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}: (file): must be a mapping of keys and values: {_START}")
    return node


def construct(node: yaml.Node, name: str) -> Any:
    """The values of a tree. Raises ConfigError."""
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: {_problem(error, '')}") from error
    finally:
        loader.dispose()


def load(path: Path) -> Any:
    """Read a YAML mapping from a file. Raises ConfigError or MissingError."""
    return construct(compose(read(path), str(path)), str(path))


def as_text(node: yaml.Node) -> None:
    """Make a number the text that it was written as (`0.10` stays `0.10`)."""
    if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        node.tag = _STR


class _Loader(yaml.SafeLoader):
    """SafeLoader with the differences that the module names."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self._refuse("an alias (*name): write the value out in its place")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._refuse("nested too deeply: write it flatter")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        if node is not None:
            _check_node(node)
        return node

    def _refuse(self, problem: str) -> None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        raise yaml.composer.ComposerError(None, None, problem, mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(
                    None, None, "a key must be plain text: put it in quotes", key.start_mark
                )
            if key.value in seen:
                problem = f"key {key.value!r} is written twice: remove one of the two"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(key.value)
            key.tag = _STR
        return node


def _check_node(node: yaml.Node) -> None:
    if node.tag.rpartition(":")[2] not in _KINDS:
        problem = f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')}: remove it"
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
    if isinstance(node, yaml.ScalarNode) and re.search("[\0\ud800-\udfff]", node.value):
        problem = "a NUL or half a character (\\0, \\ud800): remove it"
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)


# YAML 1.1 reads 0123 as octal, 1:30 as base 60, 1_000 as 1000 and 2024-01-01 as a date; 1.2 doesn't.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag.rpartition(":")[2] in ("bool", "null")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]{0,17})$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:[0-9]{1,18}\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
    list("-+0123456789."),
)


def _problem(error: Exception, text: str) -> str:
    """`line N: what is wrong: what to write`."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return f"line {line}: the character #x{code:02x} can't be in YAML: remove it"
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or str(error).splitlines()[0])[:200]
    if isinstance(error, yaml.composer.ComposerError) and ": " in problem:
        hint = ""
    else:
        hint = ": " + next((fix for sign, fix in _HINTS if sign in problem), "fix the YAML there")
    return f"line {mark.line + 1 if mark else 1}: {problem}{hint}"
