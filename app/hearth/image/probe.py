"""What an image looks like from inside: run there as text (`python3 -c SOURCE ACTION`), with no other module.

Actions: `self` (user, writable places), `files` (compilers, setuid files, caches; run as root to see all),
`packages` (Python and Debian packages), `imports` (the modules named after it). Prints one JSON object.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPILER = re.compile(
    r"(?:[a-z0-9_]+-linux-gnu-)?(?:gcc|g\+\+|cc|c\+\+|cpp|clang(?:\+\+)?|ld(?:\.(?:bfd|gold|lld))?|as|tcc)"
    r"(?:-[0-9]+)?"
    r"|cc1(?:plus)?|collect2|nvcc|cicc|cudafe\+\+|fatbinary|nvlink|ptxas(?:-[a-z]+)?|ninja|make|cmake|rustc|go"
)
"""Names of programs that compile, assemble, link or start such."""
CACHES = re.compile(
    r".*/\.cache/(?:pip|uv)/.+|/root/\.pip/.+|/var/lib/apt/lists/[^/]+|/var/cache/apt/archives/.+\.deb"
)
COMPAT = re.compile(r"/usr/local/cuda[^/]*/compat/.+")
SKIPPED = ("/proc", "/sys", "/dev", "/tmp", "/run")
PLACES = ("/", "/usr", "/opt/hearth", "/etc", "/tmp", "/run/hearth", "/var/lib/hearth", "/var/cache/hearth")


def look_self() -> dict[str, Any]:
    """Who runs here, and what it may write."""
    return {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": os.getgroups(),
        "writable": [place for place in PLACES if os.access(place, os.W_OK)],
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
    }


def look_files() -> dict[str, list[str]]:
    """Files that must not be there, by what is wrong with them, and folders that can't be read."""
    found: dict[str, list[str]] = {"compilers": [], "setuid": [], "caches": [], "compat": [], "unread": []}
    for folder, folders, files in os.walk("/", onerror=lambda error: found["unread"].append(error.filename)):
        at = Path(folder)
        folders[:] = [name for name in folders if str(at / name) not in SKIPPED]
        for name in files:
            for kind in judge(f"{folder.rstrip('/')}/{name}", name):
                found[kind].append(f"{folder.rstrip('/')}/{name}")
    return found


def judge(path: str, name: str) -> list[str]:
    """What is wrong with one file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return []
    wrong = []
    if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
        wrong.append("setuid")
    if COMPILER.fullmatch(name) and (stat.S_ISLNK(mode) or mode & 0o111):
        wrong.append("compilers")
    if CACHES.fullmatch(path) and not path.endswith("/lock"):
        wrong.append("caches")
    if COMPAT.fullmatch(path):
        wrong.append("compat")
    return wrong


def look_packages() -> dict[str, dict[str, str]]:
    """Every Python distribution and Debian package, with its version."""
    python = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    blocks = Path("/var/lib/dpkg/status").read_text(encoding="utf-8").split("\n\n")
    fields = [dict(re.findall(r"^(Package|Version|Status): (.+)$", block, re.MULTILINE)) for block in blocks]
    debian = {f["Package"]: f["Version"] for f in fields if f.get("Status", "").endswith(" installed")}
    return {"python": python, "debian": debian}


def look_imports() -> dict[str, str]:
    """What importing each module says: "" where it worked."""
    said = {}
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
            said[name] = ""
        except BaseException as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


ACTIONS: dict[str, Callable[[], Any]] = {
    "self": look_self,
    "files": look_files,
    "packages": look_packages,
    "imports": look_imports,
}

if __name__ == "__main__":
    print("\nhearth-probe " + json.dumps(ACTIONS[sys.argv[1]]()), flush=True)
