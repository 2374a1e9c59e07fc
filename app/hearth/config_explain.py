"""What pydantic found wrong with a config, as `file: key: what is wrong: what to write`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Says:
    """Metadata of a type: how to tell a person what to write."""

    text: str


_PLAIN = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}
_PROBLEMS = (
    (r"bool_", "is not true or false"),
    (r"int_|float_", "is not a number of the right kind"),
    (r"string_type|path_", "is not text"),
    (r"string_too_short", "is empty"),
    (r"dict_|model_|mapping_", "is not a mapping"),
    (r"list_", "is not a list"),
    (r"greater_|less_|finite_", "is out of range"),
    (r"literal_|enum", "is none of the choices"),
)
_SILENT = ("args", "env", "secrets")
"""Sections whose values are never repeated: somebody may have written a secret there."""


def explain(name: str, error: Any, root: type[BaseModel]) -> str:
    """One line for one of pydantic's errors about `root`; `name` stands for the file."""
    location = tuple(part for part in error["loc"] if part != "[key]")
    about_key = len(location) != len(error["loc"])
    problem, advice = _sentence(error, location, root, about_key)
    return f"{name}: {_key(location)}: {problem}" + (f": {advice}" if advice else "")


def _sentence(
    error: Any, location: tuple[Any, ...], root: type[BaseModel], about_key: bool
) -> tuple[str, str]:
    """What is wrong, and what to write."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return "no such key", _nearest(location[-1], _keys(_annotation(location[:-1], root)))
    if kind == "value_error":
        return str(error["ctx"]["error"]), ""
    if about_key:
        return "no such key", _nearest(location[-1], _keys(_annotation(location[:-1], root)))
    field = _field(location, root)
    kind_of = describe(field.annotation, field.metadata) if field else describe(_annotation(location, root))
    wanted = f"write {kind_of}{_default(field)}"
    if kind == "missing":
        return "missing", wanted
    return _problem(error) + _given(error["input"], location), wanted


def _problem(error: Any) -> str:
    if error["input"] is None:
        return "has no value"
    if isinstance(error["input"], bool) and error["type"] == "string_type":
        return "is not text but a truth value, as yes, no, on and off are without quotes"
    for pattern, text in _PROBLEMS:
        if re.match(pattern, error["type"]):
            return text
    message = str(error["msg"])
    return message[:1].lower() + message[1:]


def _given(value: object, location: tuple[Any, ...]) -> str:
    if value is None or isinstance(value, (dict, list)) or any(part in _SILENT for part in location):
        return ""
    text = repr(value)
    return f" (given: {text if len(text) <= 60 else text[:57] + '...'})"


def _key(location: tuple[Any, ...]) -> str:
    return ".".join(_part(part) for part in location) or "(file)"


def _part(part: Any) -> str:
    text = str(part)
    return text if re.fullmatch(r"[\w*-]{1,80}", text) else repr(text[:80])


def _field(location: tuple[Any, ...], root: type[BaseModel]) -> FieldInfo | None:
    owner = _annotation(location[:-1], root)
    if isinstance(owner, type) and issubclass(owner, BaseModel):
        return owner.model_fields.get(str(location[-1])) if location else None
    return None


def _annotation(location: Iterable[Any], root: type[BaseModel]) -> Any:
    """The type at a place of the config; None where there is none."""
    current: Any = root
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = bare(field.annotation) if field else None
        elif get_origin(current) in (dict, list):
            current = bare(get_args(current)[-1])
        else:
            return None
    return current


def bare(annotation: Any) -> Any:
    """A type without `| None` and without metadata."""
    if get_origin(annotation) is Annotated:
        return bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return bare(kinds[0]) if len(kinds) == 1 else annotation
    return annotation


def _keys(owner: Any) -> list[str]:
    """The keys that may stand in a section or in a mapping with fixed keys."""
    if isinstance(owner, type) and issubclass(owner, BaseModel):
        return list(owner.model_fields)
    choices = get_args(owner)[0] if get_origin(owner) is dict else None
    if isinstance(choices, type) and issubclass(choices, StrEnum):
        return [choice.value for choice in choices]
    return []


def _nearest(given: Any, known: list[str]) -> str:
    close = difflib.get_close_matches(str(given)[:80], known, n=1)
    return f"did you mean {close[0]}?" if close else f"write one of {', '.join(known)}"


def _default(field: FieldInfo | None) -> str:
    if field is None or field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, (BaseModel, dict, list)) else f" (default: {show(value)})"


def show(value: object) -> str:
    """A default as it stands in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if str(value) else '""'


def describe(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a value of this type looks like, for a person."""
    for mark in reversed(tuple(metadata)):
        if isinstance(mark, Says):
            return mark.text
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(inner[0], inner[1:])
    if origin in (Union, UnionType):
        kinds = [describe(kind) for kind in inner if kind is not NoneType]
        return " or ".join([*dict.fromkeys(kinds), *(["null"] if NoneType in inner else [])])
    if origin is Literal:
        return " or ".join(str(choice) for choice in inner)
    if origin is list:
        return f"a list, each item {describe(inner[0])}"
    if origin is dict:
        return f"a mapping, each value {describe(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    return _PLAIN.get(annotation, "a value as in hearth.example.yaml")
