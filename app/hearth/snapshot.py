"""What the machine says around a failure: GPUs (NVML), kernel log (dmesg), installed versions."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml

from hearth import __version__

KERNEL_LINES, TELLING_LINES = 200, 100
_PROGRAM_SECONDS = 10.0
_TELLING = re.compile(
    r"NVRM|Xid|nvidia|oom-kill|Out of memory|Killed process|AER:|pcieport|segfault|hung_task|blocked for more"
    r"|I/O error|No space left",
    re.IGNORECASE,
)
_DISTRIBUTIONS = (
    *("sglang", "sgl-kernel", "sglang-kernel", "torch", "triton", "flashinfer-python", "flashinfer-cubin"),
    *("flashinfer-jit-cache", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformers", "hearth"),
)
_ASK_VERSIONS = """
import importlib.metadata as m, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_Question = Callable[[Any], Any]


def gpu_snapshot() -> dict[str, Any]:
    """What NVML says of each GPU; where there is none, why. May hang on a sick GPU: call it aside."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"gpus": [], "problem": f"NVML: {error}"}
    try:
        return {"driver": _said(lambda _: pynvml.nvmlSystemGetDriverVersion(), None), "gpus": _gpus()}
    except pynvml.NVMLError as error:
        return {"gpus": [], "problem": f"NVML: {error}"}
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpus() -> list[dict[str, Any]]:
    return [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _gpu(index: int) -> dict[str, Any]:
    """One GPU's facts; a fact that NVML refuses is its error's text."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return {"index": index, "problem": f"NVML: {error}"}
    return {"index": index, **{name: _said(ask, handle) for name, ask in _QUESTIONS.items()}}


def _said(question: _Question, handle: Any) -> Any:
    try:
        value = question(handle)
    except (pynvml.NVMLError, AttributeError) as error:
        return f"({error})"
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _memory(handle: Any) -> dict[str, int]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {"used": memory.used, "total": memory.total}


def _processes(handle: Any) -> list[dict[str, Any]]:
    found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [{"pid": process.pid, "used": process.usedGpuMemory} for process in found]


def _recovery(handle: Any) -> Any:
    """0 none, 1 GPU reset, 2 reboot, 3 drain P2P, 4 drain and reset (nvmlDeviceGpuRecoveryAction_t)."""
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return value.value.uiVal


_QUESTIONS: dict[str, _Question] = {
    "name": lambda h: pynvml.nvmlDeviceGetName(h),
    "uuid": lambda h: pynvml.nvmlDeviceGetUUID(h),
    "pci_bus_id": lambda h: pynvml.nvmlDeviceGetPciInfo(h).busId,
    "memory_bytes": _memory,
    "processes": _processes,
    "utilization_percent": lambda h: pynvml.nvmlDeviceGetUtilizationRates(h).gpu,
    "temperature_celsius": lambda h: pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),
    "power_watts": lambda h: pynvml.nvmlDeviceGetPowerUsage(h) / 1000,
    "power_limit_watts": lambda h: pynvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
    "sm_clock_mhz": lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
    "throttle_reasons": lambda h: hex(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
    "pcie_generation": lambda h: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_width": lambda h: pynvml.nvmlDeviceGetCurrPcieLinkWidth(h),
    "pcie_replays": lambda h: pynvml.nvmlDeviceGetPcieReplayCounter(h),
    "ecc_uncorrected": lambda h: pynvml.nvmlDeviceGetTotalEccErrors(
        h, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    "recovery_action": _recovery,
}


def kernel_text() -> str:
    """The kernel's last lines, after earlier ones about GPUs, PCIe and memory; or why they can't be read."""
    program = shutil.which("dmesg")
    if program is None:
        return _unreadable("there is no dmesg here")
    try:
        result = subprocess.run(
            [program, "--time-format", "iso"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROGRAM_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _unreadable(str(error))
    if result.returncode:
        return _unreadable(result.stderr.decode("utf-8", "replace").strip())
    return kernel_part(result.stdout.decode("utf-8", "replace").splitlines())


def kernel_part(lines: Sequence[str]) -> str:
    """What of a kernel log is kept."""
    telling = [line for line in lines[:-KERNEL_LINES] if _TELLING.search(line)][-TELLING_LINES:]
    before = ["== earlier lines about GPUs, PCIe, memory and disks", *telling, ""] if telling else []
    return "\n".join([*before, "== the last lines", *lines[-KERNEL_LINES:], ""])


def _unreadable(why: str) -> str:
    return f"The kernel log can't be read here: {why}\nOn the host: journalctl -k\n"


def versions(python: str) -> dict[str, Any]:
    """Versions of Hearth, this system, and what the engine's interpreter has installed; runs that once."""
    return {
        "hearth": __version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "nvidia_kernel_module": _kernel_driver(),
        "engine_environment": _installed(python),
    }


def _installed(python: str) -> dict[str, Any]:
    try:
        result = subprocess.run(
            [python, "-I", "-c", _ASK_VERSIONS, *_DISTRIBUTIONS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROGRAM_SECONDS,
            check=True,
        )
        return dict(json.loads(result.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"problem": f"{python} can't be asked: {error}"[:300]}


def _kernel_driver() -> str | None:
    """The loaded kernel module's own version, which differs from the library's after a half-done upgrade."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError:
        return None
