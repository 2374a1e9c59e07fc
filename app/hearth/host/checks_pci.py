"""Verdicts on the PCIe bus: links, ACS and the IOMMU, which decide whether cards reach each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hearth.host.checks_base import (
    GPU_NONE,
    NOTHING,
    Check,
    Facts,
    Wanted,
    failed,
    listed,
    passed,
    skipped,
    warned,
)

_IDS = ("pci.gpus", "pci.link", "pci.acs", "host.iommu")
_HEAD = re.compile(r"^((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:\n]{1,100}): (.{0,300})", re.M)
_GPU_CLASSES = ("VGA compatible controller", "3D controller", "Display controller")
_NO_ACS = (
    "set ACS off in the BIOS, or `setpci -s BRIDGE ECAP_ACS+6.w=0000` for each bridge at boot (host_tuning)"
)
_NO_IOMMU = "add `iommu=pt` to the kernel command line (or switch the IOMMU off in the BIOS) and reboot"


@dataclass(frozen=True)
class Device:
    """One device of `lspci -D -vv`."""

    slot: str
    kind: str
    name: str
    body: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU of NVIDIA's."""
        return self.kind.startswith(_GPU_CLASSES) and "NVIDIA" in self.name

    @property
    def lost(self) -> bool:
        """Whether reads from it return ones. lspci may still know the maker from the kernel's list."""
        known = "NVIDIA" in self.name or "Illegal Vendor ID" in self.name
        return known and "(rev ff)" in self.name

    @property
    def hidden(self) -> bool:
        """Whether lspci was not allowed to read its capabilities."""
        return "<access denied>" in self.body


def devices(text: str) -> list[Device]:
    """The devices of an `lspci -D -vv`; empty for any other text. Never raises."""
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return [
        Device(head[1], head[2], head[3], text[head.end() : end])
        for head, end in zip(heads, ends, strict=False)
    ]


def judge(facts: Facts, wanted: Wanted) -> list[Check]:
    """All verdicts on the bus."""
    if wanted.gpus == 0:
        return [skipped(name, GPU_NONE) for name in _IDS]
    output = facts.get("lspci", NOTHING)
    found = devices(output.text)
    if not output.there or not found:
        why = f"lspci: {output.problem or 'printed no device'}"
        blind = [skipped(name, why, "apt install pciutils") for name in _IDS[:3]]
        return [*blind, _iommu(facts, redirecting=())]
    redirecting = tuple(_redirecting(found))
    return [_gpus(found, wanted), _links(found), _acs(found, redirecting), _iommu(facts, redirecting)]


def _gpus(found: list[Device], wanted: Wanted) -> Check:
    gpus = [device for device in found if device.is_gpu]
    lost = [device.slot for device in found if device.lost]
    if lost:
        return failed(
            "pci.gpus",
            f"no answer from {listed(lost)} (rev ff)",
            "the card has fallen off the bus: reads from it return ones",
            "power the machine off and on; if it comes again, check riser, power cable and seat",
        )
    if len(gpus) < wanted.gpus:
        return failed(
            "pci.gpus",
            f"{len(gpus)} of {wanted.gpus} on the bus: {listed(d.slot for d in gpus) or 'none'}",
            "a card that the bus doesn't show isn't powered, seated, or has its slot switched off",
            "check seat, power cables and the BIOS (slot enabled, Above 4G decoding on)",
        )
    return passed("pci.gpus", f"{len(gpus)} on the bus")


def _links(found: list[Device]) -> Check:
    gpus = [device for device in found if device.is_gpu]
    widths = {device.slot: _width(device.body) for device in gpus}
    narrow = [
        f"{slot}: {seen} of {can}"
        for slot, pair in widths.items()
        if pair
        for seen, can in [pair]
        if seen != can
    ]
    if narrow:
        return warned(
            "pci.link",
            listed(narrow),
            "the card has fewer lanes than it could: slower loading and all-reduce, for all cards",
            "reseat the card or its riser; look at the slot's lanes and bifurcation in the BIOS",
        )
    if not any(widths.values()):
        return _hidden("pci.link", gpus)
    return passed("pci.link", f"{sum(map(bool, widths.values()))} GPUs with all their lanes")


def _width(body: str) -> tuple[str, str] | None:
    """(lanes in use, lanes of the card). The speed is no sign: an idle card lowers it."""
    can = re.search(r"LnkCap:[^\n]{0,200}?Width (x\d{1,2})", body)
    now = re.search(r"LnkSta:[^\n]{0,200}?Width (x\d{1,2})", body)
    return (now[1], can[1]) if can and now else None


def _redirecting(found: list[Device]) -> Iterator[str]:
    """Bridges that send traffic between cards up to the root complex."""
    for device in found:
        control = re.search(r"ACSCtl:([^\n]{0,200})", device.body)
        if device.kind == "PCI bridge" and control and re.search(r"(ReqRedir|CmpltRedir)\+", control[1]):
            yield device.slot


def _hidden(name: str, found: list[Device]) -> Check:
    if any(device.hidden for device in found):
        return skipped(name, "lspci may not read the devices' capabilities", "run as root")
    return skipped(name, "lspci shows no such capability (a virtual machine, or no -vv)")


def _acs(found: list[Device], redirecting: tuple[str, ...]) -> Check:
    bridges = [device for device in found if device.kind == "PCI bridge"]
    if redirecting:
        return warned(
            "pci.acs",
            f"redirects on {len(redirecting)} of {len(bridges)} bridges: {listed(redirecting, 4)}",
            "traffic between cards goes by the CPU: slower, and with a translating IOMMU NCCL hangs",
            _NO_ACS,
        )
    if any(device.hidden for device in bridges) or not any("ACSCtl" in d.body for d in bridges):
        return _hidden("pci.acs", bridges)
    return passed("pci.acs", "no bridge redirects traffic between cards")


def iommu_mode(cmdline: str, group_types: str) -> str:
    """`off`, `passthrough`, `translated` or `unknown`, from the groups' types, else from the command line."""
    types = set(group_types.split())
    if types & {"DMA", "DMA-FQ"}:
        return "translated"
    if types & {"identity"}:
        return "passthrough"
    words = cmdline.split()
    if "iommu=off" in words or {"amd_iommu=off", "intel_iommu=off"} & set(words):
        return "off"
    if {"iommu=pt", "iommu.passthrough=1"} & set(words):
        return "passthrough"
    if {"intel_iommu=on", "amd_iommu=on", "iommu=force", "iommu=on"} & set(words):
        return "translated"
    return "unknown"


def _iommu(facts: Facts, redirecting: tuple[str, ...]) -> Check:
    groups, cmdline = facts.get("iommu_types", NOTHING), facts.get("cmdline", NOTHING)
    mode = iommu_mode(cmdline.text, groups.text)
    if mode == "unknown" and groups.problem == "no such file":
        return passed("host.iommu", "off: the kernel has no IOMMU groups")
    if mode == "unknown":
        return skipped("host.iommu", "neither the IOMMU groups nor the kernel command line tell")
    if mode != "translated":
        return passed("host.iommu", mode)
    if redirecting:
        return failed(
            "host.iommu",
            "translated, and bridges redirect (ACS)",
            "NCCL's first all-reduce hangs at full utilisation and low power",
            f"{_NO_IOMMU}; {_NO_ACS}",
        )
    return warned(
        "host.iommu",
        "translated",
        "traffic between cards is translated page by page: slow, and NCCL has hung on it with P2P",
        _NO_IOMMU,
    )
