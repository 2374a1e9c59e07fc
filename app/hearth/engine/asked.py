"""The graph plan and the engine version that a log's start tells of. Pure.

SGLang prints its resolved arguments as `server_args=...`: `ServerArgs(key=value, ...)` or, later, a
dict. The version itself isn't printed; which keys are there narrows it down.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from hearth.engine.loglines import plain_lines
from hearth.ladder import DISABLED

_KEYS = (
    "cuda_graph_backend_prefill",
    "cuda_graph_backend_decode",
    "cuda_graph_max_bs_decode",
    "cuda_graph_max_bs",
    "cuda_graph_tc_compiler",
    "disable_cuda_graph",
    "disable_prefill_cuda_graph",
    "disable_decode_cuda_graph",
    "enable_piecewise_cuda_graph",
    "disable_piecewise_cuda_graph",
    "enforce_piecewise_cuda_graph",
    "enable_breakable_cuda_graph",
)
_VALUE = r"""['"]?\s*[=:]\s*(?:'([^']*)'|"([^"]*)"|([\w.+-]+))"""
_PAIRS = {key: re.compile(rf"(?<![\w-]){key}{_VALUE}") for key in _KEYS}
_RESOLVED = r"""['"]?\s*[=:]\s*(?:PhaseConfig\(|\{)\s*['"]?backend['"]?\s*[=:]\s*['"](\w+)['"]"""
_CONFIG = {axis: re.compile(axis + _RESOLVED) for axis in ("decode", "prefill")}
_CONFIG_BS = re.compile(r"decode" + _RESOLVED + r"""\s*,\s*['"]?max_bs['"]?\s*[=:]\s*(\d+)""")
_VERSION = re.compile(
    r"\bsglang(?:[ :=/@-]+v?| version )(\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)", re.IGNORECASE
)
_HEARTH = re.compile(r"\bengine(?:_version)?[ =:]+v?(\d+\.\d+\.\d+(?:\.post\d+)?)\b")
_ARCHITECTURE = re.compile(r"\btype=(\w+)")
_UNSET = ("None", "null", "")


def asked_arguments(lines: Sequence[str]) -> dict[str, str]:
    """The graph arguments of the last engine started in a log, by SGLang's own names; values are text.

    `decode` and `prefill` hold what SGLang resolved, where it says so. Empty where the log doesn't tell.
    """
    found: dict[str, str] = {}
    for line in plain_lines(lines):
        if "server_args=" in line:
            found = _from_dump(line.split("server_args=", 1)[1])
        elif "sglang" in line and " --" in line and ("launch_server" in line or "sglang serve" in line):
            found = _from_argv(line) or found
    return found


def asked_version(lines: Sequence[str], arguments: Mapping[str, str]) -> str | None:
    """The engine version: named in the log, or a release that prints just these arguments; else None."""
    for line in plain_lines(lines):
        if "sglang" in line.lower() or "engine" in line:
            named = _VERSION.search(line) or _HEARTH.search(line)
            if named:
                return named[1]
    return _family(arguments)


def asked_architecture(lines: Sequence[str]) -> str | None:
    """The model's Hugging Face architecture, where the weights were loaded."""
    for line in plain_lines(lines):
        found = _ARCHITECTURE.search(line) if "Load weight end" in line else None
        if found:
            return found[1]
    return None


def asked_graphs(arguments: Mapping[str, str]) -> tuple[str, int | None] | None:
    """The asked plan as `PREFILL,DECODE` and the largest decode batch; None where nothing is known."""
    if not arguments:
        return None
    off = _true(arguments, "disable_cuda_graph")
    decode = _known(arguments, "cuda_graph_backend_decode") or "full"
    if off or _true(arguments, "disable_decode_cuda_graph"):
        decode = DISABLED
    prefill = _prefill(arguments, off)
    size = _known(arguments, "cuda_graph_max_bs_decode") or _known(arguments, "cuda_graph_max_bs")
    size = size or arguments.get("decode_max_bs", "")
    return f"{prefill},{decode}", int(size) if size.isdigit() else None


def _prefill(arguments: Mapping[str, str], off: bool) -> str:
    if _is_new(arguments):
        if _true(arguments, "disable_prefill_cuda_graph") or off:
            return DISABLED
        return _known(arguments, "cuda_graph_backend_prefill") or arguments.get("prefill", DISABLED)
    if _true(arguments, "disable_piecewise_cuda_graph"):
        return DISABLED
    if "disable_piecewise_cuda_graph" in arguments or _true(arguments, "enforce_piecewise_cuda_graph"):
        return "breakable" if _true(arguments, "enable_breakable_cuda_graph") else "tc_piecewise"
    return "tc_piecewise" if _true(arguments, "enable_piecewise_cuda_graph") else DISABLED


def _family(arguments: Mapping[str, str]) -> str | None:
    """A release that prints these arguments: all of a family spell and order their graph backends alike."""
    if not arguments or "argv" in arguments:
        return None
    if _is_new(arguments):
        return "0.5.17" if "cuda_graph_tc_compiler" in arguments else "0.5.23"
    if "enforce_piecewise_cuda_graph" in arguments:
        return "0.5.11" if "enable_breakable_cuda_graph" in arguments else "0.5.10"
    return "0.5.9" if "enable_piecewise_cuda_graph" in arguments else None


def _is_new(arguments: Mapping[str, str]) -> bool:
    return any(key.startswith("cuda_graph_backend") for key in arguments) or "prefill" in arguments


def _from_dump(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, pattern in _PAIRS.items():
        match = pattern.search(text)
        if match:
            found[key] = match[1] or match[2] or match[3] or ""
    for axis, pattern in _CONFIG.items():
        match = pattern.search(text)
        if match:
            found[axis] = match[1]
    size = _CONFIG_BS.search(text)
    return {**found, "decode_max_bs": size[2]} if size else found


def _from_argv(line: str) -> dict[str, str]:
    """The graph flags of a command line; a flag without a value is `True`."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        name, _, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in _KEYS:
            found[key] = value or ("True" if following.startswith("-") else following)
    return {**found, "argv": "True"} if found else {}


def _known(arguments: Mapping[str, str], key: str) -> str:
    value = arguments.get(key, "")
    return "" if value in _UNSET else value


def _true(arguments: Mapping[str, str], key: str) -> bool:
    return arguments.get(key) == "True"
