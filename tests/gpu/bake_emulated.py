"""Compiles the emulated sm_90 FP4 library (emulate_fp4.py) with no GPU: about three minutes on two cores.

    python3 tests/gpu/bake_emulated.py OUT     # -> OUT/fp4_quantization_90/fp4_quantization_90.so

Run it with Hearth's own .venv. FlashInfer, torch and NVIDIA's compiler come from PyPI, as in tests/bake.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bake.conftest import cache, install_toolkit, kernel_python
from tests.gpu.emulate_fp4 import emulate

MODULE = "fp4_quantization_90"


def patched_package(python: Path, place: Path) -> Path:
    """A folder for PYTHONPATH with a copy of FlashInfer whose FP4 kernels work on sm_90."""
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(site / "flashinfer", place / "flashinfer")
    emulate(place / "flashinfer")
    return place


def main(out: Path) -> int:
    """Bake; the exit code of `hearth bake`."""
    python, toolkit = kernel_python(), install_toolkit()
    place = patched_package(python, cache() / "emulated")
    words = [
        "--out",
        str(out),
        "--modules",
        MODULE,
        "--archs",
        "9.0a",
        "--state",
        str(cache() / "emulated-state"),
    ]
    command = [sys.executable, "-c", "from hearth.cli import main; main()", "bake", *words]
    command += ["--python", str(python), "--cuda-home", str(toolkit)]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(place)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) if len(sys.argv) == 2 else __doc__)
