"""Reductions over a cut dim as sums, maxima and minima, so that results move between ranks and not the dim.

The ops here reduce to something else: a position, a logarithm of a sum, a norm, a variance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from shardc.language.size import plain
from shardc.ops.reduction import wide_dtype
from shardc.program.node import arguments
from shardc.program.program import Program

from ..emitter import NEVER, Decomposition, Emitter, Form

aten = torch.ops.aten


def _reduced(emit: Emitter) -> tuple[fx.Node, list[int], bool]:
    """The operand, the dims that are reduced, and whether they stay as dims of one element."""
    x, dim = emit.node.args[0], emit.given.get("dim")
    assert isinstance(x, fx.Node)
    ndim = len(emit.shape(x))
    dims = [dim] if isinstance(dim, int) else dim or range(ndim)
    return x, sorted(each % ndim for each in dims), bool(emit.given.get("keepdim"))


def _squeezed(emit: Emitter, result: fx.Node, dims: list[int], keepdim: bool) -> fx.Node:
    return result if keepdim else emit(aten.squeeze.dims, result, dims)


# The position of the largest or smallest element.


def _extreme(emit: Emitter, is_largest: bool) -> tuple[fx.Node, fx.Node]:
    """The extreme element and its first position, or that of the first nan."""
    x, dims, keepdim = _reduced(emit)
    best = emit(aten.amax.default if is_largest else aten.amin.default, x, dims, True)
    is_best = emit(aten.eq.Tensor, x, best)
    if emit.type(x).dtype.is_floating_point:
        is_best = emit(aten.logical_or.default, is_best, emit(aten.ne.Tensor, x, x))
    last = emit(aten.scalar_tensor.default, math.prod(emit.shape(x)), dtype=torch.int64)
    position = emit(aten.amin.default, emit(aten.where.self, is_best, _positions(emit, x, dims), last), dims, keepdim)
    return _squeezed(emit, best, dims, keepdim), position


def _positions(emit: Emitter, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    """The index of each element among those that are reduced together, in a shape that broadcasts."""
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
    mean = _mean(emit, x, dims)
    shifted = emit(aten.sub.Tensor, x, mean)
    total = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, shifted, shifted), dims, keepdim)
    variance = emit(aten.div.Tensor, total, max(0, count - (1 if correction is None else correction)))
    return variance, _squeezed(emit, mean, dims, keepdim)


def _norm(emit: Emitter) -> fx.Node:
    """A norm of order 2, 1 or infinity."""
    x, dims, keepdim = _reduced(emit)
    order, size = emit.given["ord"], emit(aten.abs.default, x)
    if math.isinf(order):
        return emit(aten.amax.default if order > 0 else aten.amin.default, size, dims, keepdim)
    if order == 1:
        return emit(aten.sum.dim_IntList, size, dims, keepdim)
    return emit(aten.sqrt.default, emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, size, size), dims, keepdim))


def _truth(emit: Emitter, op: Any) -> fx.Node:
    """Any or all, as the largest or smallest of 0 and 1."""
    x, dims, keepdim = _reduced(emit)
    numbers = emit.cast(emit(aten.ne.Scalar, x, 0), torch.uint8)
    return emit(aten.ne.Scalar, emit(op, numbers, dims, keepdim), 0)


def _moved(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """Twice the bytes of the results, reduced; complex numbers and masks have no order."""
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


def _softmax_moved(count: int, program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """``count`` all_reduces of one number a row of the softmax's dim."""
    type_ = program.type(node)
    return 2 * count * type_.nbytes // max(1, plain(type_.shape[arguments(node)["dim"]]))


def _exponentials(emit: Emitter) -> tuple[fx.Node, fx.Node, fx.Node]:
    """``x`` less its maximum, the exponentials of that, and their sum along the dim."""
    x, dims = emit.given["self"], [emit.given["dim"]]
    shifted = emit(aten.sub.Tensor, x, emit(aten.amax.default, x, dims, True))
    odds = emit(aten.exp.default, shifted)
    return shifted, odds, emit.sum(odds, dims, keepdim=True)


def _log_softmax(emit: Emitter) -> fx.Node:
    shifted, odds, total = _exponentials(emit)
    for user in list(emit.node.users):
        if user.target is aten.exp.default:
            _take_odds(emit.program, user, odds, total)
    return emit(aten.sub.Tensor, shifted, emit.cast(emit(aten.log.default, total), emit.type(shifted).dtype))


def _take_odds(program: Program, node: fx.Node, odds: fx.Node, total: fx.Node) -> None:
    """Make ``exp(y)``, which backward multiplies by a number a row, from the exponentials of forward."""
    users = list(node.users)
    if len(users) == 1 and users[0].target is aten.mul.Tensor:
        emit = Emitter(program, users[0])
        row = next((arg for arg in users[0].args if isinstance(arg, fx.Node) and arg is not node), node)
        if emit.shape(row) == emit.shape(total):
            with program.graph.inserting_before(users[0]):
                share = emit.cast(emit(aten.div.Tensor, row, total), emit.type(row).dtype)
                program.replace(users[0], emit(aten.mul.Tensor, odds, share))
            return
    emit = Emitter(program, node)
    with program.graph.inserting_before(node):
        program.replace(node, emit.cast(emit(aten.div.Tensor, odds, total), emit.type(node).dtype))


def _softmax(emit: Emitter) -> fx.Node:
    shifted, odds, total = _exponentials(emit)
    return emit.cast(emit(aten.div.Tensor, odds, total), emit.type(shifted).dtype)


def _log_softmax_backward(emit: Emitter) -> fx.Node:
    """``g - exp(y) * sum(g)``."""
    gradient, y = emit.given["grad_output"], emit.given["output"]
    total = emit(aten.sum.dim_IntList, gradient, [emit.given["dim"]], True)
    return emit(aten.sub.Tensor, gradient, emit(aten.mul.Tensor, emit(aten.exp.default, y), total))


def _softmax_backward(emit: Emitter) -> fx.Node:
    """``y * (g - sum(g * y))``."""
    gradient, y = emit.given["grad_output"], emit.given["output"]
    total = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, gradient, y), [emit.given["dim"]], True)
    return emit(aten.mul.Tensor, y, emit(aten.sub.Tensor, gradient, total))


SOFTMAXES = {
    aten._log_softmax.default: Decomposition(_log_softmax, partial(_softmax_moved, 2)),
    aten._softmax.default: Decomposition(_softmax, partial(_softmax_moved, 2)),
    aten._log_softmax_backward_data.default: Decomposition(_log_softmax_backward, partial(_softmax_moved, 1)),
    aten._softmax_backward_data.default: Decomposition(_softmax_backward, partial(_softmax_moved, 1)),
}


def _moved_of_channels(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """Two sums of one number a channel, reduced."""
    type_ = program.types(node)[0]
    assert type_ is not None, node
    return 4 * type_.shape[1] * type_.dtype.itemsize


def _batch_norm(emit: Emitter) -> list[fx.Node | None]:
    """Result, mean and inverse deviation; in the functional form also the new running mean and variance."""
    given, types = emit.given, emit.program.types(emit.node)
    stats = types[1]
    assert stats is not None and types[0] is not None
    x, count = emit.cast(given["input"], stats.dtype), _count(emit)
    mean, variance = _channel_moments(emit, x)
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, given["eps"]))
    weight, bias = (given[name] and emit.cast(given[name], stats.dtype) for name in ("weight", "bias"))
    y = _normalized(emit, x, weight, bias, mean, variance, given["eps"])
    results = [emit.cast(y, types[0].dtype), mean, inverse]
    if len(types) > 3:
        unbiased = emit(aten.mul.Tensor, variance, count / max(1, count - 1))
        results += [_moving(emit, "running_mean", mean), _moving(emit, "running_var", unbiased)]
    return list(results)


def _channel_moments(emit: Emitter, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Mean and variance of each channel. The mean is subtracted before squaring: far from zero that is more exact."""
    count = _count(emit)
    mean = emit(aten.div.Tensor, _sum(emit, x), count)
    shifted = emit(aten.sub.Tensor, x, _spread(emit, mean))
    squares, _ = _channel_sums(emit, shifted, shifted, emit(aten.zeros_like.default, mean))
    return mean, emit(aten.div.Tensor, squares, count)


def _channel_sums(emit: Emitter, gradient: fx.Node, x: fx.Node, mean: fx.Node) -> tuple[fx.Node, fx.Node]:
    """For each channel the sums of ``gradient * (x - mean)`` and of ``gradient``, in one kernel.

    It is the backward of a batch norm in eval mode, whose gradients of weight and bias are these sums.
    """
    one, is_training, is_given = emit(aten.ones_like.default, mean), False, [False, True, True]
    norm = aten.native_batch_norm_backward.default
    sums = emit(norm, gradient, x, one, mean, one, mean, one, is_training, 0.0, is_given)
    return emit.item(sums, 1), emit.item(sums, 2)


def _normalized(
    emit: Emitter, x: fx.Node, weight: Any, bias: Any, mean: fx.Node, variance: fx.Node, eps: float
) -> fx.Node:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` in one kernel; all but ``x`` have one number a channel."""
    norm = aten._native_batch_norm_legit_no_training.default
    return emit.item(emit(norm, x, weight, bias, mean, variance, 0.0, eps), 0)


def _moving(emit: Emitter, name: str, new: fx.Node) -> fx.Node:
    """A running statistic moved towards its new value."""
    old, momentum = emit.given[name], emit.given["momentum"]
    share = emit(aten.mul.Tensor, old, 1 - momentum)
    return emit.cast(emit(aten.add.Tensor, share, emit(aten.mul.Tensor, new, momentum)), emit.type(old).dtype)


def _batch_norm_backward(emit: Emitter) -> list[fx.Node | None]:
    """The gradients of input, weight and bias, as far as the op returns them.

    The gradient of the input is ``scale * (g - mean(g) - normal * mean(g * normal))``. Here ``g`` is the gradient of
    the output, ``normal`` the normalized input, and ``scale`` the weight divided by the standard deviation.
    """
    given, count = emit.given, _count(emit)
    mean, inverse = given["save_mean"], given["save_invstd"]
    stats = emit.type(mean).dtype
    gradient, x = (emit.cast(given[name], stats) for name in ("grad_out", "input"))
    products, of_bias = _channel_sums(emit, gradient, x, mean)
    of_weight, scale = emit(aten.mul.Tensor, products, inverse), inverse
    if given["weight"] is not None:
        scale = emit(aten.mul.Tensor, inverse, emit.cast(given["weight"], stats))
    share = emit(aten.div.Tensor, scale, -count)
    slope = emit(aten.mul.Tensor, emit(aten.mul.Tensor, share, of_weight), inverse)
    one, start = emit(aten.ones_like.default, mean), emit(aten.mul.Tensor, share, of_bias)
    line = _normalized(emit, x, slope, start, mean, one, 0.0)
    of_x = emit(aten.add.Tensor, emit(aten.mul.Tensor, gradient, _spread(emit, scale)), line)
    return _given_results(emit, of_x, of_weight, of_bias)


def _moved_of_groups(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """Two sums of one number for each group of each example, reduced."""
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
    """The gradients of input, weight and bias, as far as the op returns them."""
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
    """``x`` times the op's weight plus its bias, as far as it has them; a backward has no bias."""
    for op, name in ((aten.mul.Tensor, "weight"), (aten.add.Tensor, "bias")):
        if emit.given.get(name) is not None:
            x = emit(op, x, _spread(emit, emit.cast(emit.given[name], dtype)))
    return x


def _given_results(emit: Emitter, *gradients: fx.Node) -> list[fx.Node | None]:
    """The results that the op returns, in its dtypes."""
    pairs = zip(gradients, emit.program.types(emit.node), strict=True)
    return [None if type_ is None else emit.cast(gradient, type_.dtype) for gradient, type_ in pairs]


def _grouped(emit: Emitter, x: fx.Node) -> fx.Node:
    """``x`` of ``[n, (g c), ...]`` with the groups as a dim of their own."""
    batch, channels, *places = emit.shape(x)
    return emit(aten.reshape.default, x, [batch, emit.given["group"], channels // emit.given["group"], *places])


def _group_mean(emit: Emitter, grouped: fx.Node) -> fx.Node:
    return _mean(emit, grouped, range(2, len(emit.shape(grouped))))


def _moved_of_rows(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """Two sums a row, reduced; one for a norm without a mean."""
    given = arguments(node)
    rows = program.value_type(program.value(given["rstd"])) if "rstd" in given else program.types(node)[1]
    assert rows is not None, node
    return (2 if node.target in RMS_NORMS else 4) * rows.nbytes


def _row_norm(emit: Emitter) -> list[fx.Node | None]:
    """Result, mean and inverse deviation of each row; no mean for an RMS norm."""
    given, is_rms = emit.given, emit.node.target in RMS_NORMS
    x = emit.cast(given["input"], wide_dtype(emit.type(given["input"]).dtype))
    mean = None if is_rms else _row_mean(emit, x)
    shifted = x if mean is None else emit(aten.sub.Tensor, x, mean)
    variance = _row_mean(emit, emit(aten.mul.Tensor, shifted, shifted))
    eps = torch.finfo(emit.type(x).dtype).eps if given["eps"] is None else given["eps"]
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, eps))
    y = emit(aten.mul.Tensor, shifted, inverse)
    for op, name in ((aten.mul.Tensor, "weight"), (aten.add.Tensor, "bias")):
        y = y if given.get(name) is None else emit(op, y, given[name])
    return _given_results(emit, *(result for result in (y, mean, inverse) if result is not None))


def _row_norm_backward(emit: Emitter) -> list[fx.Node | None]:
    """The gradients of input, weight and bias, as far as the op returns them."""
    given, is_rms = emit.given, emit.node.target in RMS_NORMS
    wide = wide_dtype(emit.type(given["input"]).dtype)
    gradient, x = (emit.cast(given[name], wide) for name in ("grad_out", "input"))
    normal = emit(aten.mul.Tensor, x if is_rms else emit(aten.sub.Tensor, x, given["mean"]), given["rstd"])
    inner = gradient if given["weight"] is None else emit(aten.mul.Tensor, gradient, given["weight"])
    share = emit(aten.mul.Tensor, normal, _row_mean(emit, emit(aten.mul.Tensor, inner, normal)))
    of_x = emit(aten.sub.Tensor, inner if is_rms else emit(aten.sub.Tensor, inner, _row_mean(emit, inner)), share)
    rows = list(range(len(emit.shape(x)) - len(given["normalized_shape"])))
    totals = [emit(aten.mul.Tensor, gradient, normal), *([] if is_rms else [gradient])]
    totals = [emit(aten.sum.dim_IntList, total, rows) if rows else total for total in totals]
    return _given_results(emit, emit(aten.mul.Tensor, of_x, given["rstd"]), *totals)


def _row_mean(emit: Emitter, x: fx.Node) -> fx.Node:
    ndim = len(emit.shape(x))
    return _mean(emit, x, range(ndim - len(emit.given["normalized_shape"]), ndim))


def _mean(emit: Emitter, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    """The mean over dims, which stay as dims of one element."""
    count = math.prod(emit.shape(x)[dim] for dim in dims)
    return emit(aten.div.Tensor, emit(aten.sum.dim_IntList, x, list(dims), True), count)


def _count(emit: Emitter) -> int:
    """The number of elements of a channel."""
    shape = emit.shape(emit.given["input"])
    return math.prod(shape) // max(1, shape[1])


def _sum(emit: Emitter, x: fx.Node) -> fx.Node:
    return emit(aten.sum.dim_IntList, x, [dim for dim in range(len(emit.shape(x))) if dim != 1])


def _spread(emit: Emitter, channels: fx.Node) -> fx.Node:
    """One number a channel, in a shape that broadcasts to the input."""
    spare = len(emit.shape(emit.given["input"])) - 2
    return emit(aten.reshape.default, channels, [1, *emit.shape(channels), *[1] * spare])


RMS_NORMS = (aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default)
NORMALIZATIONS: dict[Any, Decomposition] = {
    **dict.fromkeys((aten.native_layer_norm.default, RMS_NORMS[0]), Decomposition(_row_norm, _moved_of_rows)),
    **dict.fromkeys(
        (aten.native_layer_norm_backward.default, RMS_NORMS[1]), Decomposition(_row_norm_backward, _moved_of_rows)
    ),
    aten.native_batch_norm.default: Decomposition(_batch_norm, _moved_of_channels),
    aten._native_batch_norm_legit_functional.default: Decomposition(_batch_norm, _moved_of_channels),
    aten._native_batch_norm_legit.no_stats: Decomposition(_batch_norm, _moved_of_channels),
    aten.native_batch_norm_backward.default: Decomposition(_batch_norm_backward, _moved_of_channels),
    aten.native_group_norm.default: Decomposition(_group_norm, _moved_of_groups),
    aten.native_group_norm_backward.default: Decomposition(_group_norm_backward, _moved_of_groups),
}
