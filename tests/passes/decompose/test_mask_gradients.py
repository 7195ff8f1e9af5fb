"""Attention whose mask needs a gradient: numbers of one device, and rings in which keys alone go round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attending import BATCH, WIDTH, Attending, check_step, draw, kinds_sent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shardc import Mesh, P, Remat, Zero, compile
from shardc.api import Compiled

TOLERANCE = 1e-10
SHAPES = {
    "of heads": (1, 4, -2, -1), "of samples": (BATCH, 1, -2, -1), "of all": (BATCH, 4, -2, -1), "for all": (-2, -1),
    "one row": (1, 4, 1, -1), "one column": (1, 1, -2, 1), "of three dims": (4, -2, -1),
}  # fmt: skip


class Biased(Attending):
    """Its mask is a parameter."""

    def __init__(self, shape: str, queries: int, keys: int, **options: Any) -> None:
        super().__init__(is_causal=False, **options)
        sizes = {-2: queries, -1: keys}
        self.bias = nn.Parameter(torch.randn([sizes.get(size, size) for size in SHAPES[shape]]))

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, y, self.bias)


def check(model: nn.Module, mesh: Mesh, inputs: dict[str, Tensor], axis: str = "cp", **options: Any) -> Compiled:
    """The step must be that of one device, by a ring, and ranks gather no keys, values or masks in forward."""
    compiled = check_step(model, mesh, inputs, TOLERANCE, axis, **{"attention": "ring", **options})
    assert [kind for kind in kinds_sent(compiled) if "ring" in kind] == ["ring_attention"]
    backward = [kind for kind in kinds_sent(compiled, "backward") if "ring" in kind]
    assert backward == ["ring_attention_backward"]
    return compiled


@settings(max_examples=30)
@given(
    st.sampled_from([2, 3, 4]), st.integers(2, 13), st.none() | st.integers(2, 13), st.sampled_from([1, 2, 4]),
    st.sampled_from([*SHAPES]), st.sampled_from(["cp", "cp:zigzag"]),
)  # fmt: skip
def test_a_step_is_that_of_one_device(
    count: int, queries: int, keys: int | None, num_keys: int, shape: str, axis: str
) -> None:
    torch.manual_seed(0)
    model = Biased(shape, queries, keys or queries, num_keys=num_keys, scale=0.3).double()
    check(model, Mesh(cp=count), draw(queries, keys), axis)
