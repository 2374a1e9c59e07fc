"""Reads `nvidia-smi -q -x`: the same tags since the R450 drivers, so no version is assumed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree as ET

_MAX_TEXT = 8 * 1024 * 1024


@dataclass(frozen=True)
class Holder:
    """A process that holds GPU memory (MiB)."""

    pid: str
    name: str
    mib: float


@dataclass(frozen=True)
class Gpu:
    """One card; empty text or None where the driver doesn't say."""

    index: int
    bus: str
    name: str
    uuid: str
    persistence: str
    mig: str
    ecc: str
    uncorrectable: float
    """ECC errors that could not be corrected, since the driver was loaded."""
    remap_pending: str
    remap_failed: str
    recovery: str
    pstate: str
    link_gen: float | None
    link_gen_max: float | None
    """What the slot and the card can do together."""
    link_gen_card: float | None
    """What the card alone can do."""
    link_width: float | None
    link_width_max: float | None
    used_mib: float
    total_mib: float
    bar1_mib: float | None
    """How much of its memory others on the bus can reach."""
    power_limit: float | None
    power_default: float | None
    fabric: str
    holders: tuple[Holder, ...]

    @property
    def label(self) -> str:
        """How a card is named to a person: `GPU 3 (0000:c1:00.0)`."""
        return f"GPU {self.index} ({short_bus(self.bus)})"


@dataclass(frozen=True)
class Smi:
    """The whole report, or the complaint that came instead."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    complaint: str = ""


def read(text: str) -> Smi:
    """Read the report; text that is none becomes the `complaint`. Never raises."""
    begin, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if begin < 0 or end < begin or len(text) > _MAX_TEXT:
        return Smi(complaint=_complaint(text) or "printed nothing")
    try:
        root = ET.fromstring(text[begin:end] + "</nvidia_smi_log>")
    except (ET.ParseError, ValueError, RecursionError):
        return Smi(complaint="its XML is damaged")
    gpus = tuple(_gpu(index, node) for index, node in enumerate(root.findall("gpu")))
    beside = _complaint(text[:begin].partition("<?xml")[0] + text[end + 17 :])
    return Smi(_text(root, "driver_version"), gpus, beside)


def short_bus(bus: str) -> str:
    """`00000000:C1:00.0` as the kernel writes it: `0000:c1:00.0`."""
    match = re.fullmatch(r"(?:0{4})?([0-9a-fA-F]{4}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])", bus)
    return f"{match[1]}:{match[2]}".lower() if match else bus


def _gpu(index: int, node: ET.Element) -> Gpu:
    link, width = "pci/pci_gpu_link_info/pcie_gen", "pci/pci_gpu_link_info/link_widths"
    power = "gpu_power_readings" if node.find("gpu_power_readings") is not None else "power_readings"
    return Gpu(
        index=index,
        bus=node.get("id", ""),
        name=_text(node, "product_name"),
        uuid=_text(node, "uuid"),
        persistence=_text(node, "persistence_mode"),
        mig=_text(node, "mig_mode/current_mig"),
        ecc=_text(node, "ecc_mode/current_ecc"),
        uncorrectable=_uncorrectable(node),
        remap_pending=_text(node, "remapped_rows/remapped_row_pending"),
        remap_failed=_text(node, "remapped_rows/remapped_row_failure"),
        recovery=_text(node, "gpu_recovery_action"),
        pstate=_text(node, "performance_state"),
        link_gen=_number(_text(node, f"{link}/current_link_gen")),
        link_gen_max=_number(_text(node, f"{link}/max_link_gen")),
        link_gen_card=_number(_text(node, f"{link}/max_device_link_gen")),
        link_width=_number(_text(node, f"{width}/current_link_width")),
        link_width_max=_number(_text(node, f"{width}/max_link_width")),
        used_mib=_number(_text(node, "fb_memory_usage/used")) or 0.0,
        total_mib=_number(_text(node, "fb_memory_usage/total")) or 0.0,
        bar1_mib=_number(_text(node, "bar1_memory_usage/total")),
        power_limit=_number(
            _text(node, f"{power}/current_power_limit") or _text(node, f"{power}/power_limit")
        ),
        power_default=_number(_text(node, f"{power}/default_power_limit")),
        fabric=_text(node, "fabric/state"),
        holders=tuple(_holders(node)),
    )


def _uncorrectable(node: ET.Element) -> float:
    volatile = node.find("ecc_errors/volatile")
    values = [] if volatile is None else [e.text or "" for e in volatile if "uncorrectable" in e.tag]
    return sum(_number(value) or 0.0 for value in values)


def _holders(node: ET.Element) -> Iterator[Holder]:
    for process in node.findall("processes/process_info"):
        mib = _number(_text(process, "used_memory")) or 0.0
        yield Holder(_text(process, "pid"), _text(process, "process_name"), mib)


def _text(node: ET.Element, path: str) -> str:
    value = (node.findtext(path) or "").strip()
    return "" if value in ("N/A", "[N/A]") else value


def _number(text: str) -> float | None:
    match = re.match(r"\s*(\d{1,12}(?:\.\d{1,6})?)", text)
    return float(match[1]) if match else None


def _complaint(text: str) -> str:
    """The first lines that aren't XML."""
    lines = [line.strip() for line in text[:4000].splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("<"))[:400]
