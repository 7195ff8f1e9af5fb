"""mask_padding: where an op would see padding, it reads what leaves the op's result unchanged."""

from __future__ import annotations

from printed import after, block, value
from torch import Tensor

from shardc import Mesh, P

MESH = Mesh(dp=2)


def test_a_sum_over_an_uneven_dim_reads_zeros_beyond_its_end() -> None:
    assert after("mask_padding", lambda x: x.exp().sum(), MESH, {"x": P("dp")}, x=value(5)) == block(
        """
        x: f32[5@dp]
        exp: f32[5@dp] = exp(x)
        mask_padding: f32[5@dp] = mask_padding(exp, ("dp",), 0, 5, 1, 0)
        sum_1: f32[]{sum dp} = sum(mask_padding)
        all_reduce_dp: f32[] = all_reduce(sum_1, ("dp",), "sum")
        output: all_reduce_dp
        """
    )


def test_a_maximum_reads_what_is_below_all_numbers_and_an_even_dim_has_no_mask() -> None:
    def largest(x: Tensor) -> Tensor:
        return x.amax(0)

    uneven = after("mask_padding", largest, MESH, {"x": P("dp")}, x=value(5, 3))
    even = after("mask_padding", largest, MESH, {"x": P("dp")}, x=value(6, 3))
    assert 'mask_padding: f32[5@dp, 3] = mask_padding(x, ("dp",), 0, 5, 1, -inf)' in uneven
    assert "mask_padding" not in even


def test_an_input_is_padded_with_zeros_already() -> None:
    assert "mask_padding" not in after("mask_padding", lambda x: x.sum(), MESH, {"x": P("dp")}, x=value(5))
