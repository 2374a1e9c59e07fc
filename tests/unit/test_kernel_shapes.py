"""The size formulas of FlashInfer's FP4 outputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.kernels.shapes import (
    Layout,
    Traits,
    interleaved_size,
    layout_of,
    packed_shape,
    round_up,
    scale_shape,
)

OLD, NEW = Traits.of("0.6.3"), Traits.of("0.7.2.post1")
ROWS = st.integers(1, 5000)
BLOCKS = st.integers(1, 600)


@pytest.mark.parametrize(
    ("version", "pads", "linear"),
    [
        ("0.5.3", False, False),
        ("0.6.3", False, False),
        ("0.6.6", False, False),
        ("0.6.7.post2", False, True),
        ("0.6.8.post1", True, True),
        ("0.6.12", True, True),
        ("0.7.2.post1", True, True),
    ],
)
def test_traits_change_where_the_sources_change(version: str, pads: bool, linear: bool) -> None:
    assert Traits.of(version) == Traits(pads, linear)


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ((True, False), Layout.SWIZZLED_128X4),
        ((True, True), Layout.SWIZZLED_8X4),
        ((False, False), Layout.LINEAR),
        ((False, True), Layout.LINEAR),
    ],
)
def test_flags_name_a_layout(flags: tuple[bool, bool], layout: Layout) -> None:
    assert layout_of(*flags) is layout


@pytest.mark.parametrize(
    ("shape", "vec", "layout", "scales"),
    [
        ((1, 6144), 16, Layout.SWIZZLED_128X4, (128, 384)),
        ((129, 6144), 16, Layout.SWIZZLED_128X4, (256, 384)),
        ((9, 2048), 16, Layout.SWIZZLED_8X4, (16, 128)),
        ((9, 2048), 32, Layout.LINEAR, (9, 64)),
        ((2, 3, 7, 64), 16, Layout.LINEAR, (42, 4)),
        ((2, 65, 64), 16, Layout.SWIZZLED_128X4, (256, 4)),
    ],
)
def test_known_shapes(shape: tuple[int, ...], vec: int, layout: Layout, scales: tuple[int, int]) -> None:
    assert scale_shape(shape, vec, layout, OLD) == scale_shape(shape, vec, layout, NEW) == scales


def test_padding_columns_by_version() -> None:
    """K = 1040 has 65 blocks: new versions pad to 68 columns, old ones fold them or fail (seen in 0.6.3)."""
    assert scale_shape((128, 1040), 16, Layout.SWIZZLED_128X4, NEW) == (128, 68)
    with pytest.raises(ValueError, match="8704 scale bytes into rows of 65"):
        scale_shape((128, 1040), 16, Layout.SWIZZLED_128X4, OLD)
    assert scale_shape((128, 32), 16, Layout.SWIZZLED_128X4, OLD) == (256, 2)


@given(ROWS, BLOCKS, st.sampled_from([16, 32]), st.sampled_from(list(Layout)))
def test_no_bytes_appear_or_vanish(rows: int, blocks: int, vec: int, layout: Layout) -> None:
    new = scale_shape((rows, blocks * vec), vec, layout, NEW)
    assert new[0] >= rows
    assert new[1] >= blocks
    assert new[0] % layout.row_tile == 0
    assert layout is Layout.LINEAR or new[1] % 4 == 0
    try:
        old = scale_shape((rows, blocks * vec), vec, layout, OLD)
    except ValueError:
        assert blocks % 4 != 0
        return
    assert old[0] * old[1] == new[0] * new[1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), BLOCKS, st.sampled_from(list(Layout)))
def test_batch_dimensions_fold_into_rows(batch: list[int], blocks: int, layout: Layout) -> None:
    rows = 1
    for size in batch:
        rows *= size
    assert scale_shape((*batch, blocks * 16), 16, layout, NEW) == scale_shape(
        (rows, blocks * 16), 16, layout, NEW
    )
    assert packed_shape((*batch, blocks * 16)) == (*batch, blocks * 8)


@given(st.integers(1, 12), ROWS, BLOCKS)
def test_interleaved_scales_are_padded_per_expert(experts: int, rows: int, columns: int) -> None:
    one = interleaved_size((rows, columns))
    assert one == round_up(rows, 128) * round_up(columns, 4)
    assert interleaved_size((experts, rows, columns)) == experts * one


@given(st.integers(1, 10**6), st.integers(1, 1000))
def test_round_up_is_the_next_multiple(value: int, multiple: int) -> None:
    up = round_up(value, multiple)
    assert up % multiple == 0
    assert 0 <= up - value < multiple
