"""Indexing whose places are known is a view: rows in their own order, and each row several times."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.node import arguments, operand
from shardc.program import Program

from .emitter import Results, Rewrite

aten = torch.ops.aten


def _index(program: Program, node: fx.Node) -> Results:
    """Rows in their own order are the tensor, and each row ``n`` times is an expanded view of it."""
    given = arguments(node)
    source, repeats = given["self"], _repeats(program, given)
    if repeats is None:
        return None
    shape = program.type(source).shape
    each = program.emit(aten.unsqueeze.default, source, 1, like=node)
    several = program.emit(aten.expand.default, each, [shape[0], repeats, *shape[1:]], like=node)
    return program.emit(aten.reshape.default, several, [shape[0] * repeats, *shape[1:]], like=node)


def _index_put(program: Program, node: fx.Node) -> Results:
    """What is put on each row, or the sum of the ``n`` that are added to it."""
    given = arguments(node)
    target, values, repeats = given["self"], given["values"], _repeats(program, given)
    shape = program.type(target).shape
    if repeats is None or not (given["accumulate"] or repeats == 1):
        return None
    if program.type(values).shape != (shape[0] * repeats, *shape[1:]):
        return None
    if repeats > 1:
        several = program.emit(aten.reshape.default, values, [shape[0], repeats, *shape[1:]], like=node)
        values = program.emit(aten.sum.dim_IntList, several, [1], like=node)
    if not given["accumulate"] or _is_zero(target):
        return values
    return program.emit(aten.add.Tensor, target, values, like=node)


def put_by_mask(program: Program, node: fx.Node) -> Results:
    """One number put where a mask of leading dims says is a choice between the two, element by element."""
    given = arguments(node)
    x, values, (mask, *others) = given["self"], given["values"], given["indices"]
    if mask is None or any(others) or program.type(mask).dtype != torch.bool or program.type(values).numel != 1:
        return None
    shape, rest = program.type(mask).shape, len(program.type(x).shape) - len(program.type(mask).shape)
    if rest:
        mask = program.emit(aten.reshape.default, mask, [*shape, *[1] * rest], like=node)
    if program.type(values).shape:
        values = program.emit(aten.reshape.default, values, [], like=node)
    if given["accumulate"]:
        values = program.emit(aten.add.Tensor, x, values, like=node)
    return program.emit(aten.where.self, mask, values, x, like=node)


def _is_zero(node: fx.Node) -> bool:
    return node.target is aten.full.default and node.args[1:] == (0,)


def _repeats(program: Program, given: dict[str, Any]) -> int | None:
    """How often each row of the first dim is named, one after the other; None where other places are."""
    indices, size = given["indices"], program.type(given["self"]).shape[0]
    if len(indices) != 1 or not size:
        return None
    index, repeats = indices[0], program.type(indices[0]).numel // size
    if index.target is aten.floor_divide.default and index.args[1] == repeats:
        index = operand(index)
    elif repeats != 1:
        return None
    is_count = index.target is aten.arange.default and program.type(index).shape == (size * repeats,)
    return repeats if is_count else None


KNOWN_PLACES: dict[Any, Rewrite] = {aten.index.Tensor: _index, aten.index_put.default: _index_put}
