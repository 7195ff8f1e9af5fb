"""Means and losses as sums and divisions: a sum over cut rows is a partial sum, a mean is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardc.node import arguments, operand, operands
from shardc.program import Program

aten = torch.ops.aten

Results = fx.Node | tuple[fx.Node | None, ...] | None  # what stands for a node; None leaves it
Rewrite = Callable[[Program, fx.Node], Results]

EACH, MEAN, SUM = 0, 1, 2  # torch's numbers for a loss's reduction


def _mean(program: Program, node: fx.Node) -> Results:
    """The sum over the dims, divided by how many elements it adds."""
    source, given = operand(node), arguments(node)
    dims = given.get("dim") or list(range(len(program.type(source).shape)))
    keep, dtype = bool(given.get("keepdim")), program.type(node).dtype
    total = program.emit(aten.sum.dim_IntList, source, dims, keep, like=node, dtype=dtype)
    count = program.type(source).numel // max(1, program.type(total).numel)
    return program.emit(aten.div.Tensor, total, count, like=node)


def _mean_loss(program: Program, node: fx.Node) -> Results:
    """A mean is the sum divided by the number of elements; its gradient is divided before."""
    given = arguments(node)
    if given["reduction"] != MEAN:
        return None
    shapes = [program.type(each).shape for each in operands(node) if each is not None]
    count, given["reduction"] = math.prod(torch.broadcast_shapes(*shapes)), SUM
    if "grad_output" in given:
        given["grad_output"] = program.emit(aten.div.Tensor, given["grad_output"], count, like=node)
        return program.emit(node.target, *given.values(), like=node)
    return program.emit(aten.div.Tensor, program.emit(node.target, *given.values(), like=node), count, like=node)


def _nll_loss(program: Program, node: fx.Node) -> Results:
    """The mean, the sum or each of -x[row, target[row]] over the rows whose target counts."""
    given = arguments(node)
    x, reduction = given["self"], given["reduction"]
    if len(program.type(x).shape) != 2 or given["weight"] is not None:
        return None
    emit = _emitter(program, node)
    counted, safe = _counted_targets(program, node)
    picked = emit(aten.squeeze.dim, emit(aten.gather.default, x, 1, emit(aten.unsqueeze.default, safe, 1)), 1)
    dtype = program.type(x).dtype
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=dtype)
    losses = emit(aten.where.self, counted, emit(aten.neg.default, picked), zero)
    count = emit(aten.sum.dim_IntList, counted, [0], False, dtype=dtype)
    if reduction == EACH:
        return losses, count
    total = emit(aten.sum.dim_IntList, losses, [0])
    return (emit(aten.div.Tensor, total, count) if reduction == MEAN else total), count


def _nll_loss_backward(program: Program, node: fx.Node) -> Results:
    """The gradient of each row, where the column is its target; pointwise, so that rows and columns may be cut."""
    given = arguments(node)
    x, gradient = given["self"], given["grad_output"]
    if len(program.type(x).shape) != 2 or given["weight"] is not None:
        return None
    emit = _emitter(program, node)
    counted, safe = _counted_targets(program, node)
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=program.type(x).dtype)
    if given["reduction"] == MEAN:
        gradient = emit(aten.div.Tensor, gradient, given["total_weight"])
    each = emit(aten.where.self, counted, emit(aten.neg.default, gradient), zero)
    classes = emit(aten.arange.default, program.type(x).shape[1])
    is_target = emit(aten.eq.Tensor, classes, emit(aten.unsqueeze.default, safe, 1))
    return emit(aten.where.self, is_target, emit(aten.unsqueeze.default, each, 1), zero)


def _counted_targets(program: Program, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Which rows count, and their targets, with 0 where a row does not."""
    emit, given = _emitter(program, node), arguments(node)
    counted = emit(aten.ne.Scalar, given["target"], given["ignore_index"])
    zero = emit(aten.scalar_tensor.default, 0, dtype=torch.int64)
    return counted, emit(aten.where.self, counted, given["target"], zero)


def _emitter(program: Program, node: fx.Node) -> Callable[..., fx.Node]:
    """``program.emit`` with the source of a node."""

    def emit(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return program.emit(op, *args, like=node, **kwargs)

    return emit


MEAN_LOSSES = (
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default,
)
LOSSES: dict[Any, Rewrite] = {
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
    **dict.fromkeys(MEAN_LOSSES, _mean_loss),
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
}
