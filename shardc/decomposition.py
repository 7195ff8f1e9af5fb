"""Ops that capture writes as others, by torch's own decompositions, which keep every dim that may be cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
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
    aten._weight_norm_interface,
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """For each of the ops, and of those that are traced as others, the function that computes it."""
    found: dict[Any, Callable[..., Any]] = get_decompositions(EXPANDED)
    return found | foreach_ops() | TRACED_AS


@contextlib.contextmanager
def resampling_whole() -> Iterator[None]:
    """Inside, an image is enlarged by one op, not by torch's lookups of every pixel: a cut image needs edges alone.

    Made before the python dispatcher, which finds those lookups among an op's python kernels.
    """
    names = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"]
    names += [f"{name}{ndim}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for ndim in (1, 2, 3)]
    ops = [getattr(getattr(aten, name), overload) for name in names for overload in ("default", "vec")]
    before = [dict(op.py_kernels) for op in ops]
    for op in ops:
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
            op.py_kernels.pop(key, None)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in zip(ops, before, strict=True):
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
