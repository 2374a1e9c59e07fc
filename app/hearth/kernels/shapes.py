"""Shapes of FlashInfer's FP4 outputs, from the shapes of the inputs: arithmetic only.

Everything works on plain integers and on torch's symbolic ones alike (only `+ * // % ==` are used), so
the same formulas serve fake implementations and tests. Sources: flashinfer/fp4_quantization.py of 0.6.3,
flashinfer/quantization/fp4_quantization.py of 0.6.7, 0.6.8 and 0.7.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from packaging.version import Version


class Layout(IntEnum):
    """How block scales lie in memory; the values are those of `flashinfer.SfLayout`."""

    SWIZZLED_128X4 = 0
    SWIZZLED_8X4 = 1
    LINEAR = 2

    @property
    def row_tile(self) -> int:
        """Rows of scales are padded to a multiple of this."""
        return {Layout.SWIZZLED_128X4: 128, Layout.SWIZZLED_8X4: 8, Layout.LINEAR: 1}[self]


@dataclass(frozen=True)
class Traits:
    """What differs between FlashInfer versions, as far as shapes go."""

    pads_columns: bool
    """Scales of a swizzled layout keep their padding columns (else they are folded into the rows)."""
    nvfp4_linear: bool
    """`nvfp4_quantize` obeys the linear layout (else it swizzles 128x4 without a word)."""

    @classmethod
    def of(cls, version: str) -> Traits:
        """The traits of a FlashInfer version. Raises InvalidVersion."""
        release = Version(version).release
        return cls(pads_columns=release >= (0, 6, 8), nvfp4_linear=release >= (0, 6, 7))


def layout_of(swizzled: bool, eight_by_four: bool) -> Layout:
    """The layout that `fp4_quantize`'s two flags mean; without swizzling the second one is ignored."""
    if not swizzled:
        return Layout.LINEAR
    return Layout.SWIZZLED_8X4 if eight_by_four else Layout.SWIZZLED_128X4


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return (value + multiple - 1) // multiple * multiple


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the codes for a row-major input [..., K]: [..., K/2], two 4-bit codes a byte."""
    return (*shape[:-1], shape[-1] // 2)


def scale_shape(shape: Sequence[int], vec: int, layout: Layout, traits: Traits) -> tuple[int, int]:
    """Shape of the scales for a row-major input [..., K], one scale byte for `vec` values of a row.

    Batch dimensions are folded into the rows. Raises ValueError where this FlashInfer can't shape its own
    result (before 0.6.8: a swizzled layout whose K / vec is no multiple of 4, for most row counts).
    """
    rows, columns = prod(shape[:-1]), shape[-1] // vec
    if layout is Layout.LINEAR:
        return rows, columns
    padded_rows, padded_columns = round_up(rows, layout.row_tile), round_up(columns, 4)
    if traits.pads_columns or columns % 4 == 0:
        return padded_rows, padded_columns
    size = padded_rows * padded_columns
    if size % columns != 0:
        raise ValueError(f"this FlashInfer can't shape {size} scale bytes into rows of {columns}")
    return size // columns, columns


def interleaved_size(shape: Sequence[int]) -> int:
    """Elements of `block_scale_interleave`'s flat result for scales [rows, columns] or [experts, .., ..]."""
    experts = shape[0] if len(shape) == 3 else 1
    return experts * round_up(shape[-2], 128) * round_up(shape[-1], 4)
