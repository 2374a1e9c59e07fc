"""Make the hash locks of the CPU engines: images/cpu*.lock (needs uv: run it with the project's .venv).

One universal resolution per engine version (Python 3.11 and newer), from PyPI. torch's own CUDA
libraries go into images/cpu-cuda-libs.lock, because a CPU build of torch, where pip finds one, has no
use for their gigabytes. `--upgrade` takes newer releases; otherwise existing pins are kept.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "images"
SOURCES = ("cpu.in", "cpu-0.5.21.in")
CUDA_LIBS = re.compile(r"(cuda-|nvidia-(?!ml-py))")
HEADER = "# Made by tools/cpu_lock.py from {source}, for `pip install --no-deps --require-hashes`.\n"


def resolve(source: Path, upgrade: list[str]) -> str:
    """Return uv's universal lock of `source` as text. Raises CalledProcessError when it can't be solved."""
    version = re.search(r"^sglang==(\S+)$", source.read_text(), re.MULTILINE)
    if version is None:
        raise SystemExit(f"{source}: no line `sglang==VERSION`: add one")
    # SGLang's own list is left out on purpose (see cpu-base.in).
    settings = f'[[dependency-metadata]]\nname = "sglang"\nversion = "{version[1]}"\nrequires-dist = []\n'
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "uv.toml")
        config.write_text(settings)
        lock = Path(folder, "lock")
        lock.write_text(pins(source.with_suffix(".lock")) + pins(cuda_lock()))
        command = ["uv", "pip", "compile", "--config-file", config, "--universal", "--python-version", "3.11"]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet", *upgrade]
        subprocess.run([*command, "--output-file", lock, source], check=True, stdout=subprocess.DEVNULL)
        return lock.read_text()


def pins(lock: Path) -> str:
    """The versions of an earlier lock, which uv keeps; without hashes, which it gets anew."""
    lines = lock.read_text().splitlines() if lock.exists() else []
    return "".join(line.removesuffix("\\") + "\n" for line in lines if re.match(r"\S+==", line))


def cuda_lock() -> Path:
    """The lock of torch's CUDA libraries."""
    return IMAGES / "cpu-cuda-libs.lock"


def entries(lock: str) -> list[str]:
    """Split a lock into one text per package, its hashes included."""
    return re.findall(r"^[^\s#].*\n(?:[ \t]+.*\n)*", lock, re.MULTILINE)


def main() -> None:
    """Write every lock."""
    cuda: list[str] = []
    locks = {}
    for name in SOURCES:
        packages = entries(resolve(IMAGES / name, sys.argv[1:]))
        cuda = [p for p in packages if CUDA_LIBS.match(p)]
        kept = [p for p in packages if not CUDA_LIBS.match(p)]
        locks[IMAGES / name.replace(".in", ".lock")] = HEADER.format(source=name) + "".join(kept)
    locks[cuda_lock()] = HEADER.format(source="cpu-base.in (torch's CUDA libraries)") + "".join(cuda)
    for path, text in locks.items():
        path.write_text(text)
        print(f"{path.name}: {len(entries(text))} packages")


if __name__ == "__main__":
    main()
