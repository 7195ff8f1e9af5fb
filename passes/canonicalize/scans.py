"""Sums from the end of a dim, as in gradients of ``cumsum``: one op in place of three."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.ops.reduction import logsumexp_from_end, sum_from_end
from shardc.program.node import arguments
from shardc.program.program import Program

from ..emitter import Rewrite

aten = torch.ops.aten
FROM_END: dict[Any, Any] = {
    aten.cumsum.default: sum_from_end,
    aten.logcumsumexp.default: logsumexp_from_end,
}


def _flip(program: Program, node: fx.Node) -> fx.Node | None:
    """The one op for ``flip(scan(flip(x)))`` along one dim, ``scan`` a cumsum or logcumsumexp; None for other flips."""
    outer, summed = arguments(node), arguments(node)["self"]
    if summed.target not in FROM_END or program.type(summed).dtype != program.type(node).dtype:
        return None
    scan = arguments(summed)
    flipped = scan["self"]
    if flipped.target is not aten.flip.default:
        return None
    ndim, inner = len(program.type(node).shape), arguments(flipped)
    x = inner["self"]
    dims = {dim % max(1, ndim) for dim in (*outer["dims"], *inner["dims"], scan["dim"])}
    if len(dims) > 1 or program.type(x).dtype != program.type(node).dtype:
        return None
    return program.emit(FROM_END[summed.target], x, dims.pop(), like=node)


SCANS: dict[Any, Rewrite] = {aten.flip.default: _flip}
