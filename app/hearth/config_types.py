"""The types of config values that need more than their Python type: seconds, paths, arguments, ..."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from hearth.config_explain import Says

Scalar = str | int | float | bool | None

_SECRET = re.compile(r"(?:^|[-_])(?:api[-_]?key|access[-_]key|token|passw(?:or)?d|secret(?:[-_]key)?)$", re.I)
OWNED = {
    "model": "model.path",
    "model-path": "model.path",
    "served-model-name": "model.served_name",
    "host": "ports.engine_host",
    "port": "ports.engine",
    "api-key": "secrets.api_key_file, the path of a file that holds it",
    "admin-api-key": "secrets.admin_api_key_file, the path of a file that holds it",
    "config": "its content under engine.args",
    "cuda-graph-bs": "graphs.decode_max_bs",
    "cuda-graph-bs-decode": "graphs.decode_max_bs",
    "debug-cuda-graph": "graphs.wanted",
    "cuda-graph-max-bs": "graphs.decode_max_bs",
    "cuda-graph-max-bs-decode": "graphs.decode_max_bs",
    "cuda-graph-config": "graphs.wanted",
    "cuda-graph-backend-prefill": "graphs.wanted",
    "cuda-graph-backend-decode": "graphs.wanted",
    "disable-cuda-graph": "graphs.wanted",
    "disable-prefill-cuda-graph": "graphs.wanted",
    "disable-decode-cuda-graph": "graphs.wanted",
    "enable-piecewise-cuda-graph": "graphs.wanted",
    "disable-piecewise-cuda-graph": "graphs.wanted",
    "enforce-piecewise-cuda-graph": "graphs.wanted",
    "enable-breakable-cuda-graph": "graphs.wanted",
}
"""Engine arguments that Hearth sets itself, and the key that sets each."""


def argument_name(name: str) -> str:
    """An engine argument's name with neither leading dashes nor underscores."""
    return name.removeprefix("--").replace("_", "-")


def _argument(name: str) -> str:
    if not re.fullmatch(r"(?:--)?[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*", name):
        raise ValueError("not the name of an argument: write it like mem-fraction-static, the value after it")
    plain = argument_name(name)
    if plain in OWNED:
        raise ValueError(f"Hearth sets this argument itself: write {OWNED[plain]}")
    if _SECRET.search(plain):
        raise ValueError("a secret in plain text: remove it; only API keys can be given, see secrets")
    return name


def _argument_value(value: Any) -> Any:
    """A scalar, a list of scalars, or a mapping (handed on as JSON)."""
    if isinstance(value, list):
        if any(isinstance(item, (list, dict)) for item in value):
            raise ValueError("a list in a list: write a flat list, or JSON in quotes")
        return [_argument_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _nested(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number: write a number")
    if value is not None and not isinstance(value, (str, int, float)):
        raise ValueError("not a plain value: write text, a number, true, false, a list or a mapping")
    return value


def _nested(value: Any) -> Any:
    return [_nested(item) for item in value] if isinstance(value, list) else _argument_value(value)


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("not the name of a variable: write letters, digits and _")
    if _SECRET.search(name):
        raise ValueError(
            "a secret in plain text: remove it, list its name in engine.pass_env and set it outside this file"
        )
    return name


def _variable_value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        raise ValueError('not text: write it in quotes, e.g. "1", "true" or "" for an empty value')
    if not isinstance(value, (str, int, float)):
        raise ValueError("not text: write one value, lists and mappings in quotes")
    return str(value)


def _passed(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
        raise ValueError("not the name of a variable: write NAME or PREFIX_*")
    return name


def expand(value: Any) -> Any:
    """`~` and `~user` at the start of a path become the home folder."""
    if not isinstance(value, (str, Path)):
        return value
    if str(value).strip() in ("", "."):
        raise ValueError("an empty path: write a path")
    try:
        return type(value)(Path(value).expanduser()) if str(value).startswith("~") else value
    except RuntimeError as error:
        raise ValueError("~ stands for no home folder here: write the whole path") from error


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("is true or false: write a number")
    return value


def _web_address(value: str) -> str:
    """An http or https URL with a host. It may hold a token, so no message repeats it."""
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not value.isascii() or re.search(r"[\s\x00-\x1f]", value):
        raise ValueError("not a web address: write https://HOST/PATH")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a user in an address: write it without, and an Authorization in header_files")
    return value


def _header(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name):
        raise ValueError("not the name of a header: write letters, digits and -")
    if name.lower() in ("content-type", "content-length", "host", "transfer-encoding", "connection"):
        raise ValueError("Hearth sets this header itself: remove it")
    return name


_NUMBER = BeforeValidator(_no_bool)
Seconds = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False), Says("seconds, a number above 0")]
Port = Annotated[int, _NUMBER, Field(ge=1, le=65535), Says("a port, 1 to 65535")]
Count = Annotated[int, _NUMBER, Field(ge=1, le=100_000), Says("a whole number, 1 or more")]
Text = Annotated[str, Field(min_length=1), Says("text")]
FilePath = Annotated[Path, BeforeValidator(expand), Says("a path")]
Command = Annotated[str, Field(min_length=1), BeforeValidator(expand), Says("a command or its path")]
ArgName = Annotated[str, AfterValidator(_argument)]
ArgValue = Annotated[
    Scalar | list[Scalar] | dict[str, Any],
    PlainValidator(_argument_value),
    Says("text, a number, true, false, a list or a mapping"),
]
EnvName = Annotated[str, AfterValidator(_variable)]
EnvValue = Annotated[str, BeforeValidator(_variable_value), Says("text")]
PassedName = Annotated[str, AfterValidator(_passed), Says("NAME or PREFIX_*")]
WebAddress = Annotated[str, AfterValidator(_web_address), Says("an http or https address")]
HeaderName = Annotated[str, AfterValidator(_header)]
