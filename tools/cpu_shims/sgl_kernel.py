"""Stands in for SGLang's CUDA kernels, which have no CPU build on PyPI.

With `--attention-backend torch_native --sampling-backend pytorch` on a CPU, SGLang imports names from
here and calls none of them.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this is a CPU environment")

    return absent
