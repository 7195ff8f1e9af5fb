"""Means and losses as sums and divisions. A sum over cut rows is a partial sum; a mean is not.

Numbers of 2 bytes are summed and divided in float32, as torch does inside a mean: 2 bytes may not hold their sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from shardc.ops.index import scatter_add_at, scatter_added_at
from shardc.ops.reduction import NARROW, wide_dtype
from shardc.program.node import arguments, operand, operands
from shardc.program.program import Program

from ..emitter import Emitter, Results, Rewrite, one_along

aten = torch.ops.aten

EACH, MEAN, SUM = 0, 1, 2  # torch's numbers for a loss's reduction


def _mean(program: Program, node: fx.Node) -> Results:
    """The sum over the dims, divided by the number of elements that it adds."""
    emit, source, given = Emitter(program, node), operand(node), arguments(node)
    dims = given.get("dim") or list(range(len(program.type(source).shape)))
    keep, dtype = bool(given.get("keepdim")), program.type(node).dtype
    total = emit(aten.sum.dim_IntList, source, dims, keep, dtype=wide_dtype(dtype))
    count = program.type(source).numel // max(1, program.type(total).numel)
    return emit.cast(emit(aten.div.Tensor, total, count), dtype)


def _mean_loss(program: Program, node: fx.Node) -> Results:
    """A mean is the sum divided by the number of elements or rows; in backward the incoming gradient is divided."""
    emit, given = Emitter(program, node), arguments(node)
    if given["reduction"] != MEAN:
        return None
    if program.type(node).dtype in NARROW and "grad_output" not in given:
        return _summed_loss(program, node)
    given["reduction"] = SUM
    if node.target in ROW_LOSSES_BACKWARD:
        shape = program.type(node).shape
        count = shape[0] if len(shape) == 2 else 1
    else:
        shapes = [program.type(tensor).shape for tensor in operands(node) if tensor is not None]
        count = math.prod(torch.broadcast_shapes(*shapes))
    if "grad_output" in given:
        given["grad_output"] = emit(aten.div.Tensor, given["grad_output"], count)
        return emit(node.target, *given.values())
    return emit(aten.div.Tensor, emit(node.target, *given.values()), count)


def _summed_loss(program: Program, node: fx.Node) -> Results:
    """A loss that is not 0 for inputs of 0, as the sum of its elements: padding then adds nothing."""
    emit, given = Emitter(program, node), arguments(node)
    reduction, given["reduction"] = given["reduction"], EACH
    if reduction == EACH:
        return None
    losses = emit(node.target, *given.values())
    shape = emit.shape(losses)
    total = emit.sum(losses, range(len(shape)))
    if reduction == MEAN:
        total = emit(aten.div.Tensor, total, math.prod(shape))
    return emit.cast(total, program.type(node).dtype)


def _nll_loss(program: Program, node: fx.Node) -> Results:
    """The mean, the sum or each of -w[target] * x[row, target[row]] over the rows whose target is not ignored.

    ``x`` is ``[rows, classes, *more rows]``; w is 1 without weights. The mean is divided by the sum of the weights.
    """
    emit, given = Emitter(program, node), arguments(node)
    reduction = given["reduction"]
    if len(program.type(given["self"]).shape) < 2:
        return None
    x = _without_dim_of_one(program, given["self"])
    counted, safe, weight = _targets(emit, x)
    picked = emit(aten.squeeze.dim, emit(aten.gather.default, x, 1, emit(aten.unsqueeze.default, safe, 1)), 1)
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=program.type(x).dtype)
    picked = emit(aten.where.self, counted, picked, zero)
    losses = emit(aten.neg.default, emit(aten.mul.Tensor, picked, weight))
    rows = range(len(emit.shape(safe)))
    count = emit.sum(weight, rows)
    if reduction == EACH:
        return _shaped(emit, losses, emit.shape(given["target"])), count
    total = emit.sum(losses, rows)
    return emit.cast(emit(aten.div.Tensor, total, count) if reduction == MEAN else total, emit.type(x).dtype), count


def _nll_loss_backward(program: Program, node: fx.Node) -> Results:
    """The gradient of each row at the class of its target, 0 elsewhere; rows and classes may be cut."""
    emit, given = Emitter(program, node), arguments(node)
    gradient, shape = given["grad_output"], program.type(given["self"]).shape
    if len(shape) < 2:
        return None
    counted, safe, weight = _targets(emit, _without_dim_of_one(program, given["self"]))
    if given["reduction"] == MEAN:
        gradient = emit(aten.div.Tensor, gradient, given["total_weight"])
    elif given["reduction"] == EACH:
        gradient = _shaped(emit, gradient, emit.shape(safe))
    each = emit(aten.neg.default, gradient if given["weight"] is None else emit(aten.mul.Tensor, weight, gradient))
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=emit.type(each).dtype)
    each = emit.cast(
        emit(aten.where.self, counted, each, zero), program.type(node).dtype
    )  # rows that do not count give 0, even if the total weight is 0
    place, value = emit(aten.unsqueeze.default, safe, 1), emit(aten.unsqueeze.default, each, 1)
    return _shaped(emit, emit(scatter_add_at, place, value, emit(aten.arange.default, shape[1]), 1), shape)


def _log_softmax_backward(program: Program, node: fx.Node) -> Results:
    """``g - exp(y) * sum(g)`` of a cross entropy, whose ``g`` is one number a row, at the target.

    The gradient of the logits then takes one tensor of their size, not three.
    """
    given = arguments(node)
    gradient, y = given["grad_output"], given["output"]
    while gradient.target in (aten.reshape.default, aten._to_copy.default):
        gradient = operand(gradient)
    shape = program.type(node).shape
    if gradient.target is not scatter_add_at or program.type(gradient).shape != shape:
        return None
    dim = given["dim"] % len(shape)
    index, values, rows, at = gradient.args
    if program.type(values).shape != one_along(dim, shape) or at != dim:
        return None
    emit = Emitter(program, node)
    values = emit.cast(values, program.type(y).dtype)
    odds = emit(aten.mul.Tensor, emit(aten.exp.default, y), emit(aten.neg.default, values))
    return emit.cast(emit(scatter_added_at, odds, index, values, rows, dim), program.type(node).dtype)


def _scatter_add(program: Program, node: fx.Node) -> Results:
    """``scatter_add`` into zeros, the gradient of a gather, becomes ``scatter_add_at``."""
    emit, given = Emitter(program, node), arguments(node)
    zeros, shape = given["self"], program.type(node).shape
    is_zeros = zeros.target is aten.full.default and zeros.args[1] == 0
    dim = given["dim"] % max(1, len(shape))
    if not is_zeros or not shape or not emit.shape(given["index"]) == emit.shape(given["src"]) == one_along(dim, shape):
        return None
    return emit(scatter_add_at, given["index"], given["src"], emit(aten.arange.default, shape[dim]), dim)


def _without_dim_of_one(program: Program, x: fx.Node) -> fx.Node:
    """The logits ``[N, C, L]`` that torch reshaped to ``[N, C, 1, L]``; others as they are."""
    shape = program.type(x).shape
    if x.target is not aten.reshape.default or program.type(operand(x)).shape != (*shape[:2], *shape[3:]):
        return x
    return operand(x)


def _shaped(emit: Emitter, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """A value in a shape; the value itself if it has that shape."""
    return x if emit.shape(x) == shape else emit(aten.reshape.default, x, list(shape))


def _targets(emit: Emitter, x: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """A mask of the rows of ``x`` that count, and the target and weight of each row, both 0 where it does not count."""
    given, type_ = emit.given, emit.type(x)
    dtype, target = type_.dtype, _shaped(emit, given["target"], (type_.shape[0], *type_.shape[2:]))
    counted = emit(aten.ne.Scalar, target, given["ignore_index"])
    safe = emit(aten.where.self, counted, target, emit(aten.scalar_tensor.default, 0, dtype=torch.int64))
    if given["weight"] is None:
        return counted, safe, emit(aten._to_copy.default, counted, dtype=dtype)
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=dtype)
    return counted, safe, emit(aten.where.self, counted, emit(aten.index.Tensor, given["weight"], [safe]), zero)


ROW_LOSSES_BACKWARD = (aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
MEAN_LOSSES = (
    aten.mse_loss.default, aten.mse_loss_backward.default, aten.soft_margin_loss_backward.default,
    aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default, aten.huber_loss.default,
    aten.huber_loss_backward.default, aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
    *ROW_LOSSES_BACKWARD,
)  # fmt: skip
SUMMED_LOSSES = (
    aten.binary_cross_entropy_with_logits.default, aten.multi_margin_loss.default, aten.soft_margin_loss.default,
)  # fmt: skip
LOSSES: dict[Any, Rewrite] = {
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
    **dict.fromkeys(MEAN_LOSSES, _mean_loss),
    **dict.fromkeys(SUMMED_LOSSES, _summed_loss),
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _nll_loss),
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    **dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), _nll_loss_backward),
    aten.scatter_add.default: _scatter_add,
}
