"""Verdicts on Docker and NVIDIA's container toolkit."""

from __future__ import annotations

import json
import re
from typing import Any

from hearth.host.checks_base import (
    GPU_NONE,
    NOTHING,
    Check,
    Facts,
    Output,
    Wanted,
    failed,
    listed,
    passed,
    skipped,
    version_key,
    warned,
)

DOCKER_MIN = "24.0"
"""Older ones are out of support; CDI needs 25 (or `features.cdi` before 28.2)."""
BAD_TOOLKITS = {"1.19.1", "1.20.0"}
"""Unresolvable CDI devices: nvidia-container-toolkit#1967; 1.19.0 is good."""
_IDS = ("runtime.toolkit", "runtime.cdi", "runtime.dev_char")
NVIDIA_MAJOR = "195"
"""Major number of /dev/nvidia0, 1, ... and /dev/nvidiactl (Linux's list of allocated devices)."""


def judge(facts: Facts, wanted: Wanted) -> list[Check]:
    """All verdicts on the container runtime."""
    if facts.get("container", NOTHING).there and facts.get("docker", NOTHING).problem == "not installed":
        return [skipped(name, "inside a container: ask the host") for name in ("runtime.docker", *_IDS)]
    info = docker_info(facts.get("docker", NOTHING).text)
    docker = _docker(facts.get("docker", NOTHING), info)
    if wanted.gpus == 0:
        return [docker, *(skipped(name, GPU_NONE) for name in _IDS)]
    return [
        docker,
        _toolkit(facts.get("nvidia_ctk", NOTHING), info),
        _cdi(facts, info),
        _dev_char(facts, info),
    ]


def docker_info(text: str) -> dict[str, Any]:
    """The object that `docker info --format '{{json .}}'` printed, or an empty one. Never raises."""
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            return found if isinstance(found, dict) else {}
    return {}


def _str(info: dict[str, Any], key: str) -> str:
    value = info.get(key)
    return value if isinstance(value, str) else ""


def _list(info: dict[str, Any], key: str) -> list[Any]:
    value = info.get(key)
    return value if isinstance(value, list) else []


def _docker(output: Output, info: dict[str, Any]) -> Check:
    name, why = "runtime.docker", "the engine runs in a container"
    if not output.there:
        return failed(
            name, f"docker: {output.problem}", why, "install Docker Engine (role container_runtime)"
        )
    version = _str(info, "ServerVersion")
    if not version:
        said = [line for line in output.text.splitlines() if line and not line.startswith("{")]
        errors = listed([*_list(info, "ServerErrors"), *said])
        if "permission denied" in errors:
            return skipped(
                name, "this user may not ask Docker", "run as root or as a member of the docker group"
            )
        fix = "`systemctl enable --now docker`"
        return failed(name, errors or "docker info printed nothing", why, fix)
    if version_key(version.partition("-")[0]) < version_key(DOCKER_MIN):
        return warned(name, f"Docker {version}", "out of support", f"upgrade to {DOCKER_MIN} or newer")
    if _str(info, "LoggingDriver") == "json-file":
        return passed(name, f"Docker {version}, logs to json-file: Hearth limits them for its own container")
    return passed(name, f"Docker {version}, logs to {_str(info, 'LoggingDriver') or 'an unknown driver'}")


def _toolkit(output: Output, info: dict[str, Any]) -> Check:
    name = "runtime.toolkit"
    if not output.there:
        return failed(
            name,
            f"nvidia-ctk: {output.problem}",
            "containers get their GPUs through it",
            "install nvidia-container-toolkit, pinned and held (role container_runtime)",
        )
    match = re.search(r"version (\d{1,3}\.\d{1,3}\.\d{1,3})", output.text)
    version = match[1] if match else ""
    if version in BAD_TOOLKITS:
        return warned(
            name,
            f"nvidia-container-toolkit {version}",
            "this version fails to resolve CDI devices (nvidia-container-toolkit#1967)",
            "install 1.19.0 and hold it",
        )
    runtimes = info.get("Runtimes")
    hooked = isinstance(runtimes, dict) and "nvidia" in runtimes
    seen = f"nvidia-container-toolkit {version or 'of unknown version'}"
    if _str(info, "ServerVersion") and not hooked and not _list(info, "CDISpecDirs"):
        return failed(
            name,
            f"{seen}, unknown to Docker",
            "Docker has neither the nvidia runtime nor CDI: --gpus fails",
            "`nvidia-ctk runtime configure --runtime=docker`, then `systemctl restart docker`",
        )
    return passed(name, seen)


def _cdi(facts: Facts, info: dict[str, Any]) -> Check:
    name, output = "runtime.cdi", facts.get("cdi", NOTHING)
    if not output.there:
        return skipped(name, f"nvidia-ctk: {output.problem}")
    devices = re.findall(r"^nvidia\.com/gpu=(\S{1,80})", output.text, re.M)
    if devices and _list(info, "CDISpecDirs"):
        return passed(name, f"devices {listed(devices, 4)}")
    if devices:
        return warned(
            name,
            "devices are described, and Docker doesn't read them",
            "CDI hands over device nodes that a daemon-reload can't take away",
            '`{"features": {"cdi": true}}` in /etc/docker/daemon.json (Docker 25 or newer), restart docker',
        )
    return warned(
        name,
        "no device is described",
        "CDI hands over device nodes that a daemon-reload can't take away",
        "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`, again after each driver upgrade",
    )


def _dev_char(facts: Facts, info: dict[str, Any]) -> Check:
    """With systemd as cgroup manager a unit allows devices by /dev/char/MAJOR:MINOR: without the links it
    forgets them at the next daemon-reload, and a running container loses its GPUs (toolkit#48)."""
    name, output = "runtime.dev_char", facts.get("dev_char", NOTHING)
    if not output.there:
        return skipped(name, f"/dev/char: {output.problem}")
    links = re.findall(rf"^({NVIDIA_MAJOR}:\d{{1,3}}) \S{{0,40}}nvidia", output.text, re.M)
    if links:
        return passed(name, f"{len(links)} links to NVIDIA's devices")
    if _str(info, "CgroupDriver") == "cgroupfs":
        return passed(name, "none, and not needed: Docker manages cgroups itself (cgroupfs)")
    verdict = failed if _str(info, "CgroupDriver") else warned
    return verdict(
        name,
        "no link to NVIDIA's devices",
        "any `systemctl daemon-reload` (package installations do it) takes the GPUs from a container",
        "`nvidia-ctk system create-dev-char-symlinks --create-all` at boot (role container_runtime)",
    )
