"""Test stand-in: a function that Dynamo can't trace, for the same reason as FlashInfer's `fp4_quantize`.

FlashInfer looks up the compiler's version on the first call (flashinfer/jit/cpp_ext.py: `get_cuda_version`
runs `nvcc --version`); tracing walks into `subprocess` and stops at a lock.
"""

import functools
import subprocess


@functools.cache
def get_cuda_version() -> str:
    """Ask nvcc for its version. Traced, this never runs."""
    return subprocess.check_output(["nvcc", "--version"], text=True)


def fp4_quantize(x):
    """Stands for a kernel that is compiled on its first call."""
    get_cuda_version()
    return x


def trace() -> None:
    """Raise the real torch._dynamo.exc.Unsupported, by tracing `fp4_quantize` as piecewise graphs do."""
    import torch

    torch.compile(lambda x: fp4_quantize(x) + 1, backend="eager", fullgraph=True)(torch.ones(2))
