"""Does anything of the building machine lie in an image? Searches its config, history and every layer.

The needles are this machine's own: package indexes and credentials from pip's settings and the environment,
its home folder and the project's folder. What is found is named by place and kind, never by value.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_CHUNK = 1 << 20
_SECRET = re.compile(r"(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL)S?$", re.IGNORECASE)
_PUBLIC = ("pypi.org", "pythonhosted.org", "debian.org", "python.org", "localhost", "127.0.0.1")
_KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert")
_WELL_KNOWN = ("/etc/ssl/certs/ca-certificates.crt",)


@dataclass(frozen=True)
class Needle:
    """What to look for. `kind` is all that is ever shown of it."""

    kind: str
    value: bytes


@dataclass(frozen=True)
class Leak:
    """A needle that was found: its kind, and where."""

    kind: str
    place: str


def needles(
    environment: Mapping[str, str], pip_files: Iterable[Path], folders: Iterable[Path]
) -> list[Needle]:
    """What must not be in an image that was built here."""
    found = {Needle("a folder of the building machine", str(folder).encode()) for folder in folders}
    for name, value in environment.items():
        if _SECRET.search(name) and len(value) >= 8:
            found.add(Needle(f"the value of {name}", value.encode()))
        if name.startswith(("PIP_", "UV_")) and name.endswith(("INDEX_URL", "FIND_LINKS", "TRUSTED_HOST")):
            found |= {Needle(f"{name} of the building machine", part.encode()) for part in _private(value)}
    for path in pip_files:
        found |= {Needle("pip's settings of the building machine", v.encode()) for v in _settings(path)}
    return sorted(found, key=lambda needle: needle.kind)


def default_needles(root: Path) -> list[Needle]:
    """`needles` of this process's own machine; `root` is the project's folder."""
    home = Path.home()
    files = (Path("/etc/pip.conf"), home / ".config/pip/pip.conf", home / ".pip/pip.conf")
    folders = [root.resolve()] + ([home] if str(home) not in ("/", "/root") else [])
    return needles(os.environ, [*files, *Path("/etc/xdg/pip").glob("pip.conf")], folders)


def _settings(path: Path) -> Iterator[str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):
        return
    for section in parser.sections():
        for key, value in parser.items(section):
            if key in _KEYS:
                yield from _private(value)


def _private(value: str) -> Iterator[str]:
    """The parts of a setting that belong to this machine: hosts and folders nobody else has."""
    for part in value.split():
        host = re.sub(r"^[a-z+]+://", "", part).partition("@")
        shown = (host[2] or host[0]).split("/")[0] if "://" in part and not part.startswith("file:") else part
        if len(shown) >= 6 and not shown.endswith(_PUBLIC) and shown not in _WELL_KNOWN:
            yield shown.removeprefix("file://")


def in_config(
    attributes: Mapping[str, Any], history: Iterable[Mapping[str, Any]], sought: list[Needle]
) -> list[Leak]:
    """Needles in an image's configuration (env, labels, command) and history."""
    config = repr(attributes.get("Config")).encode()
    found = [Leak(needle.kind, "config") for needle in sought if needle.value in config]
    for entry in history:
        text = repr(entry.get("CreatedBy")).encode()
        found += [Leak(needle.kind, "history") for needle in sought if needle.value in text]
    return found


def in_layers(saved: IO[bytes], sought: list[Needle], skip: int = 0) -> list[Leak]:
    """Needles in the files of a `docker save` stream, apart from its `skip` lowest layers (the base's).

    Layers are searched as they come; which of them are the base's stands in manifest.json, which comes last,
    so what was found is kept by layer until then. Raises tarfile.TarError for what is no such stream.
    """
    if not sought:
        return []
    by_layer: dict[str, list[Leak]] = {}
    order: list[str] = []
    with tarfile.open(fileobj=saved, mode="r|*") as outer:
        for member in outer:
            file = outer.extractfile(member) if member.isfile() else None
            if file is None:
                continue
            if member.name == "manifest.json":
                order = json.load(file)[0]["Layers"]
            elif member.name.endswith("layer.tar") or member.name.startswith("blobs/"):
                by_layer[member.name] = list(_in_layer(file, sought))
    base = set(order[:skip])
    return [leak for name in order if name not in base for leak in by_layer.get(name, ())]


def _in_layer(layer: IO[bytes], sought: list[Needle]) -> Iterator[Leak]:
    try:
        with tarfile.open(fileobj=layer, mode="r|*") as inner:
            for member in inner:
                file = inner.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield from _in_file(file, member.name, sought)
    except tarfile.ReadError:
        return  # an image's config is a blob too, and no archive


def _in_file(file: IO[bytes], name: str, sought: list[Needle]) -> Iterator[Leak]:
    left = set(sought)
    overlap = max(len(needle.value) for needle in sought) - 1
    before = b""
    while left and (chunk := file.read(_CHUNK)):
        window = before + chunk
        hits = {needle for needle in left if needle.value in window}
        yield from (Leak(needle.kind, f"/{name}") for needle in hits)
        left -= hits
        before = window[-overlap:] if overlap else b""
