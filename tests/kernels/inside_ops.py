"""The ops against FlashInfer's own Python code, run on CPU tensors.

Stand-ins: the native module (writes a pattern instead of codes), the compute capability (12.0), and
`Tensor.cuda` (stays on the CPU). What allocates and shapes the results is FlashInfer's real code.
"""

import inspect
from types import SimpleNamespace

import flashinfer
import pytest
import torch
from flashinfer.jit import JitSpec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hearth.kernels import ops
from hearth.kernels.shapes import Layout

ALL_OPS = ("fp4_quantize", "nvfp4_quantize", "mxfp4_quantize", "block_scale_interleave")
NEW = not flashinfer.__version__.startswith("0.6.3")
RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
LAYOUTS = [(True, False), (True, True), (False, False)]


def write(*tensors):
    """What the native kernel leaves behind: bytes that depend on the place."""
    for tensor in tensors:
        flat = torch.arange(tensor.numel(), device=tensor.device) % 251
        tensor.copy_(flat.reshape(tensor.shape).to(tensor.dtype))


NATIVE = SimpleNamespace(
    fp4_quantize=lambda x, scale, codes, sf, *rest: write(codes, sf),
    block_scale_interleave_sm100=lambda sf, out: write(out),
)


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    module = ops.defining_module()
    patch = pytest.MonkeyPatch()
    patch.setattr(JitSpec, "build_and_load", lambda self: NATIVE)
    patch.setattr(module, "get_compute_capability", lambda device: (12, 0))
    patch.setattr(module, "device_support_pdl", lambda device: False)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.Tensor, "cuda", lambda self: self)
    library = torch.library.Library("hearth", "IMPL")
    for name in ALL_OPS:
        definition = ops._DEFINITIONS[name](ops.raw_function(name), ops.Traits.of(flashinfer.__version__))
        if not ops.exists(f"hearth::{name}"):
            ops._define(name, definition)
        library.impl(name, definition.real, "CPU")
    yield
    patch.undo()


def hearth_call(name):
    """The opaque call, over our own op whatever else is installed."""
    return ops._CALLS[name](ops.raw_function(name), ops.resolve(f"hearth::{name}"))


def describe(result):
    tensors = result if isinstance(result, tuple) else (result,)
    return [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in tensors]


def same(name, shape, *args, column_major=False, dtype=torch.bfloat16, **kwargs):
    """Fake and real agree: in shapes, strides, dtypes, or in refusing."""

    def make():
        if column_major:
            return torch.ones((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).transpose(-2, -1)
        return torch.ones(shape, dtype=dtype)

    try:
        real = describe(ops.raw_function(name)(make(), *args, **kwargs))
    except (RuntimeError, AssertionError) as error:
        real = type(error)
    with FakeTensorMode():
        fakes = [torch.ones(a.shape) if isinstance(a, torch.Tensor) else a for a in args]
        try:
            fake = describe(hearth_call(name)(make(), *fakes, **kwargs))
        except (RuntimeError, ValueError):
            fake = None
    if isinstance(real, type):
        assert fake is None
    else:
        assert fake == real


SHAPES = st.tuples(st.lists(st.integers(1, 5), max_size=2), st.integers(2, 300), st.integers(1, 40))


@RELAXED
@given(SHAPES, st.sampled_from([16, 32]), st.sampled_from(LAYOUTS), st.booleans())
def test_fp4_quantize_row_major(shape, vec, layout, ue8m0):
    batch, rows, blocks = shape
    flags = {"sf_use_ue8m0": ue8m0, "is_sf_swizzled_layout": layout[0], "is_sf_8x4_layout": layout[1]}
    same("fp4_quantize", (*batch, rows, blocks * vec), torch.ones(1), vec, **flags)


@RELAXED
@given(SHAPES, st.sampled_from([16, 32]), st.sampled_from(LAYOUTS))
def test_fp4_quantize_column_major(shape, vec, layout):
    batch, columns, blocks = shape
    flags = {"is_sf_swizzled_layout": layout[0], "is_sf_8x4_layout": layout[1]}
    same("fp4_quantize", (*batch, blocks * vec, columns), torch.ones(1), vec, column_major=True, **flags)


@RELAXED
@given(SHAPES, st.sampled_from(list(Layout)), st.booleans())
def test_nvfp4_quantize(shape, layout, column_major):
    batch, rows, blocks = shape
    size = (*batch, blocks * 16, rows) if column_major else (*batch, rows, blocks * 16)
    enum = ops._layout_enum()(layout.value)
    same("nvfp4_quantize", size, torch.ones(1), sfLayout=enum, column_major=column_major)


@RELAXED
@given(SHAPES, st.sampled_from(list(Layout)))
def test_mxfp4_quantize(shape, layout):
    batch, rows, blocks = shape
    takes_layout = "sfLayout" in inspect.signature(ops.raw_function("mxfp4_quantize")).parameters
    more = {"sfLayout": ops._layout_enum()(layout.value)} if takes_layout else {}
    same("mxfp4_quantize", (*batch, rows, blocks * 32), **more)


@RELAXED
@given(
    st.lists(st.integers(1, 300), min_size=2, max_size=2),
    st.integers(0, 4),
    st.sampled_from([torch.uint8, torch.bfloat16]),
)
def test_block_scale_interleave(shape, experts, dtype):
    same("block_scale_interleave", ([experts] if experts else []) + shape, dtype=dtype)


@pytest.mark.parametrize("shape", [(1, 6144), (16, 6144), (100, 2048), (129, 64), (2, 7, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("column_major", [False, True])
def test_opcheck(shape, layout, column_major):
    x = torch.randn(shape, dtype=torch.bfloat16)
    if column_major:
        x = x.transpose(-2, -1).contiguous().transpose(-2, -1)
        if x.shape[-2] % 16:
            x = torch.randn(128, shape[-1], dtype=torch.bfloat16).t().contiguous().t()
    flags = {"is_sf_swizzled_layout": layout[0], "is_sf_8x4_layout": layout[1], "enable_pdl": False}
    torch.library.opcheck(ops.resolve("hearth::fp4_quantize"), (x, torch.ones(1)), flags)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("nvfp4_quantize", (torch.randn(9, 64), torch.ones(1), 1, 16, None)),
        ("mxfp4_quantize", (torch.randn(9, 128), 0)),
        ("block_scale_interleave", (torch.randint(0, 255, (5, 9, 7), dtype=torch.uint8),)),
    ],
)
def test_opcheck_of_the_others(name, args):
    torch.library.opcheck(ops.resolve(f"hearth::{name}"), args)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_call_is_the_direct_call(backend, dynamic):
    torch._dynamo.reset()
    call = hearth_call("fp4_quantize")

    def forward(x, scale):
        codes, scales = call(x, scale, is_sf_swizzled_layout=False)
        return codes, scales.view(torch.float8_e4m3fn).float() * 2

    compiled = torch.compile(forward, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (1, 16, 300):
        x = torch.randn(rows, 128, dtype=torch.bfloat16)
        for got, want in zip(compiled(x, torch.ones(1)), forward(x, torch.ones(1)), strict=True):
            assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_an_eager_call_goes_past_the_dispatcher():
    opaque = []
    call = ops._when_traced(ops.raw_function("fp4_quantize"), lambda *a, **k: opaque.append(a))
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    assert describe(call(x, torch.ones(1))) == describe(ops.raw_function("fp4_quantize")(x, torch.ones(1)))
    assert opaque == []


def test_fake_tensors_and_keyword_inputs_go_to_the_op():
    """The stand-in's raw function would take fake tensors too, so the calls are counted."""
    opaque = []

    def op(*args, **kwargs):
        opaque.append(type(args[0]) if args else "by name")
        return hearth_call("fp4_quantize")(*args, **kwargs)

    call = ops._when_traced(ops.raw_function("fp4_quantize"), op)
    x, scale = torch.randn(16, 64, dtype=torch.bfloat16), torch.ones(1)
    want = describe(call(x, scale))
    assert describe(call(input=x, global_scale=scale)) == want
    with FakeTensorMode() as mode:
        assert describe(call(mode.from_tensor(x), mode.from_tensor(scale))) == want
    assert opaque == ["by name", FakeTensor]


@pytest.mark.parametrize("name", ALL_OPS)
def test_what_is_installed_is_opaque_to_dynamo(name):
    """Whole graph, with the op as one node in it."""
    torch._dynamo.reset()
    call = ops._when_traced(ops.raw_function(name), hearth_call(name))
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    x = torch.randn(32, 64, dtype=torch.bfloat16)
    if name == "block_scale_interleave":
        x = torch.zeros(128, 4, dtype=torch.uint8)
    args = (x, torch.ones(1)) if name in ("fp4_quantize", "nvfp4_quantize") else (x,)
    torch.compile(lambda *a: call(*a), fullgraph=True, backend=backend)(*args)
    assert f"hearth.{name}.default" in graphs[0]


def test_shapes_stay_symbolic_in_rows():
    """A dynamic row count is not pinned by the fake: its scales' rows are a formula of it."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(300, 6144, dtype=torch.bfloat16), symbolic_context=context)
    with mode:
        codes, scales = ops.resolve("hearth::fp4_quantize")(x)
    assert isinstance(codes.shape[0], torch.SymInt)
    assert isinstance(scales.shape[0], torch.SymInt)
    assert int(scales.shape[1]) == 384
    assert not [g for g in mode.shape_env.guards if "Eq" in str(g.expr)]
    assert int(scales.shape[0]) == 384


def test_registering_twice_changes_nothing():
    first = dict(ops.register())
    assert dict(ops.register()) == first
    assert tuple(first) == ALL_OPS


def test_the_installed_sound_op_is_used_instead_of_ours():
    op = ops.fp4_quantize_op()
    assert op.qualname == ("flashinfer::fp4_quantize" if NEW else "hearth::fp4_quantize")
    assert ops.register()["fp4_quantize"].qualname == op.qualname
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    assert describe(op.call(x, torch.ones(1), enable_pdl=False)) == describe(op.raw(x, torch.ones(1)))


def test_arguments_that_cannot_cross_go_to_the_raw_function():
    x = torch.randn(128, 64, dtype=torch.bfloat16)
    shuffled = hearth_call("nvfp4_quantize")(x, torch.ones(1), do_shuffle=True)
    assert describe(shuffled) == describe(
        ops.raw_function("nvfp4_quantize")(x, torch.ones(1), do_shuffle=True)
    )
    if NEW:
        off = hearth_call("fp4_quantize")(x, torch.ones(1), nvfp4_4over6=None)
        assert describe(off) == describe(ops.raw_function("fp4_quantize")(x, torch.ones(1)))
        sf = torch.zeros(128, 4, dtype=torch.uint8)
        out = torch.empty(512, dtype=torch.uint8)
        assert hearth_call("block_scale_interleave")(sf, out=out) is out


def test_an_unsound_builtin_op_is_left_alone():
    """0.6.12 to 0.6.18 pass enable_pdl into is_global_scale_inversed; their op has no recipe code."""
    library = torch.library.Library("hearthtest", "DEF")
    library.define("old(Tensor input, Tensor? global_scale=None, bool? enable_pdl=None) -> Tensor")
    patch = pytest.MonkeyPatch()
    patch.setattr(ops, "BUILTIN_OP", "hearthtest::old")
    assert ops.exists("hearthtest::old")
    assert not ops.builtin_is_sound()
    patch.undo()
    assert ops.builtin_is_sound() is NEW
