"""Triangles of matrices as a choice by row and column, so that each rank makes only its own rows or columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.program.program import Program

from ..emitter import Emitter, Rewrite

aten = torch.ops.aten


def _triangle(program: Program, node: fx.Node) -> fx.Node:
    """The elements on one side of a diagonal, zero elsewhere."""
    emit = Emitter(program, node)
    given, (*_, rows, columns) = emit.given, emit.shape(node)
    row = emit(aten.unsqueeze.default, emit(aten.arange.start, given["diagonal"], given["diagonal"] + rows), 1)
    column = emit(aten.arange.default, columns)
    inside = emit(aten.ge.Tensor if node.target is aten.triu.default else aten.le.Tensor, column, row)
    zero = emit(aten.scalar_tensor.default, 0, dtype=emit.type(node).dtype)
    return emit(aten.where.self, inside, given["self"], zero)


TRIANGLES: dict[Any, Rewrite] = dict.fromkeys((aten.triu.default, aten.tril.default), _triangle)
