"""What dpkg and apt said about packages, for Ansible's filters. Pure: text in, verdicts out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from hearth.host.checks_driver import loaded_version

_IMAGE, _HEADERS = "linux-image-", "linux-headers-"


def missing(said: str, wanted: Sequence[str]) -> list[str]:
    """Which of `wanted` aren't installed: NAME in any version, or NAME=VERSION, which may end in *.

    `said`: a line `installed WANT NAME=VERSION` for each package, of dpkg-query.
    """
    there = _installed(said)
    return [each for each in wanted if not _is_there(each, there)]


def loose(said: str, held: Sequence[str]) -> list[str]:
    """Which of the names `held` are installed, and not held."""
    there = _installed(said)
    return [name for name in held if name in there and there[name][1] != "hold"]


def not_offered(policy: str, names: Sequence[str]) -> list[str]:
    """The names that apt has nothing to install for, of what `apt-cache policy NAMES` said."""
    return [name for name in names if not _candidates(policy).get(name)]


def same_driver(version: str, wanted: str) -> bool:
    """Whether 590.48.01 is the wanted 590.48.01, or 590."""
    return version == wanted or version.startswith(f"{wanted}.")


def is_driver(text: str, wanted: str) -> bool:
    """Whether /proc/driver/nvidia/version tells of the wanted driver."""
    loaded = loaded_version(text)
    return loaded is not None and same_driver(loaded[0], wanted)


def kernels(said: str, facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """What the running kernel and the one that boots next are called in packages.

    `own`: their headers, the next kernel's first; `image` and `headers`: the packages that follow new
    kernels, as the host has them (linux-image-amd64, linux-image-generic-hwe-22.04).
    """
    own = [_HEADERS + kernel for kernel in dict.fromkeys((_booting(facts), _running(facts)))]
    flavour = re.sub(r"^\d[^-]*-(\d[^-]*-)?", "", _running(facts))
    form = re.compile(rf"{_IMAGE}({re.escape(flavour)}|virtual)(-(hwe|lts)-[\d.]+)?")
    image = [name for name in _installed(said) if form.fullmatch(name)] or [_IMAGE + flavour]
    return {"own": own, "image": image, "headers": [_HEADERS + name.removeprefix(_IMAGE) for name in image]}


def kernel_packages(said: str, known: Mapping[str, list[str]], policy: str) -> list[str]:
    """What DKMS needs to build a module for the kernel that boots next; `known` is what `kernels` gave.

    Its headers, and those of kernels to come; where the archive has them no more, the newest kernel too.
    """
    there, offered = _installed(said), _candidates(policy)
    own = [name for name in known["own"] if name in there or offered.get(name)]
    if known["own"][0] in own:
        return [*own, *known["headers"]]
    follow = [*known["image"], *known["headers"]]
    return [*own, *(f"{name}={offered[name]}" if offered.get(name) else name for name in follow)]


def reboot_problem(facts: Mapping[str, Any], wanted: str) -> str:
    """One line when a reboot wouldn't bring the wanted driver up; empty otherwise."""
    kernel, module = _booting(facts), _text(facts, "module")
    if not same_driver(module, wanted):
        found = f"only {module}" if module else "none"
        return (
            f"kernel {kernel} boots next, and has no NVIDIA module {wanted} ({found}): `dkms status` and "
            f"/var/lib/dkms/nvidia/*/build/make.log say why; its headers are in {_HEADERS}{kernel}"
        )
    since, booted = _number(facts, "since"), _number(facts, "booted")
    if kernel == _running(facts) and 0 < since < booted:
        return (
            f"kernel {kernel} had the NVIDIA module {wanted} already when it booted, and didn't load it: "
            "`dmesg | grep -i nvrm` and `mokutil --sb-state` say why; an old one in the initramfs: "
            "`update-initramfs -u`"
        )
    return ""


def _installed(said: str) -> dict[str, tuple[str, str]]:
    """Version, and what dpkg shall do with it, by name."""
    found = re.finditer(r"^installed (\S+) ([^\s=]+)=(\S+)$", said, re.M)
    return {each[2]: (each[3], each[1]) for each in found}


def _is_there(each: str, there: Mapping[str, tuple[str, str]]) -> bool:
    name, pinned, version = each.partition("=")
    return name in there and (not pinned or fnmatchcase(there[name][0], version))


def _candidates(policy: str) -> dict[str, str]:
    """By name, the version that apt would install; empty for none."""
    found = re.finditer(r"^(\S+):\n(?:  .*\n)*?  Candidate: (\S+)$", policy, re.M)
    return {each[1]: "" if each[2] == "(none)" else each[2] for each in found}


def _text(facts: Mapping[str, Any], name: str) -> str:
    fact = facts.get(name) or {}
    return "" if fact.get("code") else str(fact.get("text", "")).strip()


def _number(facts: Mapping[str, Any], name: str) -> int:
    text = _text(facts, name)
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else 0


def _running(facts: Mapping[str, Any]) -> str:
    return _text(facts, "running")


def _booting(facts: Mapping[str, Any]) -> str:
    """The newest kernel in /boot, which GRUB takes; without one there, the running one."""
    return _text(facts, "booting") or _running(facts)
