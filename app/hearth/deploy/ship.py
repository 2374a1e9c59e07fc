"""An image from the operator's Docker Engine to a host's, only the layers that the host lacks.

The Engine here saves the image once into a file named after its id. The host tells the chain of layers that
each of its images has; `docker load` takes an archive without the layers that it has in the same chain. An
Engine that doesn't (containerd's image store wants every blob) gets the whole archive.
Run by the role `image` as `python -m hearth.deploy.ship REF TARGET.json`; prints one JSON line.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hearth.deploy.inventory import Target
from hearth.deploy.remote import run, words_for
from hearth.errors import CheckFailed, HearthError, MissingError

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hearth" / "images"
_LAYERS = "docker image inspect --format '{{json .RootFS.Layers}}'"
_LIST = f"docker image ls --no-trunc --quiet | sort -u | xargs -r {_LAYERS}"


@dataclass(frozen=True)
class Shipped:
    """What was sent. `layers` of `total` layers; bytes of the archive."""

    changed: bool
    layers: int
    total: int
    bytes: int

    def to_json(self) -> str:
        """One line."""
        return json.dumps(vars(self))


def common(wanted: Sequence[str], there: Iterable[Sequence[str]]) -> int:
    """How many layers from the bottom the host has in the same order (pure)."""
    best = 0
    for chain in there:
        same = 0
        for mine, theirs in zip(wanted, chain, strict=False):
            if mine != theirs:
                break
            same += 1
        best = max(best, same)
    return best


def save(ref: str) -> tuple[str, Path]:
    """The id of an image here, and the file with it; older files of the same name go. Raises MissingError."""
    done = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Id}}", ref], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise MissingError(
            f"{ref}: not in this machine's Docker Engine: {done.stderr.strip()[-160:]}",
            "hearth image build, or DOCKER_HOST",
        )
    found = done.stdout.strip()
    path = CACHE / f"{found.removeprefix('sha256:')[:16]}.tar"
    if not path.is_file():
        _save(ref, path)
    return found, path


def _save(ref: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(["docker", "save", "--output", str(aside), ref], check=True, capture_output=True)
        aside.rename(path)
    except subprocess.CalledProcessError as error:
        raise CheckFailed(f"docker save {ref}: {_tail(error.stderr)}", "look at the disk here") from error
    finally:
        aside.unlink(missing_ok=True)
    for old in sorted(path.parent.glob("*.tar"), key=lambda each: each.stat().st_mtime)[:-2]:
        old.unlink(missing_ok=True)


def _tail(said: bytes) -> str:
    return said.decode("utf-8", "replace").strip()[-200:]


def layers(path: Path) -> tuple[list[str], list[str]]:
    """Layer ids (diff ids) of a saved image, bottom first, and the archive's member of each."""
    with tarfile.open(path) as archive:
        manifest = json.load(_member(archive, "manifest.json"))[0]
        config = json.load(_member(archive, manifest["Config"]))
    return config["rootfs"]["diff_ids"], manifest["Layers"]


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    if file is None:
        raise CheckFailed(f"{archive.name!s}: no {name} in it", "delete the file and deploy again")
    return file


def without(path: Path, skipped: Iterable[str], out: IO[bytes]) -> None:
    """Write the saved image without some members."""
    left = set(skipped)
    with tarfile.open(path) as archive, tarfile.open(fileobj=out, mode="w|") as new:
        for item in archive:
            if item.name in left or (item.issym() and _points(item) in left):
                continue
            # A copy: writing an entry must not change the one that reading goes by.
            new.addfile(copy.copy(item), archive.extractfile(item) if item.isreg() else None)


def _points(item: tarfile.TarInfo) -> str:
    return os.path.normpath(f"{Path(item.name).parent}/{item.linkname}")


def chains(target: Target) -> list[list[str]]:
    """The layers of every image on the host."""
    said = run(target, _LIST, timeout=120)
    return [json.loads(line) for line in said.out.splitlines() if line.startswith("[")]


def ship(ref: str, target: Target) -> Shipped:
    """Send the image if the host lacks it, then see that it is there. Raises HearthError."""
    found, path = save(ref)
    ids, members = layers(path)
    if _there(target, ref) == ids:
        return Shipped(False, 0, len(ids), 0)
    kept = common(ids, chains(target))
    sent = _send(target, path, members[:kept])
    if _there(target, ref) != ids and kept:
        sent += _send(target, path, [])
        kept = 0
    if _there(target, ref) != ids:
        raise CheckFailed(
            f"{target.name}: {ref} ({found[:19]}) was sent but isn't there", "docker system df on the host"
        )
    return Shipped(True, len(ids) - kept, len(ids), sent)


def _there(target: Target, ref: str) -> list[str]:
    said = run(target, f"{_LAYERS} '{ref}' 2>/dev/null || true")
    found: list[str] = json.loads(said.out) if said.out.startswith("[") else []
    return found


class _Counted:
    """A pipe that counts."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe, self.count = pipe, 0

    def write(self, data: bytes) -> int:
        self.count += len(data)
        return self.pipe.write(data)


def _send(target: Target, path: Path, skipped: Sequence[str]) -> int:
    """Bytes sent. What `docker load` thinks of it shows afterwards, by the image being there."""
    command = words_for(target, "docker load --quiet", root=True)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdin is not None
    counted: Any = _Counted(process.stdin)
    try:
        without(path, skipped, counted)
        process.stdin.close()
    except BrokenPipeError:
        pass
    said = process.stdout.read().decode("utf-8", "replace") if process.stdout else ""
    if process.wait() != 0:
        sys.stderr.write(f"docker load: {said.strip()[-300:]}\n")
    return int(counted.count)


def main() -> None:
    """`python -m hearth.deploy.ship REF TARGET.json`."""
    ref, file = sys.argv[1:]
    said = json.loads(Path(file).read_text(encoding="utf-8"))
    said["ssh_args"] = tuple(said["ssh_args"])
    try:
        print(ship(ref, Target(**said)).to_json())
    except HearthError as error:
        sys.exit(f"hearth: {error}")


if __name__ == "__main__":
    main()
