"""Softmax over a cut dim: local exponentials, and a maximum and a sum of each row that are reduced."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import fx

from shardc.program.node import arguments
from shardc.program.program import Program

from ..emitter import Decomposition, Emitter

aten = torch.ops.aten


def _moved(count: int, program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """``count`` all_reduces of one number a row of the softmax's dim."""
    type_ = program.type(node)
    return 2 * count * type_.nbytes // max(1, type_.shape[arguments(node)["dim"]])


def _exponentials(emit: Emitter) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Shift ``x`` by its maximum; the shifted, its exponentials, and their sum along the dim."""
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
    """Make ``exp(y)``, which a backward takes times a number a row, of the exponentials that are there."""
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
    aten._log_softmax.default: Decomposition(_log_softmax, partial(_moved, 2)),
    aten._softmax.default: Decomposition(_softmax, partial(_moved, 2)),
    aten._log_softmax_backward_data.default: Decomposition(_log_softmax_backward, partial(_moved, 1)),
    aten._softmax_backward_data.default: Decomposition(_softmax_backward, partial(_moved, 1)),
}
