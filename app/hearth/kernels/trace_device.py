"""A pretended SM120 GPU for the trace gate: fake tensors, two patched queries, an AOT library in its place.

Only used inside `pretend`, and undone after it. Everything between a call and the native library is real.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from packaging.version import Version

from hearth.errors import MissingError
from hearth.kernels import plugin

CAPABILITY = (12, 0)
AOT_NAMES = ("fp4_quantization_120", "fp4_quantization_120f")
NATIVE_NAMES = (
    "fp4_quantize",
    "block_scale_interleave_sm100",
    "fp4_batched_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
)


@dataclass(frozen=True)
class _Properties:
    """What code asks of `torch.cuda.get_device_properties`: an RTX PRO 6000 Blackwell, as published."""

    name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    multi_processor_count: int = 188
    total_memory: int = 96 * 2**30


# Kept in a global: the tracer asks where an object comes from.
_PROPERTIES = _Properties()


def replaced(target: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    """An attribute with another value for a while (a plain function: the tracer would look into a Mock)."""
    return mock.patch.object(target, name, new=value)


def prepare_environment() -> None:
    """Set what importing FlashInfer needs on a machine without a GPU, where it isn't set.

    Raises MissingError if torch or flashinfer isn't installed.
    """
    for package in ("torch", "flashinfer-python"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError as error:
            hint = "run `hearth trace` in the engine's image or environment"
            raise MissingError(f"{package} isn't installed in {sys.prefix}", hint) from error
    # 0.6.6 is the first that knows sm_120f; before it, 12.0a is the arch with FP4 instructions.
    family = Version(metadata.version("flashinfer-python")).release >= (0, 6, 6)
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "12.0f" if family else "12.0a")
    if "FLASHINFER_WORKSPACE_BASE" not in os.environ:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = tempfile.mkdtemp(prefix="hearth-trace-")


@contextlib.contextmanager
def pretend() -> Iterator[None]:
    """Inside, fake CUDA tensors can be made, the GPU is an SM120, and FP4 libraries look installed (AOT)."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Dynamo notes by identity, at first use, which torch functions it calls instead of tracing them: had it
    # noted the stand-ins below, it would refuse their results.
    torch.compile(lambda: None, backend="eager")()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(replaced(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY))
        stack.enter_context(replaced(torch.cuda, "get_device_properties", lambda device=None: _PROPERTIES))
        stack.enter_context(replaced(torch.Tensor, "cuda", lambda self, *args, **kwargs: self))
        if torch.version.cuda is None:
            stack.enter_context(replaced(torch.version, "cuda", "13.0"))
        stack.enter_context(_fresh_caches())
        stack.enter_context(_aot_in_place())
        stack.enter_context(FakeTensorMode())
        yield


@contextlib.contextmanager
def _aot_in_place() -> Iterator[None]:
    """Where FlashInfer has no AOT library for FP4, let its AOT folder be one that holds empty ones."""
    from flashinfer.jit import env

    if any((env.FLASHINFER_AOT_DIR / name / f"{name}.so").exists() for name in AOT_NAMES):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="hearth-aot-") as folder:
        for name in AOT_NAMES:
            library = Path(folder, name, f"{name}.so")
            library.parent.mkdir()
            library.touch()
        with replaced(env, "FLASHINFER_AOT_DIR", Path(folder)):
            yield


def native_module() -> Any:
    """What a loaded library looks like to the tracer: real tvm_ffi functions, which here do nothing."""
    import tvm_ffi  # type: ignore[import-not-found]

    def nothing(*_: Any) -> None:
        return None

    return SimpleNamespace(**dict.fromkeys(NATIVE_NAMES, tvm_ffi.convert(nothing)))


@contextlib.contextmanager
def preloaded() -> Iterator[None]:
    """Every library counts as loaded, and is what `native_module` says."""
    from flashinfer.jit import JitSpec

    module = native_module()
    with contextlib.ExitStack() as stack:
        for cls in (JitSpec, *JitSpec.__subclasses__()):
            if "build_and_load" in vars(cls):
                stack.enter_context(replaced(cls, "build_and_load", lambda self: module))
        yield


@contextlib.contextmanager
def _fresh_caches() -> Iterator[None]:
    """FlashInfer caches capabilities and loaded modules: nothing pretended may stay, nothing real leak in."""
    _clear_caches()
    try:
        yield
    finally:
        _clear_caches()


def _clear_caches() -> None:
    for module in plugin.loaded_modules("flashinfer"):
        for value in list(vars(module).values()):
            clear = inspect.getattr_static(value, "cache_clear", None)
            if clear is not None and callable(value):
                value.cache_clear()
