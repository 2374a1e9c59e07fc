"""What to compile and what it takes: the table of modules, an image's list, this machine's room."""

from __future__ import annotations

import functools
import os
from importlib import resources
from pathlib import Path

import psutil
import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hearth.errors import ConfigError
from hearth.kernels.elf import Arch

_GIB = 1 << 30


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Need(_Strict):
    """What compiling one module takes (units in needs.yaml)."""

    generator: str = ""
    gib: float = Field(gt=0)
    cpu_seconds: float | None = Field(default=None, gt=0)
    heavy: int | None = Field(default=None, gt=0)
    source: str


class _Table(_Strict):
    default: Need
    modules: dict[str, Need]


class Wanted(_Strict):
    """One module of an image: its JitSpec name, why the engine needs it, for which FlashInfer versions."""

    name: str = Field(pattern=r"^[A-Za-z0-9_]+$")
    why: str = Field(min_length=1)
    flashinfer: str = ""

    @field_validator("flashinfer")
    @classmethod
    def _specifier(cls, value: str) -> str:
        try:
            SpecifierSet(value)
        except InvalidSpecifier as error:
            raise ValueError(f"{value!r} is no version range such as '>=0.6.6,<0.8'") from error
        return value

    def applies(self, flashinfer_version: str) -> bool:
        """Whether that FlashInfer version has the module (and uses it)."""
        return SpecifierSet(self.flashinfer, prereleases=True).contains(flashinfer_version)


class KernelList(_Strict):
    """`images/kernels-*.yaml`: the modules that one model needs on one kind of GPU."""

    model: str
    archs: tuple[str, ...] = Field(min_length=1)
    modules: tuple[Wanted, ...] = Field(min_length=1)

    @field_validator("archs")
    @classmethod
    def _archs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for arch in value:
            Arch.parse(arch)
        return value


@functools.cache
def _table() -> _Table:
    text = resources.files(__package__).joinpath("needs.yaml").read_text(encoding="utf-8")
    return _Table.model_validate(yaml.safe_load(text))


def need_of(name: str) -> Need:
    """The table's row for a module, or the default row."""
    return _table().modules.get(name, _table().default)


def generators() -> dict[str, str]:
    """Module name to `module:function`, for every module of the table."""
    return {name: need.generator for name, need in _table().modules.items() if need.generator}


def load_list(path: Path) -> KernelList:
    """Read an image's list of modules. Raises ConfigError, which names file, key and what is wrong."""
    try:
        return KernelList.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the top level"
        raise ConfigError(f"{path}: {place}: {first['msg']}") from error


def job_limit(gib: float, *, cores: int, room_gib: float, asked: int | None = None) -> int:
    """How many compile jobs of `gib` each may run at once: at least one, or nothing would ever finish."""
    return max(1, min(asked or cores, int(room_gib // gib)))


def eta_seconds(
    need: Need, jobs: int, steps: int, done: int, total: int | None, elapsed: float
) -> float | None:
    """Seconds left of a module's build, or None where nothing tells.

    `steps` is what a build from nothing has, `done` of `total` what ninja counts now (a resumed build has
    fewer). The table's processor seconds come first, since sources differ a hundredfold; then the rate so
    far.
    """
    if need.cpu_seconds is not None:
        share = 1.0 if total is None else min(1.0, total / steps)
        left = need.cpu_seconds * share / min(jobs, need.heavy or jobs) - elapsed
        if left > 0:
            return left
    return elapsed / done * (total - done) if done and total else None


def machine_cores() -> int:
    """Cores that this process may use: its affinity, and the cgroup's quota rounded down."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroups():
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit() and int(period):
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def machine_room_gib() -> float:
    """Memory that a build can still take, GiB: what is available, or less where a cgroup says so."""
    room = int(psutil.virtual_memory().available)
    for folder in _cgroups():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            room = min(room, max(0, int(limit) - int(used)))
    return room / _GIB


def oom_kills() -> int:
    """Processes that the kernel killed for memory in this process's cgroups since they began."""
    total = 0
    for folder in _cgroups():
        for line in _read(folder / "memory.events").splitlines():
            key, _, value = line.partition(" ")
            total += int(value) if key == "oom_kill" and value.isdigit() else 0
    return total


def _cgroups() -> list[Path]:
    """The version 2 cgroup of this process and its parents; none where the kernel has only version 1."""
    root = Path("/sys/fs/cgroup")
    own = next((line[3:] for line in _read(Path("/proc/self/cgroup")).splitlines() if line[:3] == "0::"), "")
    folder = root / own.lstrip("/")
    return [f for f in (folder, *folder.parents) if f == root or root in f.parents]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
