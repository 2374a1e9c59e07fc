"""From what the operator asked to a job: config, package, image and each host's variables."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hearth.config import Config, load
from hearth.deploy import package
from hearth.deploy.draft import draft, model_folder
from hearth.deploy.inventory import Target
from hearth.deploy.release import secret_names
from hearth.deploy.runner import Job, Record
from hearth.errors import CheckFailed, ConfigError, MissingError

DEFAULT_IMAGE = "glm5-nvfp4-sm120"
SOURCES = ("build", "local", "present")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What the command line says; empty means: what the inventory says, then the default."""

    config: Path
    root: Path = Path()
    image: str = ""
    image_from: str = ""
    image_ref: str = ""
    dry: bool = False
    tags: str = ""
    why: str = ""
    secrets: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Wish:
    """One host's image: which, from where, under which name, on which bases."""

    name: str
    source: str
    ref: str
    base: str
    build_base: str

    @property
    def flags(self) -> list[str]:
        """For `hearth image build`."""
        return [f"--base={self.base}", f"--build-base={self.build_base}"]


def read_config(path: Path) -> Config:
    """The deployment config. Raises MissingError or ConfigError."""
    if not path.is_file():
        raise MissingError(
            f"{path}: no such config", "cp hearth.example.yaml hearth.yaml and fit it, or give --config"
        )
    return load(path)


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """NAME=VALUE options. Raises ConfigError."""
    found = dict(word.partition("=")[::2] for word in words)
    wrong = [word for word in words if "=" not in word or not word.partition("=")[0].strip()]
    if wrong:
        raise ConfigError(f"{option} {wrong[0]!r}: not NAME=VALUE", f"write {option} NAME=VALUE")
    return found


def wish(order: Order, target: Target) -> Wish:
    """The image for one host. Raises ConfigError or MissingError."""
    said = target.variables
    name = order.image or str(said.get("image_name", DEFAULT_IMAGE))
    source = order.image_from or str(said.get("image_from", "build"))
    base, build_base = str(said.get("image_base", "")), str(said.get("image_build_base", ""))
    ref = order.image_ref or str(said.get("image_ref", ""))
    if source not in SOURCES:
        raise ConfigError(f"image_from: {source!r}", f"write one of {', '.join(SOURCES)}")
    if source == "present" and not ref:
        raise ConfigError("image_from: present needs image_ref", "name the image: --image-ref NAME:TAG")
    if not ref:
        if not (order.root / "images" / f"{name}.yaml").is_file():
            raise MissingError(
                f"no image {name!r}", "hearth image list shows what there is; run it in the checkout"
            )
        ref = f"hearth/{name}:{package.context_hash(order.root, f'{name} {base} {build_base}')}"
    return Wish(name, source, ref, base, build_base)


def job(order: Order, targets: Sequence[Target], record: Record, say: Say) -> Job:
    """Make ready what is quick on this machine; the rest is the job's `build`.

    Raises HearthError. Touches no host.
    """
    config = read_config(order.config)
    made_by = f"{getpass.getuser()}@{platform.node()}"
    drafts = {target.name: draft(config, target.variables, made_by) for target in targets}
    for target in targets:
        check_secrets(config, _secrets(order, target))
    wishes = {target.name: wish(order, target) for target in targets}
    say("building Hearth's wheel")
    built = package.package(order.root, record.folder)
    missing = _missing_here(wishes.values())
    common = {
        "hearth_wheel": str(built.wheel.resolve()),
        "hearth_lock": str(built.lock.resolve()),
        "hearth_stamp": built.stamp,
        "hearth_config": str(order.config.resolve()),
        "image_context": _context(order, wishes.values(), record),
    }
    ready = [_with(order, t, config, drafts[t.name], wishes[t.name], record) for t in targets]
    build = partial(_build, order, missing, record, say) if missing and not order.dry else None
    return Job("deploy", "site.yml", tuple(ready), common, order.dry, order.tags, build)


def _with(
    order: Order, target: Target, config: Config, said: dict[str, Any], image: Wish, record: Record
) -> Target:
    """A target with what the roles take from us."""
    file = record.folder / f"target-{target.name}.json"
    bare = asdict(replace(target, variables={}))
    file.write_text(json.dumps(bare), encoding="utf-8")
    own = {
        "hearth_draft": said,
        "hearth_secrets": {name: str(path) for name, path in _secrets(order, target).items()},
        "model_path": model_folder(config, target.variables),
        "image_name": image.name,
        "image_from": image.source,
        "image_ref": image.ref,
        "image_target": str(file),
    }
    return replace(target, variables={**target.variables, **own})


def _secrets(order: Order, target: Target) -> dict[str, Path]:
    said = target.variables.get("hearth_secrets") or {}
    return {name: Path(str(path)).expanduser().resolve() for name, path in {**said, **order.secrets}.items()}


def check_secrets(config: Config, given: Mapping[str, Path]) -> None:
    """Every secret that the config reads is given, and is a file. Raises ConfigError or MissingError."""
    for key, name in secret_names(config).items():
        if name not in given:
            raise ConfigError(f"{key}: nothing is given for the secret {name!r}", f"--secret {name}=FILE")
    for name, path in given.items():
        if not path.is_file():
            raise MissingError(f"secret {name}: {path}: no such file", f"--secret {name}=FILE")


def _context(order: Order, wishes: Sequence[Wish] | Any, record: Record) -> str:
    if not any(each.source == "build" for each in wishes):
        return ""
    return str(package.context_archive(order.root, record.folder / "context.tar.gz"))


def _missing_here(wishes: Iterable[Wish]) -> list[Wish]:
    """What is to be shipped and isn't in the Docker Engine here. Raises MissingError without a docker."""
    missing = []
    for each in dict.fromkeys(wish for wish in wishes if wish.source == "local"):
        try:
            if subprocess.run(["docker", "image", "inspect", each.ref], capture_output=True).returncode != 0:
                missing.append(each)
        except FileNotFoundError as error:
            raise MissingError(
                "docker isn't installed here", "apt-get install docker.io, or --image-from build"
            ) from error
    return missing


def _build(order: Order, missing: Sequence[Wish], record: Record, say: Say) -> None:
    """Build images in the Docker Engine here. Raises CheckFailed."""
    for each in missing:
        say(f"building {each.ref} on this machine")
        build = [
            sys.executable,
            "-m",
            "hearth",
            "image",
            "build",
            each.name,
            "--tag",
            each.ref,
            "--root",
            str(order.root),
        ]
        build += ["--logs", str(record.folder / "image"), *each.flags]
        if subprocess.run(build).returncode != 0:
            raise CheckFailed(f"{each.ref} can't be built here", f"see {record.folder}/image")
