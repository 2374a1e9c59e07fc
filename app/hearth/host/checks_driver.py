"""Verdicts on the kernel module: which one it is, whether it fits, and what keeps it from loading."""

from __future__ import annotations

import re

from hearth.host.checks_base import (
    GPU_NONE,
    NOTHING,
    Check,
    Facts,
    Wanted,
    failed,
    passed,
    skipped,
    warned,
)
from hearth.host.smi import read

_IDS = ("driver.module", "driver.mismatch", "driver.nouveau", "driver.secure_boot", "driver.fabricmanager")
_OPEN = (
    "install the open kernel modules from NVIDIA's repository (nvidia-kernel-open-dkms on Debian, "
    "nvidia-dkms-open on Ubuntu) and reboot; `make deploy` does it"
)


def judge(facts: Facts, wanted: Wanted) -> list[Check]:
    """All verdicts on the driver."""
    if wanted.gpus == 0:
        return [skipped(name, GPU_NONE) for name in _IDS]
    return [
        _module(facts, wanted),
        _mismatch(facts),
        _nouveau(facts),
        _secure_boot(facts),
        _fabricmanager(facts),
    ]


def loaded_version(text: str) -> tuple[str, bool] | None:
    """(version, whether it is the open module) of /proc/driver/nvidia/version; None where it isn't that.

    Open: `NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build`; proprietary:
    `NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 ...`.
    """
    match = re.search(
        r"NVRM version:[^\n]{0,200}?Kernel Module[^\n]{0,40}?\s(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)\b", text
    )
    return (match[1], "Open Kernel Module" in match[0]) if match else None


def module_fields(text: str) -> dict[str, str]:
    """`modinfo` output as a mapping; of a repeated field the first."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and re.fullmatch(r"[a-z_0-9]{1,32}", name.strip()):
            fields.setdefault(name.strip(), value.strip())
    return fields


def _module(facts: Facts, wanted: Wanted) -> Check:
    loaded = loaded_version(facts.get("driver_version", NOTHING).text)
    if loaded is not None:
        version, is_open = loaded
        return _kind(f"{version}, loaded", is_open, wanted)
    fields = module_fields(facts.get("modinfo", NOTHING).text)
    if "version" not in fields:
        return failed(
            "driver.module",
            "no NVIDIA kernel module is loaded or installed",
            "without it there is no GPU to use",
            _OPEN,
        )
    is_open = "MIT" in fields.get("license", "")
    kind = "open" if is_open else "proprietary"
    return failed(
        "driver.module",
        f"{fields['version']} ({kind}) is installed for this kernel, and not loaded",
        "without it there is no GPU to use",
        "`modprobe nvidia`, then `dmesg | tail` says what is in its way; after an installation: reboot"
        if is_open
        else _OPEN,
    )


def _kind(seen: str, is_open: bool, wanted: Wanted) -> Check:
    if is_open or not wanted.open_modules:
        return passed("driver.module", f"{seen}, {'open' if is_open else 'proprietary'}")
    return failed(
        "driver.module",
        f"{seen}, proprietary",
        "Blackwell cards (SM120) are driven by the open kernel modules alone",
        _OPEN,
    )


def _mismatch(facts: Facts) -> Check:
    name = "driver.mismatch"
    smi = read(facts.get("nvidia_smi", NOTHING).text)
    loaded = loaded_version(facts.get("driver_version", NOTHING).text)
    on_disk = module_fields(facts.get("modinfo", NOTHING).text).get("version", "")
    mismatch = "Driver/library version mismatch" in smi.complaint
    if loaded is None:
        return skipped(name, "no NVIDIA kernel module is loaded")
    others = {label: v for label, v in (("libraries", smi.driver), ("module on disk", on_disk)) if v}
    wrong = {label: version for label, version in others.items() if version != loaded[0]}
    if mismatch or wrong:
        differ = "".join(f", {label} {version}" for label, version in wrong.items())
        return failed(
            name,
            f"loaded module {loaded[0]}{differ or ', libraries of another version'}",
            "the driver was upgraded under the running kernel: nothing new can use the GPUs",
            "reboot; hold the driver packages so that no unattended upgrade changes them",
        )
    if not others:
        return skipped(name, "only the loaded module could be asked")
    return passed(name, f"{loaded[0]} everywhere ({', '.join(['loaded module', *others])})")


def _nouveau(facts: Facts) -> Check:
    modules = facts.get("modules", NOTHING)
    if not modules.there:
        return skipped("driver.nouveau", f"/proc/modules: {modules.problem}")
    if re.search(r"^(nouveau|nova_core) ", modules.text, re.M):
        return failed(
            "driver.nouveau",
            "nouveau is loaded",
            "it holds the cards, so NVIDIA's module can't",
            "`echo blacklist nouveau >/etc/modprobe.d/nouveau.conf`, `update-initramfs -u`, reboot",
        )
    return passed("driver.nouveau", "not loaded")


def _secure_boot(facts: Facts) -> Check:
    name = "driver.secure_boot"
    state = facts.get("mokutil", NOTHING)
    if loaded_version(facts.get("driver_version", NOTHING).text) is not None:
        return passed(name, "the module is loaded, so it was let in")
    if not state.there:
        return skipped(name, f"mokutil: {state.problem}", "apt install mokutil")
    if "SecureBoot enabled" not in state.text:
        return passed(name, "off")
    signer = module_fields(facts.get("modinfo", NOTHING).text).get("signer", "")
    if not signer:
        return failed(
            name,
            "Secure Boot is on and the module has no signature",
            "the kernel refuses to load it",
            "enrol the key that DKMS signs with (`mokutil --import /var/lib/dkms/mok.pub`, reboot), "
            "or switch Secure Boot off in the BIOS",
        )
    return warned(
        name,
        f"Secure Boot is on, the module is signed by {signer}, and not loaded",
        "a key that isn't enrolled is refused",
        "`mokutil --test-key` tells whether the key is enrolled; `mokutil --import` enrols it",
    )


def _fabricmanager(facts: Facts) -> Check:
    name = "driver.fabricmanager"
    state = facts.get("fabricmanager", NOTHING)
    if not state.there:
        return skipped(name, f"systemctl: {state.problem}")
    switched = any(gpu.fabric for gpu in read(facts.get("nvidia_smi", NOTHING).text).gpus)
    if "failed" in state.text.split() and not switched:
        return warned(
            name,
            "nvidia-fabricmanager has failed",
            "it is for NVSwitch machines; cards on PCIe don't need it, and its failure hides others",
            "`systemctl disable nvidia-fabricmanager`, or remove the package",
        )
    if switched:
        return passed(name, "this machine has an NVSwitch: see gpu.fabric")
    return passed(name, "not needed: no NVSwitch")
