"""What `hearth doctor` does: ask this host, judge, and on request try the cards together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hearth.config import Config
from hearth.config_types import argument_name
from hearth.host import deep
from hearth.host.checks import judge
from hearth.host.checks_base import GIB, NOTHING, Check, Facts, Output, Room, Wanted, skipped
from hearth.host.checks_gpu import in_use
from hearth.host.checks_runtime import docker_info
from hearth.host.collect import LIMIT, ask_disks, collect
from hearth.host.smi import read

DOCKER_ROOT = "/var/lib/docker"
_MODELS = "/var/lib/hearth/models"
_WITHOUT_GPU = (Room(DOCKER_ROOT, 10 * GIB, "images"),)
_TIMES = (
    ("tp", "tp-size", "tensor-parallel-size"),
    ("pp", "pp-size", "pipeline-parallel-size"),
    ("dp", "dp-size", "data-parallel-size"),
)
"""SGLang's arguments whose product is the number of GPUs, each with its spellings."""


def wanted_for(config: Config | None, gpus: int | None = None, name: str | None = None) -> Wanted:
    """What this host should have: of the config where there is one, else Hearth's own deployment."""
    wanted = Wanted()
    if config is not None:
        count = 0 if config.profile == "cpu" else cards(config.engine.args)
        wanted = replace(wanted, gpus=count, rooms=_rooms(config, wanted.rooms))
    if gpus is not None:
        wanted = replace(wanted, gpus=gpus)
    if name is not None:
        wanted = replace(wanted, gpu_name=name)
    return wanted if wanted.gpus else replace(wanted, rooms=_WITHOUT_GPU)


def cards(args: Mapping[str, Any]) -> int:
    """How many GPUs of this host an engine with these arguments takes."""
    plain = {argument_name(name): value for name, value in args.items()}
    total = 1
    for names in _TIMES:
        if names[0] == "dp" and plain.get("enable-dp-attention"):
            continue
        total *= next((_count(plain[name]) for name in names if name in plain), 1)
    return max(1, total // next((_count(plain[n]) for n in ("nnodes",) if n in plain), 1))


def _count(value: Any) -> int:
    text = str(value)
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 6 else 1


def _rooms(config: Config, rooms: Any) -> tuple[Room, ...]:
    paths = {"weights": str(config.model.path), "compiled kernels": str(config.paths.cache)}
    return tuple(replace(room, path=paths.get(room.purpose, room.path)) for room in rooms)


def _settled(rooms: Any, docker_root: str) -> tuple[Room, ...]:
    """Rooms where they really are, without what is there already."""
    moved = [replace(room, path=docker_root if room.path == DOCKER_ROOT else room.path) for room in rooms]
    return tuple(replace(room, free=max(0, room.free - _present(room))) for room in moved)


def _present(room: Room) -> int:
    """Bytes of weights that are in their folder already (the default one holds several models)."""
    if room.purpose != "weights" or room.path == _MODELS:
        return 0
    folder = Path(room.path)
    complete = (folder / "hearth-weights.json").is_file()
    try:
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    except OSError:
        return 0
    return room.free if complete else sum(sizes)


def gather(wanted: Wanted, limit: float = LIMIT) -> tuple[dict[str, Output], Wanted]:
    """This host's facts, and `wanted` with the rooms where this host keeps them. Raises nothing."""
    facts = collect(limit, wanted.gpus > 0)
    root = docker_info(facts["docker"].text).get("DockerRootDir")
    root = root if isinstance(root, str) and root.startswith("/") else DOCKER_ROOT
    rooms = _settled(wanted.rooms, root)
    facts["disk"] = ask_disks([room.path for room in rooms], limit)
    return facts, replace(wanted, rooms=rooms)


def examine(facts: Facts, wanted: Wanted, python: str | None) -> list[Check]:
    """All verdicts; with `python` (the engine's interpreter) also those of the cards working together."""
    checks = judge(facts, wanted)
    if python is None:
        return checks
    if wanted.gpus == 0:
        return [*checks, skipped(deep.NAME, "gpu: none")]
    if in_use(read(facts.get("nvidia_smi", NOTHING).text)):
        return [*checks, skipped(deep.NAME, "the GPUs are in use: see gpu.memory", "stop the engine first")]
    return [*checks, deep.check(python)]
