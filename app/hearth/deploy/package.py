"""What a host gets from the operator's checkout: Hearth's wheel, its requirements, the image's files."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hearth.errors import CheckFailed, MissingError

LOCK = Path("requirements/hearth.lock")
CONTEXT = (
    ".dockerignore",
    "docker",
    "images",
    "requirements",
    "app",
    "tools/cpu_shims",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
"""What docker/Dockerfile copies, and what keeps the rest away; nothing else changes an image."""
_SKIPPED = ("__pycache__", ".egg-info")
_LEFT = tuple(f"*{part}" for part in _SKIPPED)


@dataclass(frozen=True)
class Package:
    """Hearth for a host: its wheel, its lock, and a name for both that follows their content."""

    wheel: Path
    lock: Path
    stamp: str


def package(root: Path, folder: Path) -> Package:
    """Build the wheel of the checkout at `root` into `folder`. Raises MissingError or CheckFailed."""
    lock = root / LOCK
    if not lock.is_file():
        raise MissingError(f"{lock}: no such file", "run this in a checkout of Hearth, or give --root")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder)]
    with tempfile.TemporaryDirectory(prefix="hearth-wheel-") as place:
        _copy(root, Path(place))
        done = subprocess.run([*command, place], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("hearth-*.whl"))
    if done.returncode != 0 or not wheels:
        raise CheckFailed(f"Hearth's wheel can't be built: {done.stderr.strip()[-400:]}", "make setup")
    return Package(wheels[-1], lock, stamp(wheels[-1], lock))


def _copy(root: Path, place: Path) -> None:
    """The sources alone: a build folder of yesterday would bring back files that are gone."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, place)
    shutil.copytree(root / "app", place / "app", ignore=shutil.ignore_patterns(*_LEFT))


def stamp(wheel: Path, lock: Path) -> str:
    """A short name for a wheel's files and a lock; times inside the wheel don't count."""
    with zipfile.ZipFile(wheel) as archive:
        said = sorted((item.filename, item.CRC, item.file_size) for item in archive.infolist())
    return hashlib.sha256(repr(said).encode() + lock.read_bytes()).hexdigest()[:16]


def context_files(root: Path) -> list[Path]:
    """The files that an image is made of, in order."""
    found: list[Path] = []
    for name in CONTEXT:
        place = root / name
        found += sorted(place.rglob("*")) if place.is_dir() else [place]
    return [path for path in found if path.is_file() and not any(part in str(path) for part in _SKIPPED)]


def context_hash(root: Path, extra: str = "") -> str:
    """A short name for those files; `extra` is what else the image depends on, such as its base."""
    digest = hashlib.sha256(extra.encode())
    for path in context_files(root):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def context_archive(root: Path, target: Path) -> Path:
    """Those files as one archive."""
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        for path in context_files(root):
            data = path.read_bytes()
            item = tarfile.TarInfo(str(path.relative_to(root)))
            item.size, item.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(item, io.BytesIO(data))
    return target
