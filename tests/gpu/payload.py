"""Packs what tests/gpu/ops_check.py needs for a GPU machine without a network: one .tar.xz.

    python3 tests/gpu/bake_emulated.py EMULATED
    python3 tests/gpu/payload.py OUT.tar.xz --emulated EMULATED/fp4_quantization_90/fp4_quantization_90.so

From PyPI (pip download): FlashInfer's Python files, the C++ headers and sources that its FP4 module includes,
and apache-tvm-ffi. The emulated library (which depends on neither Python nor torch) saves minutes of GPU
time; the others are compiled on the GPU machine, with its CUDA toolkit and torch.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.11")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
# Of FlashInfer's 330 MB of data: the folders of what compilers read for fp4_quantization (`ninja -t deps`).
WANTED = (
    "flashinfer/data/csrc/nv_internal/",
    "flashinfer/data/csrc/tvm_ffi_utils.h",
    "flashinfer/data/include/flashinfer/",
    "flashinfer/data/spdlog/include/",
    "flashinfer/data/cutlass/include/",
    "flashinfer/data/cccl/",
)
HEADERS = (".h", ".cuh", ".hpp", ".inl", ".cu", ".cpp", "")


def wanted(name: str) -> bool:
    """Whether a file of a wheel goes into the payload."""
    if not name.startswith("flashinfer/data/"):
        return not name.endswith(".so") or name.startswith("tvm_ffi/")
    return name.startswith(WANTED) and Path(name).suffix in HEADERS


def files(wheels: Path) -> Iterator[tuple[str, bytes, int]]:
    """Name, content and mode of each file to pack, sorted by name within a wheel."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for info in sorted(archive.infolist(), key=lambda i: (Path(i.filename).suffix, i.filename)):
                if not info.is_dir() and wanted(info.filename):
                    yield info.filename, archive.read(info), (info.external_attr >> 16) & 0o777 or 0o644


def download(folder: Path, python: str) -> None:
    """Fetch the wheels. Raises CalledProcessError with pip's own message above."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    only = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        only += ["--platform", platform]
    subprocess.run([*pip, *only, "-d", str(folder), *PACKAGES], check=True)


def pack(wheels: Path, out: Path, emulated: Path | None) -> int:
    """Write the archive; the number of files in it."""
    count = 0
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for name, content, mode in files(wheels):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
            count += 1
        if emulated:
            archive.add(emulated, f"emulated/{emulated.name}")
    return count


def main() -> None:
    """Download, pack, say how large it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python")
    parser.add_argument("--emulated", type=Path, help="the library that tests/gpu/bake_emulated.py made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), args.python)
        count = pack(Path(folder), args.out, args.emulated)
    print(f"{args.out}: {count} files, {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
