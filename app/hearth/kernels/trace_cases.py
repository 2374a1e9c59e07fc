"""What the trace gate traces: each FP4 op in each of its forms, and the known attempts to get around one."""

from __future__ import annotations

import contextlib
import importlib
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hearth.kernels import ops, plugin, trace_device

ROWS, K = 16, 6144  # GLM-5's hidden size
ENGINE_MODULE = "sglang.srt.layers.quantization.fp4_utils"
HAS_PLUGINS = (0, 5, 11)


@dataclass(frozen=True)
class Case:
    """One call to trace. `missing` says why it can't be made; `deep` asks for every obstacle in a row."""

    op: str
    call: Callable[[], Any]
    required: bool = False
    missing: str = ""
    deep: bool = False


@dataclass(frozen=True)
class Plan:
    """The cases, and the versions that they stand for."""

    versions: dict[str, str]
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Attempt:
    """A known way to get FlashInfer's function traced. `around` yields the call, with the way prepared."""

    name: str
    around: Callable[[], AbstractContextManager[Callable[[], Any]]]


def cases(everything: bool, problem: str) -> Plan:
    """Every case for what is installed, `problem` being what `load_engine` returned.

    To be called inside `trace_device.pretend`.
    """
    versions = {name: _version(name) for name in ("flashinfer-python", "torch", "sglang")}
    traced = engine_traces(versions["sglang"])
    found = [*_raw_cases(traced), *_true_op_cases(traced, problem), *_hearth_cases(traced)]
    if everything:
        found += [*_layout_cases(), *_other_cases()]
    return Plan(versions, tuple(found))


def load_engine() -> str:
    """Import the module in which the installed engine registers its own op, if it is one that does.

    Returns why that op can't be traced, or "". To be called outside `trace_device.pretend`.
    """
    if engine_traces(_version("sglang")) != "engine":
        return ""
    try:
        importlib.import_module(ENGINE_MODULE)
    except Exception as error:
        return f"{ENGINE_MODULE} can't be imported: {type(error).__name__}: {error}".splitlines()[0]
    return "" if ops.exists(ops.ENGINE_OP) else f"{ENGINE_MODULE} registered no op {ops.ENGINE_OP}"


def engine_traces(sglang: str) -> str:
    """Which form the installed engine's compiled forward meets: "raw", "engine" or "hearth".

    Without an engine it is "hearth": the gate then checks that our ops hold.
    """
    if not sglang:
        return "hearth"
    if not plugin.needs_replacing(sglang):
        return "engine"
    return "hearth" if plugin_is_installed(sglang) else "raw"


def plugin_is_installed(sglang: str) -> bool:
    """Whether that engine's processes will load Hearth's plugin: by entry point, or by the .pth hook."""
    from packaging.version import Version

    if Path(sysconfig.get_path("purelib"), plugin.PTH_NAME).is_file():
        return True
    entries = metadata.entry_points(group="sglang.srt.plugins", name="hearth")
    return bool(entries) and Version(sglang).release >= HAS_PLUGINS


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


# --- tensors and calls ---


def _tensors() -> dict[str, Any]:
    import torch

    return {
        "x": torch.empty(ROWS, K, dtype=torch.bfloat16, device="cuda"),
        "scale": torch.empty(1, dtype=torch.float32, device="cuda"),
        "scales": torch.empty(128, K // 16, dtype=torch.uint8, device="cuda"),
    }


def _call(name: str, function: Callable[..., Any], **flags: Any) -> Callable[[], Any]:
    """A call of an FP4 function without parameters, as `torch.compile` gets it."""
    given = _tensors()
    x, scale, scales = given["x"], given["scale"], given["scales"]
    if name == "block_scale_interleave":
        return lambda: function(scales, **flags)
    if name == "mxfp4_quantize":
        return lambda: function(x, **flags)
    return lambda: function(x, scale, **flags)


def _raw_cases(traced: str) -> Iterator[Case]:
    for name in ops.OP_NAMES:
        call = _call(name, ops.raw_function(name))
        yield Case(f"flashinfer.{name}", call, traced == "raw" and _in_forward(name), deep=True)


def _in_forward(name: str) -> bool:
    """Whether SGLang <= 0.5.11 itself calls it in a forward pass (see ops)."""
    return name in ("fp4_quantize", "block_scale_interleave")


def _true_op_cases(traced: str, problem: str) -> Iterator[Case]:
    if problem:
        yield Case(_title(ops.ENGINE_OP), lambda: None, True, problem)
    for qualname in (ops.ENGINE_OP, ops.BUILTIN_OP):
        if ops.exists(qualname):
            call = _call("fp4_quantize", ops.resolve(qualname))
            yield Case(_title(qualname), call, traced == "engine" and qualname == ops.ENGINE_OP)


def _title(qualname: str) -> str:
    return "torch.ops." + qualname.replace("::", ".")


def _hearth_cases(traced: str) -> Iterator[Case]:
    for name, op in ops.register().items():
        yield Case(f"hearth.{name}", _call(name, op.call), required=traced == "hearth")


def _layout_cases() -> Iterator[Case]:
    registered = ops.register()
    layouts: dict[str, dict[str, Any]] = {
        "8x4": {"is_sf_8x4_layout": True},
        "linear": {"is_sf_swizzled_layout": False},
        "mxfp4": {"sf_vec_size": 32, "sf_use_ue8m0": True},
    }
    for title, flags in layouts.items():
        yield Case(
            f"flashinfer.fp4_quantize {title}", _call("fp4_quantize", registered["fp4_quantize"].raw, **flags)
        )
        yield Case(
            f"hearth.fp4_quantize {title}", _call("fp4_quantize", registered["fp4_quantize"].call, **flags)
        )


def _other_cases() -> Iterator[Case]:
    """Other FP4 functions of FlashInfer, which no traced forward pass calls (ops says why)."""
    import torch

    experts = torch.empty(2, ROWS, K, dtype=torch.bfloat16, device="cuda")
    mask = torch.empty(2, dtype=torch.int32, device="cuda")
    scale = torch.empty(2, dtype=torch.float32, device="cuda")
    arguments: dict[str, tuple[Any, ...]] = {
        "nvfp4_batched_quantize": (experts, scale),
        "scaled_fp4_grouped_quantize": (experts, mask, scale),
    }
    for name, given in arguments.items():
        function = ops.raw_function(name)
        yield Case(f"flashinfer.{name}", _bound(function, given))


def _bound(function: Callable[..., Any], given: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*given)


# --- the known attempts ---


def attempts() -> tuple[Attempt, ...]:
    """What was tried before an opaque op, each with the AOT library in place, and ours last."""
    return (
        Attempt("AOT library alone", _plain),
        Attempt("patched version check", _constant_version),
        Attempt("module loaded beforehand", _loaded_before),
        Attempt("torch.compiler.disable", _disabled),
        Attempt("torch.compiler.allow_in_graph", _allowed),
        Attempt("hearth's op", _ours),
    )


def _raw() -> Callable[..., Any]:
    return ops.raw_function("fp4_quantize")


@contextlib.contextmanager
def _plain() -> Iterator[Callable[[], Any]]:
    yield _call("fp4_quantize", _raw())


@contextlib.contextmanager
def _constant_version() -> Iterator[Callable[[], Any]]:
    from flashinfer.jit import cpp_ext
    from packaging.version import Version

    version = Version("13.0")
    with trace_device.replaced(cpp_ext, "get_cuda_version", lambda: version):
        yield _call("fp4_quantize", _raw())


@contextlib.contextmanager
def _loaded_before() -> Iterator[Callable[[], Any]]:
    defining = ops.defining_module()
    with trace_device.preloaded():
        module = defining.get_fp4_quantization_module.__wrapped__("120")
    with trace_device.replaced(defining, "get_fp4_quantization_module", lambda backend: module):
        yield _call("fp4_quantize", _raw())


@contextlib.contextmanager
def _disabled() -> Iterator[Callable[[], Any]]:
    import torch

    yield _call("fp4_quantize", torch.compiler.disable(_raw()))


@contextlib.contextmanager
def _allowed() -> Iterator[Callable[[], Any]]:
    import torch

    raw = _raw()

    # allow_in_graph marks a function for good, so it gets one of its own.
    def allowed(x: Any, scale: Any) -> Any:
        return raw(x, scale)

    with trace_device.preloaded():
        yield _call("fp4_quantize", torch.compiler.allow_in_graph(allowed))


@contextlib.contextmanager
def _ours() -> Iterator[Callable[[], Any]]:
    yield _call("fp4_quantize", ops.fp4_quantize_op().call)
