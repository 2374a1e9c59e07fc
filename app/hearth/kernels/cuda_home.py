"""A CUDA_HOME for compiling without a GPU, out of the compiler packages on PyPI.

NVIDIA's `nvidia-cuda-nvcc` and its companions (requirements/cuda-compiler.lock) unpack into one tree,
`site-packages/nvidia/cu13`, which lacks three things that FlashInfer's build files expect: a `lib64`
folder, the unversioned names of the libraries to link with, and a `libcuda.so` (the driver, which no build
machine has). `assemble` makes a folder of links that has them; the packages stay untouched.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hearth.errors import MissingError

# What FlashInfer's modules include, run and link, and the package that has it.
_PARTS = (
    ("bin/nvcc", "nvidia-cuda-nvcc"),
    ("bin/ptxas", "nvidia-cuda-nvcc"),
    ("nvvm/bin/cicc", "nvidia-nvvm"),
    ("include/crt/host_config.h", "nvidia-cuda-crt"),
    ("include/cuda_runtime.h", "nvidia-cuda-runtime"),
    ("include/cccl/cuda", "nvidia-cuda-cccl"),
    ("include/cublasLt.h", "nvidia-cublas"),
    ("include/curand_kernel.h", "nvidia-curand"),
    ("include/nvrtc.h", "nvidia-cuda-nvrtc"),
    ("include/cuda_profiler_api.h", "nvidia-cuda-profiler-api"),
    ("lib/libcudart.so.13", "nvidia-cuda-runtime"),
    ("lib/libnvrtc.so.13", "nvidia-cuda-nvrtc"),
)
_LOCK = "pip install --require-hashes -r requirements/cuda-compiler.lock"


@dataclass(frozen=True)
class CudaHome:
    """A usable toolkit: its root, and the release that nvcc and ptxas both report, such as "13.0"."""

    path: Path
    release: str


def resolve(asked: Path | None, site_packages: Iterable[Path], work: Path) -> CudaHome:
    """The toolkit to use: `asked` (a CUDA_HOME or a folder of packages), else PyPI's in `site_packages`.

    Where it comes from packages, the folder of links is made in `work`. Raises MissingError.
    """
    if asked is not None and (asked / "lib64").is_dir():
        return check(asked.resolve())
    tree = find_packages(site_packages if asked is None else [asked])
    return check(assemble(tree.resolve(), work.resolve()))


def find_packages(site_packages: Iterable[Path]) -> Path:
    """The tree of PyPI's CUDA 13 compiler packages in the first of these folders that has one.

    Raises MissingError that names the lock file to install, or the packages that are missing from the tree.
    """
    for folder in site_packages:
        tree = folder / "nvidia" / "cu13"
        if (tree / "bin" / "nvcc").is_file():
            absent = sorted({package for part, package in _PARTS if not (tree / part).exists()})
            if absent:
                raise MissingError(f"{tree}: the CUDA compiler lacks {', '.join(absent)}", _LOCK)
            return tree
    raise MissingError(
        "no CUDA compiler packages (nvidia-cuda-nvcc) are installed", f"{_LOCK}, or --cuda-home"
    )


def assemble(tree: Path, target: Path) -> Path:
    """Make `target` a CUDA_HOME over `tree`; safe to repeat.

    Returns `target`. Raises MissingError without gcc.
    """
    stubs = target / "lib64" / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "include", "nvvm"):
        _link(target / name, tree / name)
    for library in sorted((tree / "lib").iterdir()):
        _link(target / "lib64" / library.name, library)
        if ".so." in library.name:
            _link(target / "lib64" / f"{library.name.partition('.so.')[0]}.so", library)
    _driver_stub(stubs / "libcuda.so")
    return target


def check(home: Path) -> CudaHome:
    """Ask the toolkit who it is. Raises MissingError where a part is missing or nvcc and ptxas differ.

    A foreign ptxas in front of nvcc's own is a known way to get kernels that lack the FP4 instructions.
    """
    nvcc, ptxas = (_release(home / "bin" / tool) for tool in ("nvcc", "ptxas"))
    if nvcc != ptxas:
        raise MissingError(f"{home}: nvcc is of CUDA {nvcc} but ptxas of {ptxas}", "reinstall the toolkit")
    if not (home / "include" / "cublasLt.h").is_file():
        raise MissingError(f"{home}: no cublasLt.h, which every FP4 module includes", _LOCK)
    return CudaHome(home, nvcc)


def _link(link: Path, to: Path) -> None:
    if link.is_symlink() and link.readlink() == to:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(to)


def _driver_stub(path: Path) -> None:
    """An empty library with the driver's name: enough to link; the real one comes with the GPU's driver."""
    if path.exists():
        return
    command = ["gcc", "-shared", "-x", "c", "-Wl,-soname,libcuda.so.1", "-o", str(path), "/dev/null"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise MissingError("gcc isn't installed, and nvcc needs it", "apt-get install g++") from error
    except subprocess.CalledProcessError as error:
        raise MissingError(f"{path}: gcc can't make it: {error.stderr.strip()[:200]}") from error


def _release(tool: Path) -> str:
    try:
        text = subprocess.run([tool, "--version"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingError(f"{tool}: can't be run: {error}", _LOCK) from error
    found = re.search(r"release (\d+\.\d+)", text)
    if not found:
        raise MissingError(f"{tool}: says no CUDA release: {text.strip()[:80]!r}")
    return found[1]
