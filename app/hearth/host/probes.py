"""What is asked of a host: commands and files, by the names under which hearth.host.checks judges them.

Kept as data so that `hearth doctor` and the Ansible roles ask the same questions.
"""

from __future__ import annotations

COMMANDS: dict[str, tuple[str, ...]] = {
    "nvidia_smi": ("nvidia-smi", "-q", "-x"),
    "lspci": ("lspci", "-D", "-vv"),
    "modinfo": ("modinfo", "nvidia"),
    "mokutil": ("mokutil", "--sb-state"),
    "docker": ("docker", "info", "--format", "{{json .}}"),
    "nvidia_ctk": ("nvidia-ctk", "--version"),
    "cdi": ("nvidia-ctk", "cdi", "list"),
    "fabricmanager": ("systemctl", "is-active", "nvidia-fabricmanager"),
    "kernel_log": ("dmesg",),
    "dev_char": ("find", "/dev/char", "-type", "l", "-printf", "%f %l\\n"),
}
"""Each with `LC_ALL=C`; stdout and stderr together are the text."""

DISK = ("df", "-B1", "-P", "-T")
"""`disk`: followed by the paths that need room (each the nearest folder that exists) and /dev/shm."""

FILES: dict[str, str] = {
    "driver_version": "/proc/driver/nvidia/version",
    "cmdline": "/proc/cmdline",
    "modules": "/proc/modules",
    "meminfo": "/proc/meminfo",
    "limits": "/proc/self/limits",
    "os_release": "/etc/os-release",
    "thp": "/sys/kernel/mm/transparent_hugepage/enabled",
    "governor": "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    "container": "/.dockerenv",
    "iommu_types": "/sys/kernel/iommu_groups/*/type",
}
"""A file, or a pattern whose files are read one after the other."""
