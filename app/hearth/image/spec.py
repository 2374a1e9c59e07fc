"""The bill of materials of an image: `images/NAME.yaml`, checked to the last key, and its locks.

Values in, values out, apart from reading the files that the YAML names. What must hold between them (engine,
torch, FlashInfer, compiler, graph plan, locks) is checked here, before anything is downloaded.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import Field, ValidationError, field_validator, model_validator

from hearth import yamltext
from hearth.config import Section
from hearth.config_explain import Says, explain
from hearth.engine.dialect import dialect_for
from hearth.errors import ConfigError, HearthError, MissingError
from hearth.image.pins import Lock, installed, read_lock
from hearth.kernels.elf import Arch
from hearth.kernels.needs import load_list

_NAME = r"[a-z0-9][a-z0-9.-]{0,62}"
Version = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+]*$"), Says('a version in quotes, e.g. "0.5.23"')]
Release = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$"), Says('two numbers in quotes, e.g. "13.0"')]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$"), Says("sha256: and 64 hexadecimal digits")]
Words = Annotated[str, Field(min_length=1), Says("text")]


class Base(Section):
    """The image below: what `FROM` gets."""

    image: Annotated[str, Field(pattern=r"^[a-z0-9][\w./:-]*:[\w.-]+$"), Says("NAME:TAG")]
    """Name and tag, e.g. debian:12-slim."""
    digest: Digest | None = None
    """What the tag meant when it was pinned; null until `hearth image lock` reached an image registry."""

    @property
    def reference(self) -> str:
        """NAME:TAG, or NAME:TAG@DIGEST once it is pinned."""
        return f"{self.image}@{self.digest}" if self.digest else self.image


class Engine(Section):
    """The versions that everything else follows."""

    sglang: Version
    torch: Version
    flashinfer: Version
    architecture: str | None = None
    """Hugging Face architecture of the model, where the dialect makes a difference; null for any."""


class Compiler(Section):
    """The CUDA compiler of the build stages; nothing of it reaches the image."""

    lock: Words
    """Its hash-locked packages, relative to the YAML file."""
    release: Release
    """CUDA release of nvcc; must be the one that torch is built for."""


class Module(Section):
    """One kernel library to bake."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$"), Says("a FlashInfer module's name")]
    why: Words


class Kernels(Section):
    """What to compile ahead of time, and for which GPUs."""

    archs: Annotated[list[str], Field(min_length=1)]
    """FlashInfer's spelling: 12.0f and the like."""
    file: str | None = None
    """A file with modules and reasons (images/kernels-*.yaml), relative to this one."""
    modules: list[Module] = Field(default_factory=list)
    """Modules in place of such a file."""

    @model_validator(mode="after")
    def _one_source(self) -> Kernels:
        if bool(self.file) == bool(self.modules):
            raise ValueError("needs either file or modules: write one of them")
        return self

    @field_validator("archs")
    @classmethod
    def _known_archs(cls, value: Any) -> Any:
        for text in value:
            try:
                Arch.parse(text)
            except ValueError as error:
                raise ValueError(f"{error}: write e.g. 12.0f") from error
        return value


class Left(Section):
    """A locked package that is kept out of the image."""

    package: Words
    why: Words


class Differs(Section):
    """A pin that departs from what the SGLang wheel asks for."""

    package: Words
    pin: Version
    why: Words


class LadderOrder(Section):
    """The ways down, per axis, first to last."""

    prefill: list[str]
    decode: list[str]


class GraphDefaults(Section):
    """The plan that the image starts with where a config says nothing else."""

    wanted: Words = "piecewise"
    decode_max_bs: Annotated[int, Field(ge=1)] | None = None
    ladder: LadderOrder


class CpuEngine(Section):
    """What only an image without a GPU needs."""

    torch_lock: Words
    """A CPU build of torch, tried first: PyPI has none, so it comes from pip's find-links, if at all."""
    cuda_libs: Words
    """torch's CUDA libraries: installed only where the CPU build wasn't found."""
    files: Words
    """A folder whose files go into site-packages."""


class Spec(Section):
    """One image."""

    name: Annotated[str, Field(pattern=f"^{_NAME}$"), Says("lower-case letters, digits, dots and dashes")]
    title: Words
    base: Base
    python: Release
    engine: Engine
    requirements: list[str] = Field(default_factory=list)
    """What the lock resolves besides SGLang and Hearth's own requirements."""
    locks: Annotated[list[str], Field(min_length=1)]
    """Hash-locked requirements, relative to this file. The first may belong to others; the last is NAME's."""
    whole: bool = True
    """Whether the locks hold everything that the wheels ask for (then `pip check` must agree)."""
    differs: list[Differs] = Field(default_factory=list)
    without: list[Left] = Field(default_factory=list)
    apt: list[str] = Field(default_factory=list)
    """Debian packages of the run-time stage besides Python and tini."""
    compiler: Compiler
    kernels: Kernels
    graphs: GraphDefaults
    minimum_driver: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+){0,2}$")] | None = None
    """Oldest NVIDIA driver that runs this image; null where it needs no GPU."""
    labels: dict[str, str] = Field(default_factory=dict)
    cpu: CpuEngine | None = None

    @property
    def own_lock(self) -> str:
        """The lock that `hearth image lock` writes."""
        return self.locks[-1]


def find(name: str, images: Path) -> Path:
    """The YAML file of an image. Raises MissingError that names the images there are."""
    path = images / f"{name}.yaml"
    if not re.fullmatch(_NAME, name) or not path.is_file():
        known = ", ".join(sorted(p.stem for p in images.glob("*.yaml") if not p.stem.startswith("kernels-")))
        raise MissingError(f"{path}: no such image", f"there are: {known or 'none'}")
    return path


def load(path: Path) -> Spec:
    """Read a bill of materials, without its locks. Raises ConfigError, a line for each problem."""
    return parse(yamltext.read(path), str(path))


def parse(text: str, name: str) -> Spec:
    """Read the text of a bill of materials; `name` stands for the file in errors. Raises ConfigError."""
    data = yamltext.construct(yamltext.compose(text, name), name)
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(name, e, Spec) for e in error.errors())) from error


def load_whole(path: Path) -> tuple[Spec, tuple[Lock, ...]]:
    """Read a bill of materials and its locks, and check that they fit. Raises ConfigError, MissingError."""
    spec = load(path)
    locks = tuple(read_lock(path.parent / lock) for lock in spec.locks)
    problems = [*problems_of(spec, locks), *_file_problems(spec, path.parent)]
    project = path.parent.parent / "pyproject.toml"
    problems += stale(spec, locks, project.read_text(encoding="utf-8")) if project.is_file() else []
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return spec, locks


def stale(spec: Spec, locks: tuple[Lock, ...], pyproject: str) -> list[str]:
    """Hearth's own requirements, from the text of its pyproject.toml, that the locks don't meet."""
    pins = {name: pin for lock in locks for name, pin in lock.pins.items()}
    asked = map(Requirement, tomllib.loads(pyproject)["project"].get("dependencies", ()))
    return [
        f"locks: hearth asks for {ask}, the locks have {pins.get(canonicalize_name(ask.name), 'none')}: "
        f"`make lock IMAGE={spec.name}`"
        for ask in asked
        if installed(ask.marker, spec.python)
        and not ask.specifier.contains(pins.get(canonicalize_name(ask.name), "0"), prereleases=True)
    ]


def modules_of(spec: Spec, folder: Path) -> tuple[Module, ...]:
    """The kernel modules to bake for this FlashInfer, with the reason for each.

    Raises ConfigError or MissingError for an unusable list.
    """
    if spec.kernels.file is None:
        return tuple(spec.kernels.modules)
    listed = load_list(folder / spec.kernels.file)
    applying = (item for item in listed.modules if item.applies(spec.engine.flashinfer))
    return tuple(Module(name=item.name, why=item.why) for item in applying)


def problems_of(spec: Spec, locks: tuple[Lock, ...]) -> list[str]:
    """What does not fit together, each as `key: what is wrong: what to write`."""
    pins = {name: pin for lock in locks for name, pin in lock.pins.items()}
    return [
        *_twice(locks),
        *_engine_pins(spec, pins),
        *_asked(spec, locks, pins),
        *_unused(spec, locks, pins),
        *_cuda(spec, pins),
        *_graphs(spec),
    ]


def _twice(locks: tuple[Lock, ...]) -> list[str]:
    """Packages that two locks pin differently."""
    seen: dict[str, tuple[str, str]] = {}
    found = []
    for lock in locks:
        for name, pin in lock.pins.items():
            first, where = seen.setdefault(name, (pin, lock.name))
            if first != pin:
                found.append(f"locks: {name} is {first} in {where} and {pin} in {lock.name}: lock them again")
    return found


def _engine_pins(spec: Spec, pins: dict[str, str]) -> list[str]:
    wanted = {"sglang": spec.engine.sglang, "torch": spec.engine.torch, "flashinfer": spec.engine.flashinfer}
    package = {"flashinfer": "flashinfer-python"}
    return [
        f"engine.{key}: {version} here, {pins.get(package.get(key, key), 'nothing')} in the locks: "
        f"make them equal, then `make lock IMAGE={spec.name}`"
        for key, version in wanted.items()
        if pins.get(package.get(key, key)) != version
    ]


def _asked(spec: Spec, locks: tuple[Lock, ...], pins: dict[str, str]) -> list[str]:
    """Pins that depart from the SGLang wheel's own Requires-Dist without being listed under `differs`."""
    asks = [Requirement(text) for lock in locks for text in lock.asks]
    if not asks:
        return [f"locks: none says what sglang asks for: `make lock IMAGE={spec.name}`"]
    allowed = {canonicalize_name(item.package): item.pin for item in spec.differs}
    found = []
    for ask in asks:
        name = canonicalize_name(ask.name)
        if not installed(ask.marker, spec.python) or allowed.get(name, "") == pins.get(name):
            continue
        if name not in pins:
            if spec.whole:
                found.append(f"locks: sglang asks for {ask}, which no lock has: lock again, or whole: false")
        elif not ask.specifier.contains(pins[name], prereleases=True):
            found.append(
                f"locks: {name} is {pins[name]} but sglang {spec.engine.sglang} asks for {ask.specifier}: "
                "follow it, or say why under differs"
            )
    return found


def _unused(spec: Spec, locks: tuple[Lock, ...], pins: dict[str, str]) -> list[str]:
    """`without` and `differs` entries that no longer say anything."""
    found = [
        f"without: {item.package}: not in the locks: remove the entry"
        for item in spec.without
        if canonicalize_name(item.package) not in pins
    ]
    asks = {canonicalize_name(ask.name): ask for lock in locks for ask in map(Requirement, lock.asks)}
    for item in spec.differs:
        ask = asks.get(canonicalize_name(item.package))
        if ask is None or ask.specifier.contains(item.pin, prereleases=True):
            found.append(f"differs: {item.package}: {item.pin} is what sglang asks for: remove the entry")
        elif pins.get(canonicalize_name(item.package)) != item.pin:
            found.append(f"differs: {item.package}: the locks have another version: `make lock`")
    return found


def _cuda(spec: Spec, pins: dict[str, str]) -> list[str]:
    """The compiler's CUDA must be torch's: FlashInfer builds against torch's runtime libraries."""
    runtime = pins.get("nvidia-cuda-runtime")
    if spec.cpu is not None or runtime is None or runtime.startswith(spec.compiler.release + "."):
        return []
    return [
        f"compiler.release: {spec.compiler.release}, but torch {spec.engine.torch} runs on CUDA {runtime}: "
        "take a compiler of the same release"
    ]


def _graphs(spec: Spec) -> list[str]:
    try:
        dialect = dialect_for(spec.engine.sglang, spec.engine.architecture)
        plan = dialect.resolve(spec.graphs.wanted, spec.graphs.decode_max_bs)
    except HearthError as error:
        return [f"graphs.wanted: {error}"]
    ladder = dialect.ladder(plan)
    return [
        f"graphs.ladder.{axis}: not SGLang {spec.engine.sglang}'s order: write [{', '.join(right)}]"
        for axis, right, given in (
            ("prefill", ladder.prefill, spec.graphs.ladder.prefill),
            ("decode", ladder.decode, spec.graphs.ladder.decode),
        )
        if tuple(given) != right
    ]


def _file_problems(spec: Spec, folder: Path) -> list[str]:
    """Problems of the files that the YAML names besides its locks."""
    files = {"compiler.lock": spec.compiler.lock}
    if spec.cpu is not None:
        files |= {"cpu.torch_lock": spec.cpu.torch_lock, "cpu.cuda_libs": spec.cpu.cuda_libs}
    found = []
    for key, name in files.items():
        try:
            read_lock(folder / name)
        except HearthError as error:
            found.append(f"{key}: {error}")
    if spec.cpu is not None and not (folder / spec.cpu.files).is_dir():
        found.append(f"cpu.files: {spec.cpu.files}: no such folder")
    try:
        if not modules_of(spec, folder):
            found.append(f"kernels.file: nothing in it is for FlashInfer {spec.engine.flashinfer}")
    except HearthError as error:
        found.append(f"kernels.file: {error}")
    return found
