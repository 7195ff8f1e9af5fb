"""Tensors out of nothing: every dim is free, and its size becomes local."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardc.rule import rule

aten = torch.ops.aten


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory before anything wrote to it: what reads it has no value."""
    return torch.empty(shape, dtype=dtype, device="meta")


for op in (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format):
    rule(op, "-> ...", sizes=0)
for op in (aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default):
    rule(op, "_ -> ...", sizes=1)

# Where an element stands decides its value.
for op in (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default):
    rule(op, "-> 1")
for op in (aten.eye.default, aten.eye.m):
    rule(op, "-> 1 1")
rule(aten.scalar_tensor.default, "-> ")
