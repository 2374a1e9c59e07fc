"""Weights on disk: the manifest of what was fetched, and whether the files still are what it says.

Everything here works without a network. The hashes are the hub's own: SHA-256 of large files (LFS), and git's
blob id of small ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hearth.errors import ConfigError, MissingError
from hearth.files import for_everybody, write_whole

MANIFEST = "hearth-weights.json"
_INDEX = "model.safetensors.index.json"
_CHUNK = 4 * 1024 * 1024
_MAX_HEADER = 100 * 1024 * 1024
"""Bytes of a safetensors header: the format's own limit."""
Hex40 = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Progress = Callable[[int], None]


class WeightFile(BaseModel):
    """One file of the repository."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Of a large file; empty for a small one."""
    blob: Annotated[str, Field(pattern=r"^([0-9a-f]{40})?$")] = ""
    """git's id of a small file's content."""

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        parts = PurePosixPath(value).parts
        if not parts or value.startswith("/") or "\\" in value or {"..", "."} & set(parts) or "\0" in value:
            raise ValueError("a path that leads out of the folder")
        return value


class Manifest(BaseModel):
    """What was fetched, from where, and what each file must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    repo: str
    revision: str
    """As it was asked for: a branch, a tag or a commit."""
    commit: Hex40
    fetched_at: str
    files: tuple[WeightFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def load(folder: Path) -> Manifest:
    """The folder's manifest. Raises MissingError without one, ConfigError for one that can't be used."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(
            f"{path}: no such file",
            "fetch the weights with `hearth fetch REPO --to DIR`: files that are there stay",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path}: {place}: {first['msg']}", "remove it and fetch again: good files stay"
        ) from error


def save(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all. Raises OSError."""
    text = manifest.model_dump_json(indent=1) + "\n"
    write_whole(folder / MANIFEST, text.encode(), for_everybody)


def same_sizes(folder: Path, files: Iterable[WeightFile]) -> bool:
    """Whether every file is there with its size: quick, and no proof."""
    return all(size_of(folder / file.path) == file.size for file in files)


def size_of(path: Path) -> int | None:
    """Bytes of a plain file; None where there is none."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def problem(folder: Path, file: WeightFile, progress: Progress = lambda _: None) -> str:
    """What is wrong with a file, or nothing. Reads all of it; `progress` is told of each part's bytes."""
    path = folder / file.path
    size = size_of(path)
    if size is None:
        return "is missing"
    if size != file.size:
        return f"has {size} bytes instead of {file.size}"
    try:
        found = _hash(path, file, progress)
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    wanted = file.sha256 or file.blob
    return (
        "" if found == wanted or not wanted else f"is damaged: its hash is {found[:12]}…, not {wanted[:12]}…"
    )


def _hash(path: Path, file: WeightFile, progress: Progress) -> str:
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(usedforsecurity=False)
    if not file.sha256:
        digest.update(f"blob {file.size}\0".encode())
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def verify(
    folder: Path, files: Sequence[WeightFile], progress: Progress = lambda _: None, jobs: int = 4
) -> dict[str, str]:
    """What is wrong, by path: every hash, and the index against the files. Empty when all is right."""
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        found = pool.map(lambda file: problem(folder, file, progress), files)
        wrong = {file.path: text for file, text in zip(files, found, strict=True) if text}
    return wrong or dict(index_problems(folder))


def index_problems(folder: Path) -> Iterator[tuple[str, str]]:
    """Where the index names a file or a tensor that isn't there."""
    path = folder / _INDEX
    if not path.is_file():
        return
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, set[str]] = {}
        for tensor, name in placed.items():
            by_file.setdefault(str(name), set()).add(str(tensor))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield _INDEX, f"is no index of weights: {type(error).__name__}: {error}"
        return
    for name, tensors in sorted(by_file.items()):
        text = _lacks(folder, name, tensors)
        if text:
            yield name, text


def _lacks(folder: Path, name: str, tensors: set[str]) -> str:
    if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*", name) or ".." in name:
        return "the index names a path that leads out of the folder"
    if size_of(folder / name) is None:
        return "the index names it, and it is missing"
    try:
        there = tensors_of(folder / name)
    except ValueError as error:
        return f"is no safetensors file: {error}"
    missing = sorted(tensors - there)
    return f"lacks {len(missing)} tensors of the index, e.g. {missing[0]}" if missing else ""


def tensors_of(path: Path) -> set[str]:
    """Names of the tensors in a safetensors file, after its length was checked against its header.

    Raises ValueError with what is wrong. Format: github.com/huggingface/safetensors, README.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        size = 8 + length + max(ends, default=0)
    except (OSError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header can't be read ({type(error).__name__})") from error
    if path.stat().st_size != size:
        raise ValueError(f"its header asks for {size} bytes, it has {path.stat().st_size}")
    return set(header) - {"__metadata__"}
