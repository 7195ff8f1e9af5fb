"""Indexing along a cut dim as work on a rank's own positions: a lookup leaves an open sum, a write does not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.ops.index import add_at, gather_at, lookup_at, put_at, scatter_add_at, scatter_at
from shardc.program.node import ancestors, arguments, operand
from shardc.program.program import Program

from ..emitter import NEVER, Decomposition, Emitter, one_along, widened

aten = torch.ops.aten


def _index(emit: Emitter) -> fx.Node:
    """A lookup at positions along some dims."""
    return emit(lookup_at, emit.given["self"], *_places(emit))


def _select(emit: Emitter) -> fx.Node:
    """A lookup at one position."""
    return emit(lookup_at, emit.given["self"], *_place(emit, emit.shape(emit.given["self"])))


def _select_backward(emit: Emitter) -> fx.Node:
    """The gradient of a select's operand: zero except at the one position."""
    return emit(add_at, emit.given["grad_output"], *_place(emit, emit.shape(emit.node)))


def _index_put(emit: Emitter) -> fx.Node:
    """Values to add are first summed on their own, so that the sum may be open; others are written in place."""
    given = emit.given
    x, values = given["self"], given["values"]
    type_ = emit.program.infer(aten.index.Tensor, (x, given["indices"]), {})
    assert isinstance(type_, TensorType)
    if emit.shape(values) != type_.shape:
        values = emit(aten.expand.default, values, list(type_.shape))
    if given["accumulate"]:
        return emit(aten.add.Tensor, x, emit(add_at, values, *_places(emit)))
    return emit(put_at, x, values, *_places(emit))


def _gather(emit: Emitter) -> fx.Node:
    """An element for each entry of the index.

    In a log softmax it is gathered before the number of its row, the logarithm of a sum, is subtracted. So both sums
    over ranks go together, in one dtype: that of the sums of exponentials.
    """
    x, index = emit.given["self"], emit.given["index"]
    rows, dim = _along(emit, emit.shape(x))
    is_difference = x.target is aten.sub.Tensor and not x.kwargs and isinstance(x.args[1], fx.Node)
    shapes = [emit.shape(node) for node in (operand(x), operand(x, 1), index)] if is_difference else []
    row = one_along(dim, emit.shape(x))
    if shapes != [emit.shape(x), row, row]:
        return emit(gather_at, x, index, rows, dim)
    minuend, subtrahend = operand(x), operand(x, 1)
    for node in sorted((node for node in ancestors(index, rows) if minuend < node), reverse=True):
        minuend.append(node)
    with emit.program.graph.inserting_before(max(minuend, index, rows).next):
        picked = emit(gather_at, minuend, index, rows, dim, **widened(emit.type(minuend).dtype))
    return emit.cast(emit(aten.sub.Tensor, picked, subtrahend), emit.type(x).dtype)


def _scatter_add(emit: Emitter) -> fx.Node:
    """The sum is made on its own, then added."""
    given = emit.given
    along = _along(emit, emit.shape(given["self"]))
    return emit(aten.add.Tensor, given["self"], emit(scatter_add_at, given["index"], given["src"], *along))


def _scatter(emit: Emitter) -> fx.Node:
    """Each element is written to its place."""
    given = emit.given
    source = given.get("src")
    if source is None:
        dtype = emit.type(given["self"]).dtype
        source = emit(aten.full.default, list(emit.shape(given["index"])), given["value"], dtype=dtype)
    return emit(scatter_at, given["self"], given["index"], source, *_along(emit, emit.shape(given["self"])))


def _places(emit: Emitter) -> tuple[Any, ...]:
    """The indices, counted from 0, the positions of their dims, and the dims."""
    shape = emit.shape(emit.given["self"])
    indices = {dim: index for dim, index in enumerate(emit.given["indices"]) if index is not None}
    places = [emit(aten.remainder.Scalar, index, shape[dim]) for dim, index in indices.items()]
    return (*places, *(emit(aten.arange.default, shape[dim]) for dim in indices), tuple(indices))


def _place(emit: Emitter, shape: Sequence[int]) -> tuple[Any, ...]:
    """The index of a select, counted from 0, the positions of its dim, and the dim."""
    rows, dim = _along(emit, shape)
    index = emit(aten.scalar_tensor.default, emit.given["index"] % shape[dim], dtype=torch.int64)
    return index, rows, (dim,)


def _along(emit: Emitter, shape: Sequence[int]) -> tuple[fx.Node, int]:
    """The positions of the dim, and the dim."""
    dim = emit.given["dim"] % len(shape)
    return emit(aten.arange.default, shape[dim]), dim


# Bytes that move, of whole tensors.


def lookup_moves(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """The elements found, reduced; a mask has no sum."""
    type_ = program.type(node)
    return NEVER if type_.dtype == torch.bool else 2 * type_.nbytes


def _select_moves(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """The reductions of all selects along the dim, since one gather in their place would serve all of them."""
    selects = [user for user in operand(node).users if user.target is node.target and user.args[1] == node.args[1]]
    return min(NEVER, len(selects) * lookup_moves(program, node, factors))


def _put_moves(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """0 if the positions are cut; the values to write must be whole. An index_put may add."""
    if arguments(node).get("accumulate"):
        return _add_moves(program, node, factors)
    return 0 if any(factor.startswith("v") for factor in factors) and _is_full(program, node) else NEVER


def _add_moves(program: Program, node: fx.Node, factors: Collection[str]) -> int:
    """0 if only the positions are cut; the whole sum, reduced, if the values to add are."""
    type_ = program.type(node)
    if type_.dtype == torch.bool or not _is_full(program, node):
        return NEVER
    return 2 * type_.nbytes * any(factor.startswith("i") for factor in factors)


def _is_full(program: Program, node: fx.Node) -> bool:
    """Whether a scatter's index and source are as long as ``x`` on every dim but its own; an index_put has none."""
    given = arguments(node)
    if "indices" in given:
        return True
    tensors = [given[name] for name in ("self", "index", "src") if isinstance(given.get(name), fx.Node)]
    shapes = [program.value_type(program.value(tensor)).shape for tensor in tensors]
    if not shapes[0] or (len(shapes) == 3 and shapes[1] != shapes[2]):
        return False
    dim = given["dim"] % len(shapes[0])
    return len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1


INDEXING = {
    aten.gather.default: Decomposition(_gather, lookup_moves),
    aten.select.int: Decomposition(_select, _select_moves),
    aten.select_backward.default: Decomposition(_select_backward, lambda *_: 0),
    aten.scatter_add.default: Decomposition(_scatter_add, _add_moves),
    **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), Decomposition(_index, lookup_moves)),
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), Decomposition(_index_put, _put_moves)),
    **dict.fromkeys((aten.scatter.src, aten.scatter.value), Decomposition(_scatter, _put_moves)),
}
