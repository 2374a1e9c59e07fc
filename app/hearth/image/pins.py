"""Read a hash-locked requirements file: every line pinned to one version, every pin with hashes.

Such files are what pip takes with `--require-hashes`. Two kinds of comment carry facts that `hearth image
lock` wrote down: `# asks: REQUIREMENT` (the SGLang wheel's own Requires-Dist) and `# download: BYTES FILES`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from packaging.markers import InvalidMarker, Marker
from packaging.utils import canonicalize_name

from hearth.errors import ConfigError, MissingError

_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(?:\[[\w,. -]*\])?==(?P<version>[^\s;*]+)(?:\s*;\s*(?P<marker>.*?))?"
)
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
_LINUX = {
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}
_WHY = "every requirement is pinned as NAME==VERSION with --hash=sha256:... lines, by `make lock`"


@dataclass(frozen=True)
class Lock:
    """A lock file. `pins`: normalized package name to version; `text` has each package's own lines, `markers`
    the condition under which it is installed, where it has one.

    `asks` are the requirements of the SGLang wheel that the lock was made for; `download_bytes` and
    `download_files` are what an empty cache has to fetch (None: the lock doesn't say).
    """

    name: str
    pins: dict[str, str]
    text: dict[str, str]
    markers: dict[str, str] = field(default_factory=dict)
    asks: tuple[str, ...] = ()
    download_bytes: int | None = None
    download_files: int | None = None


def read_lock(path: Path) -> Lock:
    """Read a lock. Raises MissingError, or ConfigError that names each unpinned or unhashed requirement."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError(f"{path}: no such lock", "make lock IMAGE=NAME") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    return parse_lock(text, str(path))


def parse_lock(text: str, name: str) -> Lock:
    """Read a lock's text; `name` stands for the file in errors. Raises ConfigError."""
    pins: dict[str, str] = {}
    texts: dict[str, str] = {}
    markers: dict[str, str] = {}
    problems: list[str] = []
    for line, entry in _logical_lines(text):
        package, problem = _entry(entry)
        if problem:
            problems.append(f"{name}: line {line}: {problem}")
        elif package[0] in pins and pins[package[0]] != package[1]:
            problems.append(f"{name}: line {line}: {package[0]} is pinned twice: {_WHY}")
        else:
            pins[package[0]] = package[1]
            texts[package[0]] = entry
            markers |= {package[0]: package[2]} if package[2] else {}
    if not pins and not problems:
        problems.append(f"{name}: line 1: holds no requirement: {_WHY}")
    if problems:
        raise ConfigError("\n".join(problems))
    size = re.search(r"^# download: ([0-9]+) bytes, ([0-9]+) files", text, re.MULTILINE)
    asks = tuple(re.findall(r"^# asks: (.+)$", text, re.MULTILINE))
    return Lock(
        name, pins, texts, markers, asks, int(size[1]) if size else None, int(size[2]) if size else None
    )


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Lines joined over backslashes, without comments: (number of the first line, text)."""
    found: list[tuple[int, str]] = []
    open_line = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", raw).strip()
        content = line.removesuffix("\\").strip()
        if open_line and content:
            first, before = found[-1]
            found[-1] = (first, f"{before} {content}")
        elif content:
            found.append((number, content))
        open_line = line.endswith("\\")
    return found


def _entry(entry: str) -> tuple[tuple[str, str, str], str]:
    """((name, version, marker), "") of one requirement, or what is wrong with it."""
    requirement = entry.partition(" --hash=")[0].strip()
    found = _PIN.fullmatch(requirement)
    problem = _problem(entry, requirement, found)
    if problem or found is None:
        return ("", "", ""), problem
    return (canonicalize_name(found["name"]), found["version"], found["marker"] or ""), ""


def _problem(entry: str, requirement: str, found: re.Match[str] | None) -> str:
    """What is wrong with a requirement, "" for nothing; `found` are its parts if it is pinned."""
    if requirement.startswith("-"):
        return f"{requirement.split()[0].partition('=')[0]}: an option, not a requirement: remove it"
    if found is None:
        return f"{requirement[:80]!r} is not pinned: {_WHY}"
    if not _HASH.search(entry) or _HASH.sub("", entry.removeprefix(requirement)).strip():
        return f"{requirement[:80]!r} has no usable hash: {_WHY}"
    try:
        Marker(found["marker"] or "os_name == 'posix'")
    except InvalidMarker:
        return f"{found['marker'][:80]!r} is no marker: {_WHY}"
    return ""


def installed(marker: Marker | None, python: str) -> bool:
    """Whether something with this marker is installed on Linux x86_64 with this Python ("3.11")."""
    return marker is None or marker.evaluate(
        {**_LINUX, "python_version": python, "python_full_version": python}
    )


def total_download(locks: tuple[Lock, ...]) -> int | None:
    """Bytes that all these locks fetch; None where one doesn't say."""
    sizes = [lock.download_bytes for lock in locks]
    return None if None in sizes else sum(size for size in sizes if size is not None)
