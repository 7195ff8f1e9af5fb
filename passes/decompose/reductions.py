"""Reductions over a cut dim as sums, maxima and minima, so that results move between ranks and not the dim.

Each op here is reduced but is no sum, maximum or minimum itself: a position, a logarithm of a sum, a norm, a variance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from shardc.program.node import arguments
from shardc.program.program import Program

from ..emitter import NEVER, Decomposition, Emitter, Form

aten = torch.ops.aten


def _reduced(emit: Emitter) -> tuple[fx.Node, list[int], bool]:
    """The operand, the dims that are reduced, and whether they stay with one element."""
    x, dim = emit.node.args[0], emit.given.get("dim")
    assert isinstance(x, fx.Node)
    ndim = len(emit.shape(x))
    dims = [dim] if isinstance(dim, int) else dim or range(ndim)
    return x, sorted(each % ndim for each in dims), bool(emit.given.get("keepdim"))


def _squeezed(emit: Emitter, result: fx.Node, dims: list[int], keepdim: bool) -> fx.Node:
    return result if keepdim else emit(aten.squeeze.dims, result, dims)


# The position of the largest or smallest element.


def _extreme(emit: Emitter, is_largest: bool) -> tuple[fx.Node, fx.Node]:
    """The extreme element and the first position of it, or of the first nan."""
    x, dims, keepdim = _reduced(emit)
    best = emit(aten.amax.default if is_largest else aten.amin.default, x, dims, True)
    is_best = emit(aten.eq.Tensor, x, best)
    if emit.type(x).dtype.is_floating_point:
        is_best = emit(aten.logical_or.default, is_best, emit(aten.ne.Tensor, x, x))
    last = emit(aten.scalar_tensor.default, math.prod(emit.shape(x)), dtype=torch.int64)
    position = emit(aten.amin.default, emit(aten.where.self, is_best, _positions(emit, x, dims), last), dims, keepdim)
    return _squeezed(emit, best, dims, keepdim), position


def _positions(emit: Emitter, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    """The number of each element among those that are reduced together, to be broadcast."""
    shape, total, stride = emit.shape(x), None, 1
    for dim in reversed(dims):
        spread = [shape[dim] if i == dim else 1 for i in range(len(shape))]
        along = emit(aten.reshape.default, emit(aten.arange.default, shape[dim]), spread)
        along = along if stride == 1 else emit(aten.mul.Scalar, along, stride)
        total = along if total is None else emit(aten.add.Tensor, along, total)
        stride *= shape[dim]
    assert total is not None
    return total


# Sums of something else.


def _logsumexp(emit: Emitter) -> fx.Node:
    """An infinite maximum is not subtracted: infinity less itself is nan."""
    x, dims, keepdim = _reduced(emit)
    largest = emit(aten.amax.default, x, dims, True)
    is_infinite = emit(aten.eq.Scalar, emit(aten.abs.default, largest), math.inf)
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=emit.type(x).dtype)
    shift = emit(aten.where.self, is_infinite, zero, largest)
    total = emit(aten.sum.dim_IntList, emit(aten.exp.default, emit(aten.sub.Tensor, x, shift)), dims, True)
    return _squeezed(emit, emit(aten.add.Tensor, emit(aten.log.default, total), shift), dims, keepdim)


def _moments(emit: Emitter) -> tuple[fx.Node, fx.Node]:
    """Variance and mean."""
    x, dims, keepdim = _reduced(emit)
    count = math.prod(emit.shape(x)[dim] for dim in dims)
    correction = emit.given["correction"]
    mean = emit(aten.div.Tensor, emit(aten.sum.dim_IntList, x, dims, True), count)
    shifted = emit(aten.sub.Tensor, x, mean)
    total = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, shifted, shifted), dims, keepdim)
    variance = emit(aten.div.Tensor, total, max(0, count - (1 if correction is None else correction)))
    return variance, _squeezed(emit, mean, dims, keepdim)


def _norm(emit: Emitter) -> fx.Node:
    """Of order 2, 1 or infinity."""
    x, dims, keepdim = _reduced(emit)
    order, size = emit.given["ord"], emit(aten.abs.default, x)
    if math.isinf(order):
        return emit(aten.amax.default if order > 0 else aten.amin.default, size, dims, keepdim)
    if order == 1:
        return emit(aten.sum.dim_IntList, size, dims, keepdim)
    return emit(aten.sqrt.default, emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, size, size), dims, keepdim))


def _truth(emit: Emitter, op: Any) -> fx.Node:
    """The largest or smallest of 0 and 1."""
    x, dims, keepdim = _reduced(emit)
    numbers = emit.cast(emit(aten.ne.Scalar, x, 0), torch.uint8)
    return emit(aten.ne.Scalar, emit(op, numbers, dims, keepdim), 0)


def _moved(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """Every result, and about as much again, reduced; complex numbers and masks have no order."""
    dtype = program.value_type(program.operand_values(node)[0] or (node, 0)).dtype
    if dtype.is_complex or (dtype == torch.bool and node.target not in TRUTHS):
        return NEVER
    given = arguments(node)
    if "ord" in given and (given["dtype"] is not None or given["ord"] not in (1, 2, math.inf, -math.inf)):
        return NEVER
    return 4 * sum(type_.nbytes for type_ in program.types(node) if type_ is not None)


TRUTHS: dict[Any, Form] = {
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), lambda emit: _truth(emit, aten.amax.default)),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), lambda emit: _truth(emit, aten.amin.default)),
}
FORMS: dict[Any, Form] = {
    aten.argmax.default: lambda emit: _extreme(emit, is_largest=True)[1],
    aten.argmin.default: lambda emit: _extreme(emit, is_largest=False)[1],
    aten.max.dim: lambda emit: [*_extreme(emit, is_largest=True)],
    aten.min.dim: lambda emit: [*_extreme(emit, is_largest=False)],
    aten.logsumexp.default: _logsumexp,
    aten.var.correction: lambda emit: _moments(emit)[0],
    aten.std.correction: lambda emit: emit(aten.sqrt.default, _moments(emit)[0]),
    aten.var_mean.correction: lambda emit: [*_moments(emit)],
    aten.linalg_vector_norm.default: _norm,
    **TRUTHS,
}
REDUCTIONS = {op: Decomposition(form, _moved) for op, form in FORMS.items()}
