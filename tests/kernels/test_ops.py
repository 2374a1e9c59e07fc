"""The FP4 ops: fake implementations against FlashInfer's own code, and imports without torch."""

import subprocess
import sys
from collections.abc import Callable

import pytest


def test_shapes_and_contracts(passes: Callable[[str, int], None]) -> None:
    passes("inside_ops.py", 45)


@pytest.mark.parametrize("module", ["ops", "plugin", "trace", "shapes"])
def test_modules_import_nothing_heavy(module: str) -> None:
    """torch and flashinfer are looked for only when they are used."""
    code = (
        "import sys\n"
        f"import hearth.kernels.{module}\n"
        "assert not {'torch', 'flashinfer', 'sglang', 'numpy'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
