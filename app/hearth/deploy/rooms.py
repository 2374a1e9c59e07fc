"""How much free space a deploy takes on its host, for Ansible's filters. Pure: values in, verdicts out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hearth.host.doctor import DOCKER_ROOT, wanted_for

_ALL = 1_000_000
"""GB: more than any room; a place that has all it will ever hold says this."""


def rooms(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Path, GB and purpose of each place that a deploy fills.

    `said`: gpu, image_from, model_from and model_path of the inventory; with `gb` at 0 or more, that is what
    /var/lib needs, and nothing else is looked at.
    """
    if int(said["gb"]) >= 0:
        return [_room("/var/lib", int(said["gb"]), "preflight_disk_gb")]
    built = said["image_from"] == "build"
    needs = {room.purpose: room for room in wanted_for(None, 0 if said["gpu"] == "none" else None).rooms}
    images = _gb(needs["images"].free)
    image = images // 3  # its build, with all stages and beside the image before, takes three times that
    found = [_room("/var/lib", 5, "Hearth"), _room(DOCKER_ROOT, images if built else image, "images")]
    if built:
        found.append(_room("/var/tmp", image, "the check of the image"))
    if kernels := needs.get("compiled kernels"):
        found.append(_room(kernels.path, _gb(kernels.free), kernels.purpose))
    if said["model_from"] == "fetch" and (weights := needs.get("weights")):
        found.append(_room(said["model_path"], _gb(weights.free), weights.purpose))
    return found


def room_problems(wanted: Sequence[Mapping[str, Any]], said: str) -> list[str]:
    """One line for each file system that is too small.

    `said`: for each path a line `PATH<tab>MB<tab>MB MOUNT`: what it holds already of what it will hold (or
    `all`), and the free space where it lies or will lie.
    """
    needs: dict[str, list[tuple[Mapping[str, Any], int]]] = {}
    free: dict[str, int] = {}
    found = {each[1]: each for each in re.finditer(r"^([^\t\n]+)\t(all|\d+)\t *(\d+) +(\S.*)$", said, re.M)}
    for room in wanted:
        if line := found.get(str(room["path"])):
            held = _ALL if line[2] == "all" else int(line[2]) // 1000
            free[line[4]] = int(line[3]) // 1000
            needs.setdefault(line[4], []).append((room, max(0, int(room["gb"]) - held)))
    return [
        _problem(free[mount], each)
        for mount, each in needs.items()
        if free[mount] < sum(gb for _, gb in each)
    ]


def _problem(free: int, needs: Sequence[tuple[Mapping[str, Any], int]]) -> str:
    asked = [(room, gb) for room, gb in needs if gb]
    paths = " and ".join(str(room["path"]) for room, _ in asked)
    what = ", ".join(f"{room['purpose']} {gb}" for room, gb in asked)
    return (
        f"{free} GB free under {paths}, {sum(gb for _, gb in asked)} GB are needed ({what}): free some "
        "(docker system prune), mount a larger disk there, or set preflight_disk_gb"
    )


def _room(path: str, gb: int, purpose: str) -> dict[str, Any]:
    return {"path": path, "gb": gb, "purpose": purpose}


def _gb(size: int) -> int:
    return size // 10**9
