"""Verdicts on the GPUs, from `nvidia-smi -q -x`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    version_key,
    warned,
)
from hearth.host.smi import Gpu, Smi, read, short_bus

TROUBLED_DRIVERS = {"580.126.20", "595.71.05"}
"""Drivers with reports of trouble on this card (voipmonitor/rtx6kpro); 580.159.03 and 590.48.01 have none."""
STRANGER_MIB = 1024
"""More than an idle driver holds of a card."""
_OURS = ("sglang", "hearth")
_IDS = (
    "count",
    "name",
    "version",
    "recovery",
    "memory",
    "ecc",
    "mig",
    "persistence",
    "power",
    "pcie",
    "bar1",
    "fabric",
)

_COMPLAINTS: tuple[tuple[str, str, str], ...] = (
    (
        "Driver/library version mismatch",
        "the loaded kernel module and the libraries are of two versions: an upgrade without reboot",
        "reboot; hold the driver packages so that no unattended upgrade changes them",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "the kernel module isn't loaded",
        "see driver.module below; `modprobe nvidia` says why it can't be loaded",
    ),
    (
        "No devices were found",
        "the driver runs and finds no GPU that it can use",
        "`lspci -d 10de:` shows whether the cards are on the bus; `dmesg | grep NVRM` what is wrong",
    ),
    (
        "handle for",
        "a GPU has fallen off the bus; the others may be hidden behind it",
        "reboot; if it comes again, check the riser, its power and Xid 79 in the kernel log",
    ),
    (
        "Insufficient Permissions",
        "this user may not open /dev/nvidia*",
        "run as root or as a member of the device files' group",
    ),
    (
        "Unknown Error",
        "in a container: its GPUs were taken away (daemon-reload); on a host: the driver is in trouble",
        "in a container make a new one; on a host look for NVRM in the kernel log",
    ),
)
"""What nvidia-smi says instead of a report: part of it, the cause, the fix."""


def judge(facts: Facts, wanted: Wanted) -> list[Check]:
    """All verdicts on the GPUs; one failure for the driver and skips for the rest when it doesn't answer."""
    names = [f"gpu.{name}" for name in _IDS]
    if wanted.gpus == 0:
        return [skipped(name, GPU_NONE) for name in ("gpu.driver", *names)]
    output = facts.get("nvidia_smi", NOTHING)
    if not output.there:
        return [_unasked(output.problem), *_blind(names)]
    smi = read(output.text)
    if not smi.gpus:
        return [_silent(smi), *_blind(names)]
    verdicts = [
        _count, _name, _version, _recovery, _memory, _ecc, _mig, _persistence, _power, _pcie, _bar1, _fabric,
    ]  # fmt: skip
    return [_talks(smi), *(verdict(smi, wanted) for verdict in verdicts)]


def _blind(names: Iterable[str]) -> list[Check]:
    return [skipped(name, "nvidia-smi gave no report: see gpu.driver") for name in names]


def _unasked(problem: str) -> Check:
    fix = "install the NVIDIA driver with its open kernel modules"
    if problem != "not installed":
        fix = "look for NVRM and Xid in the kernel log; a hung nvidia-smi means a hung GPU: reboot"
    return failed(
        "gpu.driver", f"nvidia-smi: {problem}", "without the driver's tools there is no GPU to use", fix
    )


def _silent(smi: Smi) -> Check:
    why, fix = _explain(smi.complaint)
    return failed("gpu.driver", f"nvidia-smi: {smi.complaint or 'an empty report'}", why, fix)


def _explain(complaint: str) -> tuple[str, str]:
    for part, why, fix in _COMPLAINTS:
        if part in complaint:
            return why, fix
    return "nvidia-smi gave no list of GPUs", "run `nvidia-smi -q` and look for NVRM in the kernel log"


def _talks(smi: Smi) -> Check:
    if smi.complaint:
        why, fix = _explain(smi.complaint)
        return failed("gpu.driver", f"nvidia-smi: {smi.complaint}", why, fix)
    return passed("gpu.driver", f"driver {smi.driver or 'unknown'} answers")


def _count(smi: Smi, wanted: Wanted) -> Check:
    seen = f"{len(smi.gpus)} of {wanted.gpus} GPUs"
    if len(smi.gpus) < wanted.gpus:
        return failed(
            "gpu.count",
            f"{seen}: {listed(short_bus(gpu.bus) for gpu in smi.gpus)}",
            "the engine is split over all of them and can't start with fewer",
            "find the missing one: `lspci -d 10de:`, its power cable and riser, Xid 79 in the kernel log; "
            "or set the number of GPUs that this host should have",
        )
    if len(smi.gpus) > wanted.gpus:
        return warned(
            "gpu.count", seen, "the rest stays idle", "set the number of GPUs that this host should have"
        )
    return passed("gpu.count", seen)


def _name(smi: Smi, wanted: Wanted) -> Check:
    other = [gpu for gpu in smi.gpus if wanted.gpu_name.lower() not in gpu.name.lower()]
    if other:
        return failed(
            "gpu.name",
            listed(f"{gpu.label}: {gpu.name or 'no name'}" for gpu in other),
            f"kernels and settings are made for {wanted.gpu_name}; another card computes nothing, or garbage",
            "use the image and the config of this card, and say which card this host has",
        )
    return passed("gpu.name", listed(sorted({gpu.name for gpu in smi.gpus})))


def _version(smi: Smi, wanted: Wanted) -> Check:
    if not smi.driver:
        return skipped("gpu.version", "nvidia-smi doesn't name its driver")
    if version_key(smi.driver) < version_key(wanted.driver_min):
        return failed(
            "gpu.version",
            f"driver {smi.driver}",
            f"the image's CUDA needs {wanted.driver_min} or newer",
            f"install driver {wanted.driver_min} or newer (open kernel modules) and reboot",
        )
    if smi.driver in TROUBLED_DRIVERS:
        return warned(
            "gpu.version",
            f"driver {smi.driver}",
            "hangs were reported with this driver on RTX PRO 6000",
            "install 590.48.01 or 580.159.03",
        )
    return passed("gpu.version", f"driver {smi.driver}, {wanted.driver_min} or newer wanted")


def _recovery(smi: Smi, wanted: Wanted) -> Check:
    sick = [gpu for gpu in smi.gpus if gpu.recovery not in ("", "None")]
    if sick:
        return failed(
            "gpu.recovery",
            listed(f"{gpu.label}: {gpu.recovery}" for gpu in sick),
            "the driver itself says that the card must be recovered before it works again",
            "do what it says (GPU reset: `nvidia-smi --gpu-reset -i N` with nothing running; else reboot)",
        )
    if not any(gpu.recovery for gpu in smi.gpus):
        return skipped("gpu.recovery", "this driver doesn't report a recovery action")
    return passed("gpu.recovery", "no GPU asks for a reset or a reboot")


def in_use(smi: Smi) -> list[Gpu]:
    """The cards whose memory somebody holds."""
    return [gpu for gpu in smi.gpus if gpu.used_mib > STRANGER_MIB or gpu.holders]


def _memory(smi: Smi, wanted: Wanted) -> Check:
    held = in_use(smi)
    holders = [holder for gpu in held for holder in gpu.holders]
    if held and holders and all(any(word in h.name.lower() for word in _OURS) for h in holders):
        return passed("gpu.memory", f"held by the engine: {_who(held)}")
    if held:
        return warned(
            "gpu.memory",
            _who(held),
            "an engine beside another user of the card runs out of memory, and its graph plan gets the blame",
            "stop that process; where none is named, another container or a dying process holds it",
        )
    return passed("gpu.memory", "all free")


def _who(gpus: Sequence[Gpu]) -> str:
    return listed(f"{gpu.label}: {gpu.used_mib:.0f} MiB by {_names(gpu)}" for gpu in gpus)


def _names(gpu: Gpu) -> str:
    return listed((f"{h.name or '?'} (pid {h.pid or '?'})" for h in gpu.holders), 3) or "nobody that shows"


def _ecc(smi: Smi, wanted: Wanted) -> Check:
    broken = [gpu for gpu in smi.gpus if gpu.remap_failed == "Yes"]
    if broken:
        return _ecc_fail(broken, "a memory row could not be replaced", "the card is to be exchanged (RMA)")
    pending = [gpu for gpu in smi.gpus if gpu.uncorrectable > 0 or gpu.remap_pending == "Yes"]
    if pending:
        return _ecc_fail(
            pending,
            "memory errors that could not be corrected",
            "reset the GPU or reboot: rows are then replaced",
        )
    off = [gpu for gpu in smi.gpus if gpu.ecc == "Disabled"]
    if off:
        return warned(
            "gpu.ecc",
            f"off: {listed(gpu.label for gpu in off)}",
            "a flipped bit goes unnoticed into an answer",
            "`nvidia-smi -e 1`, then reboot",
        )
    return passed("gpu.ecc", "on, without uncorrected errors" if smi.gpus[0].ecc else "this card has none")


def _ecc_fail(gpus: Sequence[Gpu], why: str, fix: str) -> Check:
    seen = listed(f"{gpu.label}: {gpu.uncorrectable:.0f} uncorrected" for gpu in gpus)
    return failed("gpu.ecc", seen, why, fix)


def _mig(smi: Smi, wanted: Wanted) -> Check:
    on = [gpu for gpu in smi.gpus if gpu.mig == "Enabled"]
    if on:
        return failed(
            "gpu.mig",
            f"on: {listed(gpu.label for gpu in on)}",
            "a card in slices can't take part in a group of whole cards",
            "`nvidia-smi -mig 0` on each, then reset it or reboot",
        )
    return passed("gpu.mig", "off")


def _persistence(smi: Smi, wanted: Wanted) -> Check:
    off = [gpu for gpu in smi.gpus if gpu.persistence == "Disabled"]
    if off:
        return warned(
            "gpu.persistence",
            f"off: {listed(gpu.label for gpu in off)}",
            "the driver unloads a card's state when nobody uses it: slow starts, and power limits are lost",
            "`systemctl enable --now nvidia-persistenced`",
        )
    return passed("gpu.persistence", "on")


def _power(smi: Smi, wanted: Wanted) -> Check:
    aims = [(gpu, wanted.power_limit or gpu.power_default) for gpu in smi.gpus]
    off = [(gpu, aim) for gpu, aim in aims if aim and gpu.power_limit and abs(gpu.power_limit - aim) > 1.0]
    if off:
        return warned(
            "gpu.power",
            listed(f"{gpu.label}: {gpu.power_limit:g} W, {aim:g} W wanted" for gpu, aim in off),
            "one slower card slows down all; a limit is lost when the driver reloads",
            "`nvidia-smi -pl WATTS` on the host from a unit that runs after nvidia-persistenced",
        )
    limits = sorted({gpu.power_limit for gpu in smi.gpus if gpu.power_limit})
    return passed("gpu.power", listed(f"{watts:g} W" for watts in limits) or "not reported")


def _pcie(smi: Smi, wanted: Wanted) -> Check:
    found = [text for gpu in smi.gpus for text in (_link(gpu, wanted),) if text]
    if found:
        return warned(
            "gpu.pcie",
            listed(found),
            "all-reduce goes over this link; the slowest card sets the pace",
            "reseat the card or its riser; look at lanes, bifurcation and link speed in the BIOS",
        )
    return passed(
        "gpu.pcie", f"every link has {wanted.link_width} lanes and can do generation {wanted.link_gen}"
    )


def _link(gpu: Gpu, wanted: Wanted) -> str:
    """What is wrong with a link. An idle card lowers its speed by itself; its width never."""
    if gpu.link_width is not None and gpu.link_width < min(wanted.link_width, gpu.link_width_max or 99):
        return f"{gpu.label}: x{gpu.link_width:g} of x{gpu.link_width_max or wanted.link_width:g}"
    if gpu.link_gen_max is not None and gpu.link_gen_max < wanted.link_gen:
        return f"{gpu.label}: the slot allows generation {gpu.link_gen_max:g} only"
    busy = gpu.pstate in ("P0", "P1", "P2")
    if busy and gpu.link_gen is not None and gpu.link_gen < wanted.link_gen:
        return f"{gpu.label}: generation {gpu.link_gen:g} while in {gpu.pstate}"
    return ""


def _bar1(smi: Smi, wanted: Wanted) -> Check:
    small = [gpu for gpu in smi.gpus if gpu.bar1_mib is not None and gpu.bar1_mib < gpu.total_mib]
    if small:
        return warned(
            "gpu.bar1",
            listed(f"{gpu.label}: {gpu.bar1_mib:g} of {gpu.total_mib:g} MiB" for gpu in small),
            "other cards can't reach the memory beyond: no peer-to-peer, all-reduce goes through the host",
            "switch Above 4G decoding and Resizable BAR on in the BIOS",
        )
    return passed("gpu.bar1", "all of each card's memory can be reached over PCIe")


def _fabric(smi: Smi, wanted: Wanted) -> Check:
    waiting = [gpu for gpu in smi.gpus if gpu.fabric in ("In Progress", "Not Started")]
    if waiting:
        return failed(
            "gpu.fabric",
            listed(f"{gpu.label}: {gpu.fabric}" for gpu in waiting),
            "cards on an NVSwitch can't be used before the fabric manager has set it up",
            "install nvidia-fabricmanager of the driver's very version and start it",
        )
    if any(gpu.fabric for gpu in smi.gpus):
        return passed("gpu.fabric", "NVSwitch fabric is up")
    return passed("gpu.fabric", "no NVSwitch: cards on PCIe need no fabric manager")
