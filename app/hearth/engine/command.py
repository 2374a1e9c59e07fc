"""The engine's command line and environment, as values. Pure, but for the own environment as a default."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from hearth.config_types import OWNED, argument_name
from hearth.engine.dialect import Dialect
from hearth.errors import ConfigError
from hearth.ladder import GraphPlan

# Given unless the config says otherwise: without metrics Hearth can't see a stalled engine.
_DEFAULTS: Mapping[str, Any] = {"enable-metrics": True}
_DSA = re.compile(r"(?:dsa|nsa)-(prefill-backend|decode-backend)")
_KEY = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")

# What of Hearth's own environment the engine gets; `*` ends a prefix.
ALLOWED_ENV = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "XDG_CACHE_HOME"),
    *("PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTORCH_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "OMP_*", "MKL_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_*", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)
# Kubernetes puts NAME_PORT=tcp://10.0.0.1:80 and NAME_SERVICE_HOST into every pod; a service called `nccl` or
# `sglang` would otherwise set the engine's own variables (SGLANG_PORT).
_SERVICE_NAME = re.compile(r"_SERVICE_(?:HOST|PORT(?:_\w+)?)$|_PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?$")
_SERVICE_VALUE = re.compile(r"(?:tcp|udp|sctp)://")


def engine_argv(
    python: str,
    dialect: Dialect,
    plan: GraphPlan,
    model_path: str,
    host: str,
    port: int,
    served_name: str,
    args: Mapping[str, Any],
) -> tuple[str, ...]:
    """The whole command line of an engine.

    `args` are the config's engine.args: `tp: 8` gives `--tp 8`; true a bare flag; false or null nothing;
    a list its values after the flag; a mapping compact JSON. Underscores and dashes are equal. Raises
    ConfigError, naming the key, for an argument that Hearth gives itself, a value that can't be written,
    or a plan that the dialect hasn't.
    """
    own = (
        "--model-path",
        model_path,
        "--served-model-name",
        served_name,
        "--host",
        host,
        "--port",
        str(port),
    )
    given = _normal(args, dialect)
    words = (word for key, value in {**_DEFAULTS, **given}.items() for word in _words(key, value))
    return (*_start(python, dialect.serve_command), *own, *dialect.argv(plan), *words)


def engine_env(
    dialect: Dialect,
    extra: Mapping[str, str],
    allow: Collection[str] = (),
    cache: str = "",
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """A clean environment for the engine.

    From `base` (Hearth's own where None) only allow-listed names pass, no credentials and none of the
    variables that Kubernetes makes from service names; `allow` adds names or `PREFIX_*` (a name written
    in full always passes). Over that come the variables that Hearth sets, with every kernel cache below
    the directory `cache`, and over all `extra`, the config's engine.env. Raises ConfigError for a name or
    value that can't be set.
    """
    source = os.environ if base is None else base
    passed = {name: value for name, value in source.items() if _passes(name, value, allow)}
    own = {"PYTHONUNBUFFERED": "1", **dialect.crash_env, **(dialect.cache_env(cache) if cache else {})}
    return {**passed, **own, **_settable(extra)}


def _start(python: str, command: tuple[str, ...]) -> tuple[str, ...]:
    """The serve command with its first word replaced: the interpreter, or the script that lies beside it."""
    if command[1:2] == ("-m",):
        return (python, *command[1:])
    beside = PurePath(python).parent / command[0] if "/" in python else PurePath(command[0])
    return (str(beside), *command[1:])


def _normal(args: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Arguments by SGLang's own spelling. Raises ConfigError for a key that is bad, owned or there twice."""
    found: dict[str, Any] = {}
    for written, value in args.items():
        key = argument_name(str(written))
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"engine.args: {written!r}: not a flag", "write its name without dashes before it"
            )
        _refuse_owned(written, key)
        key = _DSA.sub(rf"{dialect.dsa_prefix}-\1", key) if _DSA.fullmatch(key) else key
        if key in found:
            raise ConfigError(f"engine.args: {written}: the same flag is there twice", "keep one of them")
        found[key] = value
    return found


def _refuse_owned(written: str, key: str) -> None:
    """argparse takes any unique beginning of a flag's name, so those are refused with the name itself."""
    owned = next((name for name in (key, *OWNED) if name in OWNED and name.startswith(key)), None)
    if owned is not None:
        same = "" if owned == key else f" (short for {owned})"
        raise ConfigError(f"engine.args: {written}{same}: Hearth sets this itself", f"set {OWNED[owned]}")


def _words(key: str, value: Any) -> Iterable[str]:
    if value is None or value is False:
        return ()
    if value is True:
        return (f"--{key}",)
    if isinstance(value, list):
        return _repeated(key, value)
    text = _text(key, value)
    return (f"--{key}={text}",) if text.startswith("-") else (f"--{key}", text)


def _repeated(key: str, values: list[Any]) -> Iterable[str]:
    if not values:
        raise ConfigError(f"engine.args: {key}: the list is empty", "give it values, or remove the key")
    texts = [_text(key, value) for value in values]
    for text in texts:
        if text.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", text):
            raise ConfigError(f"engine.args: {key}: {text!r}: a value in a list can't begin with a dash")
    return (f"--{key}", *texts)


def _text(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return _json(key, value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(
            f"engine.args: {key}: {value!r} can't be written as an argument",
            "use text, a number, true or false, a list of those, or a mapping",
        )
    text = str(value)
    if "\0" in text:
        raise ConfigError(f"engine.args: {key}: the value has a NUL byte", "remove it")
    return text


def _json(key: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine.args: {key}: can't be written as JSON: {error}") from error


def _passes(name: str, value: str, allow: Collection[str]) -> bool:
    if name in allow:
        return True
    if _SECRET_NAME.search(name) or _SERVICE_NAME.search(name) or _SERVICE_VALUE.match(value):
        return False
    return any(fnmatchcase(name, pattern) for pattern in (*ALLOWED_ENV, *allow))


def _settable(extra: Mapping[str, str]) -> dict[str, str]:
    for name, value in extra.items():
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(
                f"engine.env: {name!r}: can't be set", "a name has no '=', and neither has a NUL byte"
            )
    return dict(extra)
