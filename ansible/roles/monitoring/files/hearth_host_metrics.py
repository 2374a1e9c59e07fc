#!/usr/bin/env python3
"""Writes what no exporter says about a GPU host, for the node exporter's textfile collector.

    hearth_host_metrics.py DIRECTORY        (writes DIRECTORY/hearth_host.prom; `-` prints)

GPUs on the PCI bus and those the driver shows, replays and width of each PCIe link, why clocks are lowered,
whether the driver wants a GPU reset or the host rebooted, and whether the driver's kernel module and its
library have the same version. Needs nothing but Python; what needs NVML is left out where `pynvml` isn't
installed. Exits with 1, and a line saying why, when the file can't be written.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

# The meanings of NVML's event bits (nvml.h, nvmlClocksEventReason*).
SLOWDOWNS = {
    "power_cap": 0x04,
    "hardware": 0x08,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
# nvmlDeviceGpuRecoveryAction_t: GPU reset, node reboot, drain and reset, bus reset, system reboot; as
# app/hearth/host/nvmlevents.py has them.
RECOVERIES = {1, 2, 4, 6, 7}
NVIDIA, DISPLAY = "0x10de", ("0x0300", "0x0302")
MODULE_VERSION = "sys/module/nvidia/version"
LIBRARY = "libnvidia-ml.so.[0-9]*.*"
LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
)
Sample = tuple[str, dict[str, str], float]

HELP = {
    "hearth_host_metrics_timestamp_seconds": "When this file was written.",
    "hearth_host_gpus_on_bus": "NVIDIA GPUs on the PCI bus.",
    "hearth_host_gpus_visible": "GPUs that the driver shows.",
    "hearth_host_driver_info": "Versions of the driver's kernel module and of its library.",
    "hearth_host_driver_mismatch": "1 if module and library have different versions.",
    "hearth_host_gpu_pcie_replays_total": "Replays on the PCIe link since the driver was loaded.",
    "hearth_host_gpu_pcie_width": "Lanes of the PCIe link.",
    "hearth_host_gpu_pcie_width_max": "Lanes that the PCIe link can have.",
    "hearth_host_gpu_recovery": "1 while the driver says that the GPU needs a reset or the host a reboot.",
    "hearth_host_gpu_slowdown": "1 while clocks are lowered for this reason.",
}


def on_bus(root: Path) -> int:
    """GPUs that the kernel sees on the PCI bus, with or without a driver."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    return sum(_read(d / "vendor") == NVIDIA and _read(d / "class")[:6] in DISPLAY for d in devices)


def driver_versions(root: Path) -> tuple[str, str]:
    """Versions of the loaded kernel module and of the library; "" where there is none."""
    found = (path for folder in LIBRARY_FOLDERS for path in sorted((root / folder).glob(LIBRARY)))
    library = next((path.name for path in found if not path.is_symlink()), "")
    return _read(root / MODULE_VERSION), library.removeprefix("libnvidia-ml.so.")


def host_samples(root: Path, refused: bool) -> Iterator[Sample]:
    """What needs no NVML; `refused`: NVML said that its version isn't the kernel module's."""
    yield "hearth_host_metrics_timestamp_seconds", {}, time.time()
    yield "hearth_host_gpus_on_bus", {}, on_bus(root)
    module, library = driver_versions(root)
    # Prometheus drops a label that is empty.
    yield "hearth_host_driver_info", {"module": module or "none", "library": library or "none"}, 1
    differ = bool(module and library and module != library)
    yield "hearth_host_driver_mismatch", {}, float(differ or refused)


def look() -> tuple[list[Sample], bool]:
    """What NVML says (0 visible GPUs where it can't be reached), and whether it is of another version."""
    try:
        import pynvml
    except ImportError:
        return [], False
    try:
        pynvml.nvmlInit()
        return list(gpu_samples(pynvml.nvmlDeviceGetCount())), False
    except pynvml.NVMLError as error:
        refused = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        return [("hearth_host_gpus_visible", {}, 0)], refused


def gpu_samples(count: int) -> Iterator[Sample]:
    """What NVML says about each of `count` GPUs. One that fell off the bus doesn't hide the others."""
    import pynvml

    handles = [_ask(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    yield "hearth_host_gpus_visible", {}, sum(handle is not None for handle in handles)
    for index, handle in enumerate(handles):
        if handle is not None:
            yield from _one_gpu({"gpu": str(index)}, handle)


def _one_gpu(labels: dict[str, str], handle: object) -> Iterator[Sample]:
    import pynvml

    facts = {
        "hearth_host_gpu_pcie_replays_total": pynvml.nvmlDeviceGetPcieReplayCounter,
        "hearth_host_gpu_pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
        "hearth_host_gpu_pcie_width_max": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
        "hearth_host_gpu_recovery": _must_recover,
    }
    for name, function in facts.items():
        value = _ask(function, handle)
        if value is not None:
            yield name, labels, float(value)
    bits = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if bits is not None:
        for reason, bit in SLOWDOWNS.items():
            yield "hearth_host_gpu_slowdown", {**labels, "reason": reason}, float(bool(bits & bit))


def _must_recover(handle: object) -> bool | None:
    """Whether the driver wants a reset or a reboot; None before R560 and for a pynvml that doesn't know."""
    import pynvml

    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return None
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [field])
    return int(value.value.uiVal) in RECOVERIES if value.nvmlReturn == pynvml.NVML_SUCCESS else None


def _ask(function, argument):  # type: ignore[no-untyped-def]
    """NVML's answer, or None where this card or driver doesn't have it."""
    import pynvml

    try:
        return function(argument)
    except pynvml.NVMLError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def render(samples: list[Sample]) -> str:
    """The text format, each metric's samples together."""
    lines = []
    for name, text in HELP.items():
        mine = [sample for sample in samples if sample[0] == name]
        if mine:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {value}" for _, labels, value in mine]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def write(folder: Path, page: str) -> None:
    """Put the page in place in one step: the node exporter never reads half of it."""
    temporary = folder / ".hearth_host.prom.new"
    temporary.write_text(page, encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(folder / "hearth_host.prom")


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    if len(arguments) != 1:
        print("usage: hearth_host_metrics.py DIRECTORY (or -)", file=sys.stderr)
        return 2
    gpus, refused = look()
    page = render([*host_samples(Path("/"), refused), *gpus])
    if arguments[0] == "-":
        print(page, end="")
        return 0
    try:
        write(Path(arguments[0]), page)
    except OSError as error:
        print(f"hearth host metrics: {arguments[0]}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
