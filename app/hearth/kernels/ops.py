"""FlashInfer's FP4 functions as real `torch.library` ops in namespace `hearth`.

FlashInfer's own `register_custom_op` returns the function unchanged, so Dynamo traces into its JIT
machinery and stops at a subprocess, then at `os.stat`, then at a tvm_ffi call. An op that Dynamo can't
look into ends that. Outside of a trace nothing needs it, so an eager call goes to FlashInfer directly: the
dispatcher adds 20 % to a call by the low-level `torch.library.Library` path, 70 % by the decorator
(an H200, docs/benchmarks/kernels-h200.md).

In, because SGLang <= 0.5.11 calls them raw in a forward pass, or a model's own code may:
  fp4_quantize              ModelOptFp4LinearMethod.apply, the token dispatchers
  block_scale_interleave    the token dispatchers, under its old name nvfp4_block_scale_interleave
  nvfp4_quantize, mxfp4_quantize   the public functions around fp4_quantize
Out:
  mm_fp4                    opaque already: SGLang's own op `fp4_gemm`, since 0.5.9 and before
  cutlass_fused_moe, scaled_fp4_grouped_quantize, silu_and_mul_*   called inside SGLang's one opaque MoE op
  e2m1_and_ufp8sf_scale_to_float, mxfp4_dequantize*   run on the host; no forward pass calls them
  shuffle_matrix_a, shuffle_matrix_sf_a   weight loading
  nvfp4_kv_quantize         inside the attention call, which is a split point of the piecewise graph

torch and flashinfer are imported inside the functions: this module imports where neither exists.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hearth.errors import MissingError
from hearth.kernels.shapes import Layout, Traits, interleaved_size, layout_of, packed_shape, scale_shape

NAMESPACE = "hearth"
ENGINE_OP = "sglang::flashinfer_fp4_quantize"
BUILTIN_OP = "flashinfer::fp4_quantize"
OP_NAMES = ("fp4_quantize", "nvfp4_quantize", "mxfp4_quantize", "block_scale_interleave")
ALIASES = {"nvfp4_block_scale_interleave": "block_scale_interleave"}

# Schema types of fp4_quantize's parameters. Their order and number differ between versions, so the schema
# is made from the installed function's signature, up to the first parameter that isn't listed here.
_TYPES = {
    "input": "Tensor",
    "global_scale": "Tensor?",
    "sf_vec_size": "int",
    "sf_use_ue8m0": "bool",
    "is_sf_swizzled_layout": "bool",
    "is_sf_8x4_layout": "bool",
    "is_global_scale_inversed": "bool",
    "enable_pdl": "bool?",
    "backend": "str",
}


@dataclass(frozen=True)
class Op:
    """One FlashInfer function and its opaque form.

    `call` has the signature of `raw`; arguments that can't cross into an op (a recipe object, an `out`
    buffer, load-time shuffling) go to `raw` as before. `qualname` is the torch op behind `call`.
    """

    name: str
    qualname: str
    raw: Callable[..., Any]
    call: Callable[..., Any]


@dataclass(frozen=True)
class _Definition:
    """What `torch.library` needs: arguments and results as text, the real and the fake implementation."""

    arguments: str
    results: str
    real: Callable[..., Any]
    fake: Callable[..., Any]


_registered: dict[str, Op] = {}
# torch drops a library's ops when the Library object goes.
_libraries: list[Any] = []


def register() -> Mapping[str, Op]:
    """Register every op that the installed packages lack; return all of them by FlashInfer name.

    Repeated calls return the same ops. Raises MissingError if torch or flashinfer isn't installed.
    """
    if not _registered:
        flashinfer = _flashinfer()
        traits = Traits.of(flashinfer.__version__)
        _registered.update({name: _make(name, raw_function(name), traits) for name in OP_NAMES})
    return _registered


def fp4_quantize_op() -> Op:
    """The op to use for `fp4_quantize`: the engine's or FlashInfer's own if there is a sound one, else ours.

    Raises MissingError if torch or flashinfer isn't installed.
    """
    raw = raw_function("fp4_quantize")
    existing = _existing_fp4_quantize()
    if existing is None:
        return register()["fp4_quantize"]
    return Op("fp4_quantize", existing, raw, _when_traced(raw, _keyword_call(raw, resolve(existing))))


def raw_function(name: str) -> Callable[..., Any]:
    """FlashInfer's own function, also after the plugin has put an op in its place. Raises MissingError."""
    module = defining_module()
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise MissingError(f"flashinfer has no {name}", "this FlashInfer is older than Hearth knows")
    return function


def resolve(qualname: str) -> Any:
    """The op `namespace::name` as a callable (its default overload). Raises AttributeError if unknown."""
    import torch

    namespace, name = qualname.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def exists(qualname: str) -> bool:
    """Whether torch knows an op of that name."""
    try:
        resolve(qualname)
    except AttributeError:
        return False
    return True


def builtin_is_sound() -> bool:
    """Whether FlashInfer's own `fp4_quantize` op can be used.

    From 0.6.12 to 0.6.18 it passes `enable_pdl` by position into `is_global_scale_inversed`: with PDL on,
    scales are silently inverted. The op that takes a recipe code (seen in 0.7.1) passes by keyword.
    """
    if not exists(BUILTIN_OP):
        return False
    schema = resolve(BUILTIN_OP)._schema
    return "nvfp4_4over6_code" in {argument.name for argument in schema.arguments}


def _existing_fp4_quantize() -> str | None:
    if exists(ENGINE_OP):
        return ENGINE_OP
    return BUILTIN_OP if builtin_is_sound() else None


def _make(name: str, raw: Callable[..., Any], traits: Traits) -> Op:
    existing = _existing_fp4_quantize() if name == "fp4_quantize" else None
    if existing is not None:
        return Op(name, existing, raw, _when_traced(raw, _keyword_call(raw, resolve(existing))))
    definition = _DEFINITIONS[name](raw, traits)
    qualname = f"{NAMESPACE}::{name}"
    _define(name, definition)
    return Op(name, qualname, raw, _when_traced(raw, _CALLS[name](raw, resolve(qualname))))


def _when_traced(raw: Callable[..., Any], opaque: Callable[..., Any]) -> Callable[..., Any]:
    """`opaque` for a compiler and for tensors that aren't plain (fake ones), `raw` for all other calls."""
    import torch

    compiling, plain = torch.compiler.is_compiling, torch.Tensor

    @functools.wraps(opaque)
    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling() or not args or type(args[0]) is not plain:
            return opaque(*args, **kwargs)
        return raw(*args, **kwargs)

    return call


def _define(name: str, definition: _Definition) -> None:
    import torch

    if exists(f"{NAMESPACE}::{name}"):  # another copy of this module was here first
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    # The result depends on the input's strides (column-major input), so the compiler must keep them.
    exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    schema = f"{name}({definition.arguments}) -> {definition.results}"
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, exact))
    library.impl(name, definition.real, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", definition.fake, lib=library)
    _libraries.append(library)


# --- fp4_quantize ---


def _fp4_definition(raw: Callable[..., Any], traits: Traits) -> _Definition:
    parameters = _schema_parameters(raw)
    defaults = {p.name: p.default for p in parameters}

    def fake(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given = defaults | dict(zip(defaults, args, strict=False)) | kwargs
        layout = layout_of(given["is_sf_swizzled_layout"], given["is_sf_8x4_layout"])
        return _fake_quantize(given["input"], given["sf_vec_size"], layout, traits)

    arguments = ", ".join(_argument(p) for p in parameters)
    return _Definition(arguments, "(Tensor, Tensor)", raw, fake)


def _schema_parameters(raw: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = []
    for parameter in inspect.signature(raw).parameters.values():
        if parameter.name not in _TYPES:
            break
        parameters.append(parameter)
    return parameters


def _argument(parameter: inspect.Parameter) -> str:
    kind = _TYPES[parameter.name]
    if parameter.default is inspect.Parameter.empty:
        return f"{kind} {parameter.name}"
    default = f'"{parameter.default}"' if kind == "str" else parameter.default
    return f"{kind} {parameter.name}={default}"


def _fake_quantize(tensor: Any, vec: int, layout: Layout, traits: Traits) -> tuple[Any, Any]:
    """Codes [..., K/2] and scales, both uint8; for column-major input the transposes of the row-major result.

    Raises ValueError for shapes that FlashInfer itself refuses.
    """
    import torch

    column_major = tensor.stride(-2) == 1
    rows = tensor.transpose(-2, -1) if column_major else tensor
    torch._check(rows.shape[-1] % vec == 0, lambda: f"K = {rows.shape[-1]} is no multiple of {vec}")
    codes = tensor.new_empty(packed_shape(rows.shape), dtype=torch.uint8)
    scales = tensor.new_empty(scale_shape(rows.shape, vec, layout, traits), dtype=torch.uint8)
    if column_major:
        return codes.transpose(-2, -1), scales.transpose(-2, -1)
    return codes, scales


def _fp4_call(raw: Callable[..., Any], op: Any) -> Callable[..., Any]:
    beyond = frozenset(inspect.signature(raw).parameters) - {p.name for p in _schema_parameters(raw)}

    def fp4_quantize(*args: Any, **kwargs: Any) -> Any:
        """`flashinfer.fp4_quantize` as an opaque op; same arguments, shapes and dtypes."""
        if kwargs and not beyond.isdisjoint(kwargs):
            return raw(*args, **kwargs)
        return op(*args, **kwargs)

    return fp4_quantize


def _keyword_call(raw: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """Call an op whose parameters are a subset of the raw function's in another order: by name."""
    names = tuple(inspect.signature(raw).parameters)
    known = frozenset(argument.name for argument in op._schema.arguments)

    def fp4_quantize(*args: Any, **kwargs: Any) -> Any:
        """`flashinfer.fp4_quantize` through the op that is installed already."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if known.issuperset(given):
            return op(**given)
        return raw(*args, **kwargs)

    return fp4_quantize


# --- the functions around it ---


def _nvfp4_definition(raw: Callable[..., Any], traits: Traits) -> _Definition:
    layouts = _layout_enum()

    def real(a: Any, a_global_sf: Any, sf_layout: int, sf_vec_size: int, enable_pdl: bool | None) -> Any:
        return raw(
            a, a_global_sf, sfLayout=layouts(sf_layout), sf_vec_size=sf_vec_size, enable_pdl=enable_pdl
        )

    def fake(a: Any, a_global_sf: Any, sf_layout: int, sf_vec_size: int, enable_pdl: bool | None) -> Any:
        layout = Layout(sf_layout)
        if layout is Layout.LINEAR and not traits.nvfp4_linear:
            layout = Layout.SWIZZLED_128X4
        return _fake_quantize(a, sf_vec_size, layout, traits)

    arguments = "Tensor a, Tensor a_global_sf, int sf_layout, int sf_vec_size, bool? enable_pdl"
    return _Definition(arguments, "(Tensor, Tensor)", real, fake)


def _nvfp4_call(raw: Callable[..., Any], op: Any) -> Callable[..., Any]:
    default = _layout_enum()(Layout.SWIZZLED_128X4.value)

    def nvfp4_quantize(
        a: Any,
        a_global_sf: Any,
        sfLayout: Any = default,
        do_shuffle: bool = False,
        sf_vec_size: int = 16,
        enable_pdl: bool | None = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """`flashinfer.nvfp4_quantize` as an opaque op; shuffling weights and other backends stay raw."""
        if do_shuffle or rest or more:
            return raw(a, a_global_sf, sfLayout, do_shuffle, sf_vec_size, enable_pdl, *rest, **more)
        return op(a, a_global_sf, sfLayout.value, sf_vec_size, enable_pdl)

    return nvfp4_quantize


def _mxfp4_definition(raw: Callable[..., Any], traits: Traits) -> _Definition:
    layouts = _layout_enum()
    takes_layout = "sfLayout" in inspect.signature(raw).parameters

    def real(a: Any, sf_layout: int) -> Any:
        return raw(a, sfLayout=layouts(sf_layout)) if takes_layout else raw(a)

    def fake(a: Any, sf_layout: int) -> Any:
        return _fake_quantize(a, 32, Layout(sf_layout), traits)

    return _Definition("Tensor a, int sf_layout", "(Tensor, Tensor)", real, fake)


def _mxfp4_call(raw: Callable[..., Any], op: Any) -> Callable[..., Any]:
    parameters = inspect.signature(raw).parameters
    names = tuple(parameters)
    defaults = {name: parameters[name].default for name in names[1:]}
    layout = _layout_enum()(Layout.SWIZZLED_128X4.value)

    def mxfp4_quantize(*args: Any, **kwargs: Any) -> Any:
        """`flashinfer.mxfp4_quantize` as an opaque op; backends other than CUDA stay raw."""
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if len(given) != len(names) or given.get("backend", "cuda") != "cuda":
            return raw(*args, **kwargs)
        return op(given["a"], given.get("sfLayout", layout).value)

    return mxfp4_quantize


def _interleave_definition(raw: Callable[..., Any], traits: Traits) -> _Definition:
    def fake(unswizzled_sf: Any) -> Any:
        return unswizzled_sf.new_empty((interleaved_size(unswizzled_sf.shape),))

    return _Definition("Tensor unswizzled_sf", "Tensor", raw, fake)


def _interleave_call(raw: Callable[..., Any], op: Any) -> Callable[..., Any]:
    def block_scale_interleave(unswizzled_sf: Any, **more: Any) -> Any:
        """`flashinfer.block_scale_interleave` as an opaque op; a given `out` buffer stays raw."""
        return raw(unswizzled_sf, **more) if more else op(unswizzled_sf)

    return block_scale_interleave


_DEFINITIONS: dict[str, Callable[[Callable[..., Any], Traits], _Definition]] = {
    "fp4_quantize": _fp4_definition,
    "nvfp4_quantize": _nvfp4_definition,
    "mxfp4_quantize": _mxfp4_definition,
    "block_scale_interleave": _interleave_definition,
}
_CALLS: dict[str, Callable[[Callable[..., Any], Any], Callable[..., Any]]] = {
    "fp4_quantize": _fp4_call,
    "nvfp4_quantize": _nvfp4_call,
    "mxfp4_quantize": _mxfp4_call,
    "block_scale_interleave": _interleave_call,
}


# --- where things are ---


def _flashinfer() -> Any:
    try:
        import flashinfer
        import torch  # noqa: F401
    except ImportError as error:
        hint = f"install it beside {error.name or 'it'}: `pip install flashinfer-python` with SGLang's pin"
        raise MissingError(f"{error.name or 'flashinfer'} can't be imported: {error}", hint) from error
    return flashinfer


def defining_module() -> Any:
    """The module whose functions are the originals: the plugin replaces names everywhere but here."""
    import importlib

    _flashinfer()
    try:
        return importlib.import_module("flashinfer.quantization.fp4_quantization")
    except ModuleNotFoundError:
        return importlib.import_module("flashinfer.fp4_quantization")


def fp4_spec() -> Any:
    """FlashInfer's own build recipe of the FP4 library for SM120 (a `JitSpec`)."""
    return defining_module().gen_fp4_quantization_sm120_module()


def _layout_enum() -> Any:
    return defining_module().SfLayout
