"""Verdicts on the operating system: release, limits, memory, CPU and disk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from hearth.host.checks_base import (
    GIB,
    NOTHING,
    Check,
    Facts,
    Output,
    Room,
    Wanted,
    failed,
    listed,
    passed,
    skipped,
    warned,
)

SUPPORTED = {("debian", "12"), ("ubuntu", "22.04"), ("ubuntu", "24.04")}
SUPPORTED_TEXT = "Debian 12, Ubuntu 22.04 and Ubuntu 24.04"
_SLOW_DISKS = ("nfs", "nfs4", "cifs", "zfs", "fuse", "fuseblk", "9p", "ceph")


def judge(facts: Facts, wanted: Wanted) -> list[Check]:
    """All verdicts on the system."""
    return [
        _os(facts.get("os_release", NOTHING)),
        _memlock(facts.get("limits", NOTHING)),
        _shm(facts.get("disk", NOTHING), wanted),
        _hugepages(facts.get("meminfo", NOTHING), facts.get("thp", NOTHING)),
        _governor(facts.get("governor", NOTHING)),
        _disk(facts.get("disk", NOTHING), wanted),
    ]


def release(text: str) -> dict[str, str]:
    """/etc/os-release as a mapping, quotes removed."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value.strip().strip("\"'") for name, mark, value in pairs if mark}


def _os(output: Output) -> Check:
    fields = release(output.text)
    key = (fields.get("ID", "").lower(), fields.get("VERSION_ID", ""))
    seen = fields.get("PRETTY_NAME") or " ".join(key).strip() or output.problem or "unknown"
    if key in SUPPORTED:
        return passed("host.os", seen)
    return failed(
        "host.os",
        seen,
        f"Hearth sets up {SUPPORTED_TEXT}; nothing else was tried, and packages and names differ",
        "install one of these on the host",
    )


def _memlock(output: Output) -> Check:
    match = re.search(r"^Max locked memory\s+(\S{1,40})\s+(\S{1,40})", output.text, re.M)
    if match is None:
        return skipped("host.memlock", f"/proc/self/limits: {output.problem or 'no such line'}")
    soft, hard = match[1], match[2]
    if soft == "unlimited":
        return passed("host.memlock", "unlimited")
    if hard == "unlimited":
        return passed("host.memlock", f"{soft} bytes here, can be raised; Hearth's container gets unlimited")
    return warned(
        "host.memlock",
        f"{soft} bytes here, {hard} at most",
        "pinned memory for the GPUs fails beyond it; Hearth's container asks for unlimited",
        "LimitMEMLOCK=infinity in the unit that starts it; `ulimit -l unlimited` in a shell",
    )


@dataclass(frozen=True)
class Disk:
    """A file system as `df -B1 -P -T` shows it: bytes."""

    device: str
    kind: str
    size: int
    free: int
    mount: str


def disks(text: str) -> list[Disk]:
    """The rows of a `df -B1 -P -T`; other lines are passed over. Never raises."""
    pattern = (
        r"^(\S.{0,250}?)\s+(\S{1,30})\s+(\d{1,18})\s+\d{1,18}\s+(-?\d{1,18})\s+(?:\d{1,3}%|-)\s+(/.{0,400})$"
    )
    return [Disk(m[1], m[2], int(m[3]), int(m[4]), m[5]) for m in re.finditer(pattern, text, re.M)]


def _on(path: str, found: list[Disk]) -> Disk | None:
    """The file system that a path is on: the deepest mount above it."""
    folders = {str(folder) for folder in (PurePosixPath(path), *PurePosixPath(path).parents)}
    above = [disk for disk in found if disk.mount in folders]
    return max(above, key=lambda disk: len(disk.mount), default=None)


def _shm(output: Output, wanted: Wanted) -> Check:
    disk = _on("/dev/shm", disks(output.text))
    if disk is None or disk.mount != "/dev/shm":
        return skipped("host.shm", f"/dev/shm: {output.problem or 'not mounted'}")
    seen = _gib(disk.size)
    if disk.size < wanted.shm:
        return warned(
            "host.shm",
            seen,
            f"the engine's processes talk through it, and NCCL wants {_gib(wanted.shm)}",
            "on a host: `mount -o remount,size=32G /dev/shm`; in a container: --shm-size",
        )
    return passed("host.shm", seen)


def _hugepages(meminfo: Output, thp: Output) -> Check:
    name = "host.hugepages"
    numbers = {m[1]: int(m[2]) for m in re.finditer(r"^(\w{1,40}):\s+(\d{1,15})", meminfo.text, re.M)}
    reserved = numbers.get("HugePages_Total", 0) * numbers.get("Hugepagesize", 0)
    if reserved * 10 > numbers.get("MemTotal", 0) > 0:
        return warned(
            name,
            f"{reserved / 1024 / 1024:.0f} GiB are reserved as huge pages",
            "nothing of Hearth's uses them, and the page cache that weights are read through lacks them",
            "`sysctl vm.nr_hugepages=0`, and remove it from sysctl.d and the kernel command line",
        )
    mode = re.search(r"\[(\w{1,20})\]", thp.text)
    if mode is None:
        return skipped(name, f"transparent_hugepage: {thp.problem or 'no mode'}")
    if mode[1] == "never":
        return warned(
            name,
            "transparent huge pages: never",
            "loading and pinning hundreds of GB page by page is slow",
            "`echo madvise >/sys/kernel/mm/transparent_hugepage/enabled` (host_tuning keeps it)",
        )
    return passed(name, f"transparent: {mode[1]}; none reserved in vain")


def _governor(output: Output) -> Check:
    counts = Counter(output.text.split())
    if not counts:
        return skipped(
            "host.governor", f"scaling_governor: {output.problem or 'empty'} (a virtual machine has none)"
        )
    slow = [f"{count} CPUs: {name}" for name, count in counts.items() if name != "performance"]
    if slow:
        return warned(
            "host.governor",
            listed(slow),
            "a CPU that clocks down between launches costs tokens per second at small batches",
            "`cpupower frequency-set -g performance` (host_tuning keeps it)",
        )
    return passed("host.governor", "performance")


def _disk(output: Output, wanted: Wanted) -> Check:
    found = disks(output.text)
    if not found:
        return skipped("host.disk", f"df: {output.problem or 'no rows'}")
    needs = _needs(wanted, found)
    short_of = [
        f"{mount}: {_gib(disk.free)} free, {_gib(need)} needed for {what}"
        for mount, (disk, need, what) in needs.items()
        if disk.free < need
    ]
    if short_of:
        return failed(
            "host.disk",
            listed(short_of),
            "a download or a build that fills the disk takes the host with it",
            "free space, mount a larger disk there, or move paths in the config",
        )
    slow = [f"{d.mount} ({d.kind})" for d, _, _ in needs.values() if d.kind.startswith(_SLOW_DISKS)]
    if slow:
        return warned(
            "host.disk",
            listed(slow),
            "weights of 440 GB have frozen machines on network and ZFS file systems",
            "keep the weights on a local ext4 or xfs on NVMe",
        )
    return passed(
        "host.disk", listed(f"{mount}: {_gib(disk.free)} free" for mount, (disk, _, _) in needs.items())
    )


def _needs(wanted: Wanted, found: list[Disk]) -> Mapping[str, tuple[Disk, int, str]]:
    """By mount: the file system, the bytes that all its paths need together, and what for."""
    needs: dict[str, tuple[Disk, int, str]] = {}
    for room in wanted.rooms:
        disk = _on(room.path, found)
        if disk is not None:
            _, bytes_, what = needs.get(disk.mount, (disk, 0, ""))
            needs[disk.mount] = (disk, bytes_ + room.free, _join(what, room))
    return needs


def _join(what: str, room: Room) -> str:
    return f"{what}, {room.purpose}" if what else room.purpose


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size < 10 * GIB else f"{size / GIB:.0f} GiB"
