"""`kernels.json`: what was baked, and whether what lies on disk is still that and runs here.

FlashInfer looks a library up by name alone and loads whatever it finds; a wrong one isn't noticed before
its first launch, and under CUDA-graph capture not even then. So each library is checked before any weight
is loaded: there, whole, unchanged, with machine code for this GPU, built against the installed versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hearth.errors import MissingError
from hearth.failure import Failure, FailureKind, Phase
from hearth.kernels.elf import Arch, KernelFileError, read_archs

NAME = "kernels.json"
_MAX_BYTES = 16 << 20
_HINT = "bake it again for this image and GPU: hearth bake"
_PACKAGES = {"flashinfer": "flashinfer-python", "tvm_ffi": "apache-tvm-ffi", "torch": "torch"}


class ManifestError(MissingError):
    """A manifest that is absent, half-written or not one of ours."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Library(_Strict):
    """One baked library.

    `size` in bytes; `archs` as read from its machine code; `built_with` package: version.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_]+$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(gt=0)
    archs: tuple[str, ...]
    built_with: dict[str, str]
    flags: tuple[str, ...]

    @model_validator(mode="after")
    def _archs(self) -> Library:
        for arch in self.archs:
            Arch.parse(arch)
        return self


class Manifest(_Strict):
    """The whole file. Libraries are sorted by name, each name once."""

    schema_version: Literal[1] = 1
    libraries: tuple[Library, ...]

    @model_validator(mode="after")
    def _unique(self) -> Manifest:
        names = [library.name for library in self.libraries]
        if len(set(names)) != len(names):
            raise ValueError("a library is listed twice")
        return self

    def merged(self, newer: tuple[Library, ...]) -> Manifest:
        """This manifest with `newer` libraries added or replaced."""
        by_name = {library.name: library for library in (*self.libraries, *newer)}
        return Manifest(libraries=tuple(by_name[name] for name in sorted(by_name)))


@dataclass(frozen=True)
class Checked:
    """One library after the check; `sha256` and `archs` are the file's own, None and () if unreadable."""

    name: str
    sha256: str | None
    archs: tuple[str, ...]
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """The shape of `hearth kernels verify --json`."""
        return {"name": self.name, "sha256": self.sha256, "archs": list(self.archs), "problem": self.problem}


@dataclass(frozen=True)
class Report:
    """The answer of `verify`. `manifest_problem` is set where the manifest itself can't be used."""

    libraries: tuple[Checked, ...]
    manifest_problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every library of a readable manifest is right."""
        return not self.failures

    @property
    def failures(self) -> tuple[Failure, ...]:
        """One `missing_artifact` for each problem."""
        problems = [] if self.manifest_problem is None else [self.manifest_problem]
        problems += [f"{item.name}: {item.problem}" for item in self.libraries if item.problem]
        return tuple(_failure(problem) for problem in problems)

    def to_json(self) -> dict[str, Any]:
        """The shape of `hearth kernels verify --json`."""
        return {
            "ok": self.ok,
            "libraries": [item.to_json() for item in self.libraries],
            "failures": [failure.to_json() for failure in self.failures],
        }


def _failure(problem: str) -> Failure:
    return Failure(
        FailureKind.MISSING_ARTIFACT, Phase.SPAWN, evidence=(problem,), hint=_HINT, source="kernels-manifest"
    )


def library_path(directory: Path, name: str) -> Path:
    """Where FlashInfer looks for a library below its AOT folder."""
    return directory / name / f"{name}.so"


def describe(path: Path, name: str, built_with: Mapping[str, str], flags: tuple[str, ...]) -> Library:
    """The manifest entry of a library file. Raises KernelFileError."""
    try:
        size, digest = path.stat().st_size, sha256_of(path)
    except OSError as error:
        raise KernelFileError(f"{path}: can't be read: {error.strerror or error}") from error
    archs = read_archs(path)
    return Library(name=name, sha256=digest, size=size, archs=archs, built_with=dict(built_with), flags=flags)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(path: Path) -> Manifest:
    """Read a manifest. Raises ManifestError, which names the file and what is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}", _HINT) from error
    if len(data) > _MAX_BYTES:
        raise ManifestError(f"{path}: larger than any kernel manifest", _HINT)
    try:
        return Manifest.model_validate(json.loads(data))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the top level"
        raise ManifestError(f"{path}: {place}: {first['msg']}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: not whole JSON: {str(error)[:120]}", _HINT) from error


def save(path: Path, manifest: Manifest) -> None:
    """Write the file whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(manifest.model_dump(), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def verify(
    manifest: Path,
    directory: Path,
    device_arch: tuple[int, int] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Report:
    """Check each library that `manifest` lists below `directory`.

    `device_arch` is the GPU's compute capability, `versions` the installed packages
    (`installed_versions()`); each is left out of the check where None. Never raises: an unusable manifest
    is a problem like any other.
    """
    try:
        listed = load(manifest).libraries
    except ManifestError as error:
        return Report((), str(error))
    if not listed:
        return Report((), f"{manifest}: lists no library")
    checked = [_check(library, directory, device_arch, versions or {}) for library in listed]
    return Report((*checked, *_strangers(directory, {library.name for library in listed})))


def _check(
    library: Library, directory: Path, device: tuple[int, int] | None, versions: Mapping[str, str]
) -> Checked:
    path = library_path(directory, library.name)
    try:
        found = describe(path, library.name, library.built_with, library.flags)
    except KernelFileError as error:
        return Checked(library.name, None, (), _damage(path, library, error))
    problem = _changed(library, found) or _wrong_arch(found, device) or _skew(library, versions)
    return Checked(library.name, found.sha256, found.archs, problem)


def _damage(path: Path, library: Library, error: KernelFileError) -> str:
    """Missing, cut short, or unreadable, in that order."""
    if not path.exists():
        return f"missing: no {path}"
    size = path.stat().st_size
    if size < library.size:
        return f"truncated: {size} of {library.size} bytes"
    return f"unreadable: {error}"


def _changed(library: Library, found: Library) -> str | None:
    if found.sha256 == library.sha256:
        return None
    if found.archs != library.archs:
        return f"changed: has code for {_names(found.archs)} where {_names(library.archs)} was baked"
    if found.size < library.size:
        return f"truncated: {found.size} of {library.size} bytes"
    return f"changed: sha256 {found.sha256[:12]}… where {library.sha256[:12]}… was baked"


def _wrong_arch(found: Library, device: tuple[int, int] | None) -> str | None:
    if device is None or not found.archs or any(Arch.parse(arch).runs_on(*device) for arch in found.archs):
        return None
    return f"wrong arch: has code for {_names(found.archs)}, this GPU is {device[0]}.{device[1]}"


def _skew(library: Library, versions: Mapping[str, str]) -> str | None:
    """What the library's loader depends on: FlashInfer exactly, tvm-ffi's ABI, CUDA's major version.

    Neither Python nor torch matter: the libraries link libcudart and the tvm-ffi ABI alone.
    """
    for package, parts in (("flashinfer", None), ("tvm_ffi", 2), ("cuda", 1)):
        built, installed = library.built_with.get(package), versions.get(package)
        if built and installed and _head(built, parts) != _head(installed, parts):
            return f"version skew: baked with {package} {built}, installed is {installed}"
    return None


def _head(version: str, parts: int | None) -> str:
    return version if parts is None else ".".join(version.split("+")[0].split(".")[:parts])


def _strangers(directory: Path, known: set[str]) -> list[Checked]:
    """Libraries that FlashInfer would load and nobody baked."""
    names = sorted(path.stem for path in directory.glob("*/*.so") if path.stem == path.parent.name)
    return [Checked(name, None, (), "not in the manifest") for name in names if name not in known]


def _names(archs: tuple[str, ...]) -> str:
    return ", ".join(archs) or "no GPU at all"


def aot_dir() -> Path:
    """`flashinfer/data/aot` of the installed FlashInfer, which isn't imported.

    Raises MissingError without one.
    """
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        raise MissingError("FlashInfer isn't installed in this Python", "say --dir")
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "aot"


def installed_versions() -> dict[str, str]:
    """Installed versions of FlashInfer, tvm-ffi, torch and torch's CUDA; imports none of them."""
    found = {}
    for key, package in _PACKAGES.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = _torch_cuda()
    return {**found, "cuda": cuda} if cuda else found


def _torch_cuda() -> str | None:
    """`torch.version.cuda`, read as text: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / "version.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
        if found:
            return found[1]
    return None
