"""All pieces of a value, put together again, are a view of it: ``cat(list(x))`` is ``x`` in another shape.

Models write this to treat one sample after another. If the samples are cut, a view sends nothing, while slices would
gather them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.language.size import slice_bounds
from shardc.program.node import arguments, operand
from shardc.program.program import Program

from ..emitter import Results

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Piece:
    """``source`` from ``start`` to ``end`` along a dim; with ``drops_dim`` the piece lacks that dim."""

    source: fx.Node
    dim: int
    start: int
    end: int
    drops_dim: bool = False

    @staticmethod
    def of(program: Program, node: fx.Node) -> _Piece | None:
        """A value as a piece of its source; None for other values."""
        maker: Any = node.args[0] if node.target is operator.getitem else node
        if maker.target not in (aten.slice.Tensor, aten.select.int, aten.unbind.int, *_SPLITS):
            return None
        given, source = arguments(maker), operand(maker)
        shape = program.type(source).shape
        dim = given["dim"] % len(shape)
        if maker.target in _SPLITS:
            ends = [0]
            for type_ in program.types(maker):
                assert type_ is not None
                ends.append(ends[-1] + type_.shape[dim])
            at = int(str(node.args[1]))
            return _Piece(source, dim, ends[at], ends[at + 1])
        if maker.target is aten.slice.Tensor:
            start, end, step = slice_bounds(given["start"], given["end"], given["step"], shape[dim])
            return _Piece(source, dim, start, end) if step == 1 else None
        at = int(str(node.args[1] if maker is not node else given["index"])) % shape[dim]
        return _Piece(source, dim, at, at + 1, drops_dim=True)


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def cat(program: Program, node: fx.Node) -> Results:
    """The source of consecutive pieces, with their dim merged into that of ``cat``."""
    first = _all_of(program, arguments(node)["tensors"])
    if first is None or program.type(node).dtype != program.type(first.source).dtype:
        return None
    dim = arguments(node)["dim"] % len(program.type(node).shape)
    if not first.drops_dim:
        return first.source if first.dim == dim else None
    moved = _moved(program, node, first.source, first.dim, dim)
    return program.emit(aten.reshape.default, moved, list(program.type(node).shape), like=node)


def stack(program: Program, node: fx.Node) -> Results:
    """The source of consecutive pieces, with a dim over the pieces where ``stack`` puts it.

    Chunks that the model itself stacks stay, since it then combines them, which is cheaper than a sum over a cut dim.
    """
    tensors = arguments(node)["tensors"]
    first = _all_of(program, tensors)
    if first is None or len({program.type(each) for each in tensors}) > 1:
        return None
    if not first.drops_dim and program.source(node).phase == "forward":
        return None
    source, shape = first.source, program.type(first.source).shape
    if not first.drops_dim:
        split = [*shape[: first.dim], len(tensors), first.end, *shape[first.dim + 1 :]]
        source = program.emit(aten.reshape.default, source, split, like=node)
    return _moved(program, node, source, first.dim, arguments(node)["dim"] % len(program.type(node).shape))


def slice_of_padded(program: Program, node: fx.Node) -> Results:
    """A slice of a padded value without other readers is the value with other padding.

    Models shift labels by one position in this way. A rank then needs only one position of its neighbour.
    """
    padded, piece = operand(node), _Piece.of(program, node)
    if piece is None or padded.target is not aten.constant_pad_nd.default or len(padded.users) > 1:
        return None
    given, shape = arguments(padded), program.type(padded).shape
    at, pads = 2 * (len(shape) - 1 - piece.dim), list(given["pad"])
    if at >= len(pads):
        return None
    length = shape[piece.dim] - pads[at] - pads[at + 1]
    new = pads[at] - piece.start, pads[at + 1] - (shape[piece.dim] - piece.end)
    if min(new) < -length or length + sum(new) < 0:
        return None
    pads[at : at + 2] = new
    args = (given["self"], pads, given["value"])
    return program.insert(aten.constant_pad_nd.default, args, program.type(node), like=node)


def _all_of(program: Program, tensors: Sequence[fx.Node]) -> _Piece | None:
    """The first of the pieces if together they are one source from beginning to end; None otherwise."""
    pieces = [_Piece.of(program, each) for each in tensors]
    first, at = pieces[0], 0
    for piece in pieces:
        if first is None or piece is None or piece.start != at:
            return None
        if (piece.source, piece.dim, piece.drops_dim) != (first.source, first.dim, first.drops_dim):
            return None
        at = piece.end
    return first if first is not None and at == program.type(first.source).shape[first.dim] else None


def _moved(program: Program, node: fx.Node, x: fx.Node, dim: int, to: int) -> fx.Node:
    """``x`` with a dim moved to another place."""
    order = [i for i in range(len(program.type(x).shape)) if i != dim]
    order.insert(to, dim)
    return x if order == sorted(order) else program.emit(aten.permute.default, x, order, like=node)
