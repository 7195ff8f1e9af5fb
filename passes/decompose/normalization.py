"""Batch and group normalization over cut dims: local sums, and a few numbers a channel or a group that are reduced."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from shardc.program.node import arguments
from shardc.program.program import Program

from ..emitter import Decomposition, Emitter

aten = torch.ops.aten


def _moved_of_channels(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """Two sums of a number a channel, reduced."""
    type_ = program.types(node)[0]
    assert type_ is not None, node
    return 4 * type_.shape[1] * type_.dtype.itemsize


def _batch_norm(emit: Emitter) -> list[fx.Node | None]:
    """Result, mean and inverse deviation; of the functional form the new running mean and variance."""
    given, types = emit.given, emit.program.types(emit.node)
    x, stats = emit.given["input"], types[1]
    assert stats is not None and types[0] is not None
    wide, count = emit.cast(x, stats.dtype), _count(emit)
    mean = emit(aten.div.Tensor, _sum(emit, wide), count)
    shifted = emit(aten.sub.Tensor, wide, _spread(emit, mean))
    variance = emit(aten.div.Tensor, _sum(emit, emit(aten.mul.Tensor, shifted, shifted)), count)
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, given["eps"]))
    y = emit(aten.mul.Tensor, shifted, _spread(emit, inverse))
    results = [emit.cast(_affine(emit, y, stats.dtype), types[0].dtype), mean, inverse]
    if len(types) > 3:
        unbiased = emit(aten.mul.Tensor, variance, count / max(1, count - 1))
        results += [_moving(emit, "running_mean", mean), _moving(emit, "running_var", unbiased)]
    return list(results)


def _moving(emit: Emitter, name: str, new: fx.Node) -> fx.Node:
    """A running statistic moved towards its new value."""
    old, momentum = emit.given[name], emit.given["momentum"]
    share = emit(aten.mul.Tensor, old, 1 - momentum)
    return emit.cast(emit(aten.add.Tensor, share, emit(aten.mul.Tensor, new, momentum)), emit.type(old).dtype)


def _batch_norm_backward(emit: Emitter) -> list[fx.Node | None]:
    """The gradients of input, weight and bias, those that the op gives."""
    given, count = emit.given, _count(emit)
    stats = emit.type(given["save_mean"]).dtype
    gradient, x = (emit.cast(given[name], stats) for name in ("grad_out", "input"))
    scale = _spread(emit, given["save_invstd"])
    shifted = emit(aten.mul.Tensor, emit(aten.sub.Tensor, x, _spread(emit, given["save_mean"])), scale)
    of_bias, of_weight = _sum(emit, gradient), _sum(emit, emit(aten.mul.Tensor, gradient, shifted))
    shares = [_spread(emit, emit(aten.div.Tensor, total, count)) for total in (of_bias, of_weight)]
    inner = emit(aten.sub.Tensor, gradient, shares[0])
    inner = emit(aten.sub.Tensor, inner, emit(aten.mul.Tensor, shifted, shares[1]))
    of_x = _affine(emit, emit(aten.mul.Tensor, inner, scale), stats)
    return _given_results(emit, of_x, of_weight, of_bias)


def _moved_of_groups(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """Two sums of a number for each group of each example, reduced."""
    x = program.value_type(program.value(arguments(node)["input"]))
    return 4 * x.shape[0] * arguments(node)["group"] * x.dtype.itemsize


def _group_norm(emit: Emitter) -> list[fx.Node | None]:
    """Result, mean and inverse deviation."""
    given, types = emit.given, emit.program.types(emit.node)
    assert types[0] is not None and types[1] is not None
    stats = types[1].dtype
    x = _grouped(emit, emit.cast(given["input"], stats))
    mean = _group_mean(emit, x)
    shifted = emit(aten.sub.Tensor, x, mean)
    variance = _group_mean(emit, emit(aten.mul.Tensor, shifted, shifted))
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, given["eps"]))
    normal = emit(aten.reshape.default, emit(aten.mul.Tensor, shifted, inverse), list(types[0].shape))
    y = _affine(emit, normal, stats)
    mean, inverse = (emit(aten.reshape.default, stat, list(types[1].shape)) for stat in (mean, inverse))
    return [emit.cast(y, types[0].dtype), mean, inverse]


def _group_norm_backward(emit: Emitter) -> list[fx.Node | None]:
    """The gradients of input, weight and bias, those that the op gives."""
    given, stats = emit.given, emit.type(emit.given["mean"]).dtype
    shape = list(emit.shape(given["input"]))
    column = [shape[0], given["group"], *[1] * (len(shape) - 1)]
    mean, inverse = (emit(aten.reshape.default, given[name], column) for name in ("mean", "rstd"))
    gradient, x = (emit.cast(given[name], stats) for name in ("grad_out", "input"))
    normal = emit(aten.mul.Tensor, emit(aten.sub.Tensor, _grouped(emit, x), mean), inverse)
    of_weight = _sum(emit, emit(aten.mul.Tensor, gradient, emit(aten.reshape.default, normal, shape)))
    of_bias = _sum(emit, gradient)
    inner = _grouped(emit, _affine(emit, gradient, stats))
    share = emit(aten.mul.Tensor, normal, _group_mean(emit, emit(aten.mul.Tensor, inner, normal)))
    inner = emit(aten.sub.Tensor, emit(aten.sub.Tensor, inner, _group_mean(emit, inner)), share)
    of_x = emit(aten.reshape.default, emit(aten.mul.Tensor, inner, inverse), shape)
    return _given_results(emit, of_x, of_weight, of_bias)


def _affine(emit: Emitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Times the weight and plus the bias of the op, as far as it has them; a backward has no bias."""
    for op, name in ((aten.mul.Tensor, "weight"), (aten.add.Tensor, "bias")):
        if emit.given.get(name) is not None:
            x = emit(op, x, _spread(emit, emit.cast(emit.given[name], dtype)))
    return x


def _given_results(emit: Emitter, *gradients: fx.Node) -> list[fx.Node | None]:
    """The gradients that the op gives, in its dtypes."""
    pairs = zip(gradients, emit.program.types(emit.node), strict=True)
    return [None if type_ is None else emit.cast(gradient, type_.dtype) for gradient, type_ in pairs]


def _grouped(emit: Emitter, x: fx.Node) -> fx.Node:
    """``n (g c) places`` with the groups as a dim of their own."""
    batch, channels, *places = emit.shape(x)
    return emit(aten.reshape.default, x, [batch, emit.given["group"], channels // emit.given["group"], *places])


def _group_mean(emit: Emitter, grouped: fx.Node) -> fx.Node:
    shape = emit.shape(grouped)
    total = emit(aten.sum.dim_IntList, grouped, list(range(2, len(shape))), True)
    return emit(aten.div.Tensor, total, math.prod(shape[2:]))


def _count(emit: Emitter) -> int:
    """How many elements a channel has."""
    shape = emit.shape(emit.given["input"])
    return math.prod(shape) // max(1, shape[1])


def _sum(emit: Emitter, x: fx.Node) -> fx.Node:
    return emit(aten.sum.dim_IntList, x, [dim for dim in range(len(emit.shape(x))) if dim != 1])


def _spread(emit: Emitter, channels: fx.Node) -> fx.Node:
    """Numbers of channels, to be broadcast to the input."""
    spare = len(emit.shape(emit.given["input"])) - 2
    return emit(aten.reshape.default, channels, [1, *emit.shape(channels), *[1] * spare])


NORMALIZATIONS: dict[Any, Decomposition] = {
    aten.native_batch_norm.default: Decomposition(_batch_norm, _moved_of_channels),
    aten._native_batch_norm_legit_functional.default: Decomposition(_batch_norm, _moved_of_channels),
    aten._native_batch_norm_legit.no_stats: Decomposition(_batch_norm, _moved_of_channels),
    aten.native_batch_norm_backward.default: Decomposition(_batch_norm_backward, _moved_of_channels),
    aten.native_group_norm.default: Decomposition(_group_norm, _moved_of_groups),
    aten.native_group_norm_backward.default: Decomposition(_group_norm_backward, _moved_of_groups),
}
