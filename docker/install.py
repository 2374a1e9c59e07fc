"""Build stage `engine`: install the hash-locked packages, and lay them out as layers. Standard library only.

The virtual environment is made in place; `--layers` gets hard links of it in folders that the runtime stage
copies one by one: `cuda` (NVIDIA's libraries), `torch`, `engine` (the rest).
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

LAYERS = {"cuda": r"nvidia(?!_ml_py).*|cuda.*", "torch": r"torch(gen|-[0-9].*)?|functorch|triton.*"}
"""Names in site-packages that go into a layer of their own."""


def main() -> None:
    """Install, then split."""
    parser = argparse.ArgumentParser()
    for name in ("python", "venv", "layers", "folder", "locks", "try-lock", "cuda-libs", "without"):
        parser.add_argument(f"--{name}", default="")
    said = parser.parse_args()
    check_python(said.python)
    venv, folder = Path(said.venv), Path(said.folder)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    if said.try_lock:
        pip(venv, [folder / said.try_lock], set(), check=False)
    pip(venv, [folder / name for name in said.locks.split()], set(said.without.split()))
    if said.cuda_libs and not is_cpu_torch(venv):
        pip(venv, [folder / said.cuda_libs], set())
    split(venv, Path(said.layers))


def check_python(wanted: str) -> None:
    """The locks are for one Python: another one would take other wheels, or none."""
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if found != wanted:
        raise SystemExit(f"install.py: the base has Python {found}, the locks are for {wanted}: another base")


def pip(venv: Path, locks: list[Path], without: set[str], check: bool = True) -> None:
    """Install what the locks hold, in one go, apart from `without`."""
    merged = Path("/tmp/requirements.txt")
    merged.write_text("".join(keep(lock.read_text(), without) for lock in locks))
    command = [str(venv / "bin" / "pip"), "install", "--no-cache-dir", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--progress-bar=off", "-r", str(merged)], check=check)
    merged.unlink()


def keep(text: str, without: set[str]) -> str:
    """A lock's text without the entries of the named packages."""
    entries = re.findall(
        r"^[^\s#].*\n(?:[ \t]+.*\n)*", text if text.endswith("\n") else text + "\n", re.MULTILINE
    )
    return "".join(entry for entry in entries if entry.partition("==")[0].strip() not in without)


def site_packages(venv: Path) -> Path:
    """Where the environment keeps its packages."""
    return next((venv / "lib").glob("python3.*/site-packages"))


def is_cpu_torch(venv: Path) -> bool:
    """Whether torch is a CPU build, which needs no CUDA libraries."""
    text = (site_packages(venv) / "torch" / "version.py").read_text()
    return re.search(r"^cuda\b.*=\s*None", text, re.MULTILINE) is not None


def split(venv: Path, layers: Path) -> None:
    """Hard-link the environment into one folder a layer."""
    source = site_packages(venv)
    rest = layers / "engine" / venv.relative_to("/")
    rest.parent.mkdir(parents=True)
    subprocess.run(["cp", "-al", str(venv), str(rest)], check=True)
    inside = rest / source.relative_to(venv)
    for layer, pattern in LAYERS.items():
        target = layers / layer / source.relative_to("/")
        target.mkdir(parents=True)
        for path in sorted(inside.iterdir()):
            if re.fullmatch(pattern, path.name):
                shutil.move(str(path), target / path.name)


if __name__ == "__main__":
    main()
