"""Ops that capture writes as others, by torch's own decompositions, which keep every dim that may be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._decomp import get_decompositions

from shardc.foreach import foreach_ops
from shardc.traced import TRACED_AS

aten = torch.ops.aten

EXPANDED = (
    aten.addr,
    aten.aminmax,
    aten.block_diag,
    aten._chunk_cat,
    aten.dist,
    aten.isin,
    aten.narrow_copy,
    aten.norm,
    aten.renorm,
    aten.trace,
    aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """For each of the ops, and of those that are traced as others, the function that computes it."""
    found: dict[Any, Callable[..., Any]] = get_decompositions(EXPANDED)
    return found | foreach_ops() | TRACED_AS
