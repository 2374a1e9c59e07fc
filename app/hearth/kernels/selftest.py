"""Does the FP4 quantizer on this GPU write the right bytes? Compared with a reference in plain PyTorch.

A library for another architecture fails without a word: the call returns, its outputs hold whatever was in
memory, and under CUDA-graph capture the graph is simply empty. So outputs are poisoned first, and a
replayed graph is checked like a direct call. Seen on an H200 (shared facts: wrong-arch AOT is silent; the
sm_90 kernels are empty).

The reference follows FlashInfer's `quantization_utils.cuh` (cvt_warp_fp16_to_fp4): per 16 values one e4m3
scale, then e2m1 codes, two in a byte, the first in the low half.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

BLOCK = 16
POISON = 0xA5
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_SHAPES = ((16, 6144), (100, 512), (2048, 2048))
# The kernel uses approximate reciprocals, so values next to a rounding boundary may fall on its other side.
_CODES_EQUAL = 0.995
_SCALES_EQUAL = 0.999

Quantize = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class SelfTest:
    """The answer: ok, fail or skip, and why in one line."""

    status: Literal["ok", "fail", "skip"]
    reason: str


def self_test(quantize: Quantize | None = None) -> SelfTest:
    """Quantize random data on every visible GPU, directly and in a replayed CUDA graph, and compare.

    `quantize(x, global_scale) -> (codes, swizzled scales)`; by default the FlashInfer function that the
    engine calls, with compiling switched off. Says skip, with the reason, where there is no torch, GPU or
    FlashInfer.
    """
    try:
        import torch
    except ModuleNotFoundError:
        return SelfTest("skip", "torch isn't installed in this Python")
    if not torch.cuda.is_available():
        return SelfTest("skip", "no GPU is visible")
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    try:
        function = quantize or _flashinfer_quantize()
    except ModuleNotFoundError as error:
        return SelfTest("skip", f"FlashInfer isn't installed: {error}")
    return _all_devices(function)


def _flashinfer_quantize() -> Quantize:
    from flashinfer import fp4_quantize

    def quantize(x: Any, global_scale: Any) -> tuple[Any, Any]:
        codes, scales = fp4_quantize(
            x, global_scale, sf_vec_size=BLOCK, sf_use_ue8m0=False, is_sf_swizzled_layout=True
        )
        return codes, scales

    return quantize


def _all_devices(quantize: Quantize) -> SelfTest:
    import torch

    count = torch.cuda.device_count()
    for device in range(count):
        with torch.cuda.device(device):
            for shape in _SHAPES:
                problem = _case(quantize, shape)
                if problem:
                    return SelfTest("fail", f"GPU {device}, {shape[0]}x{shape[1]}: {problem}")
    return SelfTest("ok", f"{len(_SHAPES)} shapes, direct and in a graph, on {count} GPU(s)")


def _case(quantize: Quantize, shape: tuple[int, int]) -> str | None:
    """One shape on the current device; None where all is right. Whatever it raises is the answer."""
    try:
        return check_direct(quantize, shape, "cuda") or check_graph(quantize, shape)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def check_direct(quantize: Quantize, shape: tuple[int, int], device: str) -> str | None:
    """Call once, with the allocator's free memory poisoned before; what is wrong, or None."""
    x, scale = random_input(shape, device, seed=1)
    expected = reference_quantize(x, scale)
    _poison_allocator(expected, device)
    got = quantize(x, scale)
    _synchronize(device)
    return compare(got, expected, shape)


def check_graph(quantize: Quantize, shape: tuple[int, int]) -> str | None:
    """Capture a call, poison its outputs, replay it on other data; what is wrong, or None."""
    import torch

    x, scale = random_input(shape, "cuda", seed=2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = quantize(x, scale)
    fresh, _ = random_input(shape, "cuda", seed=3)
    x.copy_(fresh)
    expected = reference_quantize(x, scale)
    for output in got:
        output.view(torch.uint8).fill_(POISON)
    graph.replay()
    torch.cuda.synchronize()
    problem = compare(got, expected, shape)
    return f"in a replayed CUDA graph: {problem}" if problem else None


def _synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def _poison_allocator(like: tuple[Any, Any], device: str) -> None:
    """Leave blocks of the outputs' sizes, full of one byte, where the allocator takes the next ones from."""
    import torch

    sizes = [output.numel() for output in like for _ in range(8)]
    blocks = [torch.full((size,), POISON, dtype=torch.uint8, device=device) for size in sizes]
    _synchronize(device)
    del blocks


def random_input(shape: tuple[int, int], device: str, seed: int) -> tuple[Any, Any]:
    """bf16 data of `shape` (rows, columns: a multiple of 16) and its global scale (float32, one value).

    Some blocks are zero and some values huge, as activations have them.
    """
    import torch

    generator = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[:, :BLOCK] = 0
    x[::7, BLOCK] *= 100
    x = x.to(torch.bfloat16).to(device)
    scale = (_E2M1_MAX * _E4M3_MAX / x.abs().max().float()).reshape(1)
    return x, scale


def reference_quantize(x: Any, global_scale: Any) -> tuple[Any, Any]:
    """NVFP4 in plain PyTorch: codes (rows, columns/2) and scales in the swizzled 128x4 layout, uint8 both."""
    codes, scales = reference_linear(x, global_scale)
    return codes, swizzle(scales)


def reference_linear(x: Any, global_scale: Any) -> tuple[Any, Any]:
    """The same with scales as a (rows, columns/16) uint8 matrix of e4m3 bytes."""
    import torch

    rows, columns = x.shape
    blocks = x.float().reshape(rows, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    wanted = (global_scale * (largest / _E2M1_MAX)).clamp(max=_E4M3_MAX)
    scales = wanted.to(torch.float8_e4m3fn)
    step = scales.float() / global_scale
    scaled = torch.where(step > 0, blocks / step, torch.zeros_like(blocks))
    codes = e2m1_codes(scaled).reshape(rows, columns)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed, scales.view(torch.uint8).reshape(rows, columns // BLOCK)


def e2m1_codes(values: Any) -> Any:
    """Round float32 to e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6): ties to the even code, larger ones saturate."""
    import torch

    size = values.abs()
    low = (0.25, 1.25, 2.5, 5.0)  # a tie here goes down, to an even code
    high = (0.75, 1.75, 3.5)  # and here up
    code = torch.zeros_like(size, dtype=torch.uint8)
    for edge in low:
        code += (size > edge).to(torch.uint8)
    for edge in high:
        code += (size >= edge).to(torch.uint8)
    sign = torch.signbit(values).to(torch.uint8) << 3
    return code | sign


def swizzle(scales: Any) -> Any:
    """(rows, blocks) scale bytes to the 128x4 layout of the tensor cores, zero-padded to whole tiles.

    Tiles of 128 rows by 4 blocks follow each other; within one, row r is at 16*(r % 32) + 4*(r // 32).
    """
    import torch

    rows, blocks = scales.shape
    tall, wide = -(-rows // 128) * 128, -(-blocks // 4) * 4
    padded = torch.zeros((tall, wide), dtype=torch.uint8, device=scales.device)
    padded[:rows, :blocks] = scales
    tiles = padded.reshape(tall // 128, 4, 32, wide // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().reshape(tall, wide)


def unswizzle(scales: Any, rows: int, blocks: int) -> Any:
    """The inverse of `swizzle`, without the padding (which the kernels may leave unwritten)."""
    wide = -(-blocks // 4) * 4
    tall = scales.numel() // wide
    tiles = scales.reshape(tall // 128, wide // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(tall, wide)[:rows, :blocks]


def compare(got: tuple[Any, Any], expected: tuple[Any, Any], shape: tuple[int, int]) -> str | None:
    """What is wrong with codes and swizzled scales, or None. Unwritten memory is named as such."""
    import torch

    rows, blocks = shape[0], shape[1] // BLOCK
    codes, wanted_codes = got[0].view(torch.uint8), expected[0]
    if tuple(codes.shape) != tuple(wanted_codes.shape):
        return f"codes have shape {tuple(codes.shape)} where {tuple(wanted_codes.shape)} is right"
    if got[1].numel() != expected[1].numel():
        return f"{got[1].numel()} scale bytes where {expected[1].numel()} are right"
    scales = unswizzle(got[1].view(torch.uint8).reshape(-1), rows, blocks)
    wanted_scales = unswizzle(expected[1].reshape(-1), rows, blocks)
    untouched = min(_share(codes == POISON), _share(scales == POISON))
    if untouched > 0.9:
        return "the kernel wrote nothing: the library has no code for this GPU"
    right = scales == wanted_scales
    if _share(right) < _SCALES_EQUAL:
        return f"only {_share(right):.1%} of the scale bytes are right"
    return _codes_problem(codes, wanted_codes, right.repeat_interleave(BLOCK // 2, dim=1))


def _codes_problem(codes: Any, wanted: Any, scale_is_right: Any) -> str | None:
    same = min(_share((codes & 15) == (wanted & 15)), _share((codes >> 4) == (wanted >> 4)))
    if same < _CODES_EQUAL:
        return f"only {same:.1%} of the codes are right"
    for shift in (0, 4):
        away = (_level(codes >> shift) - _level(wanted >> shift)).abs() * scale_is_right
        if away.max().item() > 1:
            return f"a code is {away.max().item()} steps away from the right one"
    return None


def _level(codes: Any) -> Any:
    """The position of a 4-bit code on the number line, -7 to 7."""
    size = (codes & 7).int()
    return size * (1 - 2 * ((codes >> 3) & 1).int())


def _share(mask: Any) -> float:
    return float(mask.float().mean().item())
