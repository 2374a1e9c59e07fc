"""Make an image's lock: resolve SGLang's own requirements and Hearth's together, with hashes and sizes.

uv does the work (`uv pip compile --generate-hashes`), for Linux x86_64 and the image's Python. pip is asked
for the wheel's own Requires-Dist. Neither needs to download SGLang or torch: both read the metadata that the
package index keeps beside each wheel. No index is named in what is written.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from hearth.errors import ConfigError, MissingError, Unreachable
from hearth.image.pins import Lock, parse_lock, read_lock
from hearth.image.spec import Spec, load

PLATFORM = "x86_64-manylinux_2_36"
_GLIBC = range(36, 4, -1)
"""Debian 12 has glibc 2.36: wheels up to manylinux_2_36 can be installed."""


@dataclass(frozen=True)
class Size:
    """What an empty cache downloads: bytes, files, and the largest files as (name, bytes)."""

    total: int
    files: int
    largest: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Locked:
    """A lock that was written: where, its packages, its download."""

    path: Path
    packages: int
    size: Size


def lock(path: Path, root: Path, upgrade: bool = False) -> Locked:
    """Resolve the image of the YAML file `path` and write its own lock beside it.

    `root` is the project's folder (its pyproject.toml is part of what is resolved). Earlier pins are kept
    unless `upgrade`. Raises ConfigError with uv's own words where nothing fits, MissingError without uv,
    Unreachable where pip can't ask the index; the old lock stays then.
    """
    spec = load(path)
    target = path.parent / spec.own_lock
    asks = wheel_asks(spec)
    others = tuple(read_lock(path.parent / name) for name in spec.locks[:-1])
    with tempfile.TemporaryDirectory() as scratch:
        found = _resolve(spec, root, Path(scratch), target, others, upgrade)
        size = _size(Path(scratch), found, spec.python)
    body = header(spec, asks, size) + found
    own = parse_lock(body, str(target))
    target.write_text(body, encoding="utf-8")
    return Locked(target, len(own.pins), size)


def pin_base(text: str, digest: str) -> str:
    """The YAML text of a bill of materials with its base image pinned; all else stays, comments too.

    Raises ConfigError where it has no `digest:` line under `base:`.
    """
    pattern = r"^(base:\n(?:[ \t]+.*\n)*?[ \t]+digest:[ \t]*)(?:null|~|sha256:[0-9a-f]{64})?(?=[ \t]|$)"
    changed, count = re.subn(pattern, rf"\g<1>{digest}", text, flags=re.MULTILINE)
    if not count:
        raise ConfigError("base.digest: no such line", "write `digest: null` under base")
    return changed


def wheel_asks(spec: Spec) -> tuple[str, ...]:
    """The Requires-Dist lines of the SGLang wheel, extras left out. Raises Unreachable, MissingError."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--quiet", "--only-binary=:all:", "--python-version", spec.python, "--target", scratch]
        command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
        command += ["--report", str(report), f"sglang=={spec.engine.sglang}"]
        done = _run(command)
        if done.returncode != 0 or not report.is_file():
            raise Unreachable(f"sglang {spec.engine.sglang}: pip can't ask for it: {_last(done.stderr)}")
        metadata = json.loads(report.read_text())["install"][0]["metadata"]
    return tuple(sorted(line for line in metadata.get("requires_dist", ()) if "extra ==" not in line))


def requirements(spec: Spec, others: Iterable[Lock]) -> str:
    """What uv resolves, as a requirements file: SGLang only where no other lock has it."""
    lines = list(spec.requirements)
    if not any("sglang" in other.pins for other in others):
        lines.insert(0, f"sglang=={spec.engine.sglang}")
    return "".join(f"{line}\n" for line in lines)


def header(spec: Spec, asks: Iterable[str], size: Size) -> str:
    """The comments at the top of a lock, which `pins.parse_lock` reads again."""
    lines = [
        f"Made by `make lock IMAGE={spec.name}` for Linux x86_64, Python {spec.python}; not written by hand.",
        f"download: {size.total} bytes, {size.files} files; the largest:",
        *(f"  {count / 1e6:.0f} MB {name}" for name, count in size.largest),
        f"sglang {spec.engine.sglang} asks for:",
        *(f"asks: {ask}" for ask in asks),
    ]
    return "".join(f"# {line}\n" for line in lines)


def _resolve(
    spec: Spec, root: Path, scratch: Path, target: Path, others: tuple[Lock, ...], upgrade: bool
) -> str:
    """Run uv. The lock's text, without what the other locks have already."""
    wanted, overrides, kept, config = (scratch / name for name in ("in", "overrides", "lock", "uv.toml"))
    wanted.write_text(requirements(spec, others))
    overrides.write_text("".join(f"{item.package}=={item.pin}\n" for item in spec.differs))
    constraints = scratch / "constraints"
    constraints.write_text("".join(f"{n}=={p}\n" for other in others for n, p in other.pins.items()))
    config.write_text("" if spec.whole else _bare(spec))
    if target.is_file() and not upgrade:
        kept.write_text("".join(f"{name}=={pin}\n" for name, pin in read_lock(target).pins.items()))
    command = ["pip", "compile", "--config-file", str(config), "--generate-hashes", "--no-header", "--quiet"]
    command += [*_target(spec), "--overrides", str(overrides), "--constraints", str(constraints)]
    command += [
        "--output-file",
        str(kept),
        str(wanted),
        "pyproject.toml",
        *(["--upgrade"] if upgrade else []),
    ]
    done = _uv(command, root)
    if done.returncode != 0:
        raise ConfigError(f"{spec.name}: the requirements don't fit together: {_last(done.stderr, 2000)}")
    text = re.sub(r"\(?-r (\S+?)\)?$", f"images/{spec.name}.yaml", kept.read_text(), flags=re.MULTILINE)
    return without({name for other in others for name in other.pins}, text)


def _bare(spec: Spec) -> str:
    """uv settings that leave out what the listed packages ask for: a lock that isn't whole says so."""
    names = [re.split(r"[=<>\[ ]", line)[0] for line in spec.requirements]
    return "".join(f'[[dependency-metadata]]\nname = "{name}"\nrequires-dist = []\n' for name in names)


def without(names: set[str], text: str) -> str:
    """A lock's text without the entries of these packages."""
    entries = re.findall(r"^[^\s#].*\n(?:[ \t]+.*\n)*", text, re.MULTILINE)
    return "".join(entry for entry in entries if not names & set(parse_lock(entry, "lock").pins))


def _size(scratch: Path, text: str, python: str) -> Size:
    """Ask uv which files the lock means, with the sizes that the index states."""
    source, target = scratch / "size.txt", scratch / "pylock.toml"
    source.write_text(text)
    command = ["pip", "compile", "--no-deps", "--format", "pylock.toml", "--quiet", "--no-header"]
    command += ["--python-version", python, "--python-platform", PLATFORM, str(source), "-o", str(target)]
    done = _uv(command, scratch)
    if done.returncode != 0:
        raise Unreachable(f"uv can't look up the files' sizes: {_last(done.stderr)}")
    return size_of(tomllib.loads(target.read_text()), python)


def size_of(pylock: dict[str, Any], python: str) -> Size:
    """The download that a pylock.toml means: each package's wheel that pip would take, else its source."""
    order = _tag_order(python)
    files = [_file(package, order) for package in pylock.get("packages", ())]
    largest = sorted(files, key=lambda item: -item[1])[:8]
    return Size(sum(count for _, count in files), len(files), tuple(largest))


def _file(package: dict[str, Any], order: dict[Tag, int]) -> tuple[str, int]:
    """(file name, bytes) of the best wheel for these tags."""
    best: tuple[int, str, int] | None = None
    for wheel in package.get("wheels", ()):
        name = str(wheel.get("name") or wheel.get("url", "")).rpartition("/")[2].replace("%2B", "+")
        try:
            ranks = [order[tag] for tag in parse_wheel_filename(name)[3] if tag in order]
        except InvalidWheelFilename:
            continue
        if ranks and (best is None or min(ranks) < best[0]):
            best = (min(ranks), name, int(wheel.get("size", 0)))
    if best is not None:
        return best[1], best[2]
    source = package.get("sdist", {})
    return f"{package['name']} (source)", int(source.get("size", 0))


def _tag_order(python: str) -> dict[Tag, int]:
    """The wheel tags that fit, best first."""
    major, minor = (int(part) for part in python.split("."))
    platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in _GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    tags = [
        *cpython_tags((major, minor), platforms=platforms),
        *compatible_tags((major, minor), f"cp{major}{minor}", platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


def _target(spec: Spec) -> list[str]:
    return ["--python-version", spec.python, "--python-platform", PLATFORM]


def _uv(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).with_name("uv")
    command = [str(beside) if beside.exists() else "uv", *arguments, "--no-emit-index-url"]
    return _run([*command, "--no-emit-find-links"], folder)


def _run(command: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder)
    except FileNotFoundError as error:
        raise MissingError(f"{command[0]} isn't installed", "make setup") from error


def _last(text: str, limit: int = 300) -> str:
    """The end of a tool's complaint, on one line, without the addresses of anybody's index."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return re.sub(r"https?://\S+", "(the package index)", " ".join(lines))[-limit:] or "it said nothing"
