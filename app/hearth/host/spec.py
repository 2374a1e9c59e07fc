"""What a release says about its container: the part of `release.json` that the launcher reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hearth.config_explain import Says
from hearth.config_types import EnvName, EnvValue, Port

OWN = "io.hearth"
"""Prefix of Hearth's labels on images and containers."""
CONFIG_TARGET = "/etc/hearth/hearth.yaml"
SECRETS_TARGET = "/run/secrets"
"""Where the container finds its secrets: one file each, named as the unit's credential."""
USER_ID = 10001
"""The image's user."""
_TAKEN = (CONFIG_TARGET, SECRETS_TARGET)


def _absolute(value: Path) -> Path:
    if not value.is_absolute() or ".." in value.parts:
        raise ValueError(f"not an absolute path without '..': {value}: write the whole path")
    return value


def _size(value: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]{0,15}[bkmg]?", value.lower()):
        raise ValueError(f"not a size: {value[:40]!r}: write a number with b, k, m or g, e.g. 32g")
    return value.lower()


Absolute = Annotated[Path, AfterValidator(_absolute), Says("an absolute path")]
Size = Annotated[str, AfterValidator(_size), Says("a size such as 32g")]
Limit = Annotated[int, Field(ge=-1), Says("a whole number, -1 for no limit")]


class Part(BaseModel):
    """Base of every part of `release.json`: unknown keys are errors, values can't change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Bind(Part):
    """A folder or file of the host that the container sees."""

    source: Absolute
    """Path on the host. It must exist: Docker's habit of making an empty folder there is switched off."""
    target: Absolute
    """Path in the container."""
    read_only: bool = True
    """Whether the container may only read it."""

    @model_validator(mode="after")
    def _free(self) -> Bind:
        if str(self.target) in _TAKEN:
            raise ValueError(f"{self.target} is mounted by Hearth itself: choose another target")
        return self


class Published(Part):
    """A port of the container that the host answers on."""

    container: Port
    """Port in the container."""
    host: Port
    """Port on the host."""
    address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the host that is listened on; 0.0.0.0 for all of them."""

    @property
    def reach(self) -> str:
        """HOST:PORT at which a process on this host reaches it."""
        every = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        address = every.get(self.address, self.address)
        return f"[{address}]:{self.host}" if ":" in address else f"{address}:{self.host}"


def _ulimits() -> dict[str, int]:
    return {"memlock": -1, "stack": 64 << 20, "nofile": 1 << 20}


def _tmpfs() -> dict[str, str]:
    owned = f"mode=0750,uid={USER_ID},gid={USER_ID}"
    return {"/tmp": "size=8g,mode=1777", "/run/hearth": f"size=256m,{owned}"}


class ContainerSpec(Part):
    """How the container runs. What isn't here can't be chosen: read-only root, no capabilities, ..."""

    gpus: Literal["all", "none"] = "all"
    """Which GPUs it gets."""
    shm: Size = "32g"
    """Size of /dev/shm."""
    ulimits: dict[str, Limit] = Field(default_factory=_ulimits)
    """Soft and hard limit by name (memlock and stack in bytes)."""
    tmpfs: dict[str, str] = Field(default_factory=_tmpfs)
    """Memory-backed folders with their mount options."""
    memory: Size | None = None
    """Most memory that the container may use; null for no limit."""
    binds: list[Bind] = Field(default_factory=list)
    """Folders of the host, besides the config and the secrets, which Hearth mounts itself."""
    ports: list[Published] = Field(default_factory=list)
    """Published ports; the engine's and the supervisor's must be among them."""
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    """More variables. Secrets are refused: they come as files."""

    @model_validator(mode="after")
    def _once(self) -> ContainerSpec:
        targets = [str(bind.target) for bind in self.binds] + list(self.tmpfs)
        places = [f"{port.address}:{port.host}" for port in self.ports]
        for what, names in (("target", targets), ("host port", places)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]} is used twice: remove one")
        return self

    def published(self, port: int) -> Published | None:
        """Where the container's `port` is published, if it is."""
        return next((each for each in self.ports if each.container == port), None)

    def on_host(self, inside: Path) -> Path | None:
        """Where the container's path `inside` lies on the host, if a folder that holds it is bound."""
        for bind in sorted(self.binds, key=lambda bind: len(str(bind.target)), reverse=True):
            if inside.is_relative_to(bind.target):
                return Path(bind.source) / inside.relative_to(bind.target)
        return None
