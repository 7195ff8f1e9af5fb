"""Indexing where each rank has some of the positions of a dim: what is at other positions is no work of its.

The ops take, for every dim that is indexed, the numbers of the positions that are here: an ``arange`` cut as the dim
is. Over all pieces the sum of what ``lookup_at`` and ``gather_at`` find is what the whole has; ``add_at`` and
``scatter_add_at`` make the pieces of what is added to zeros; ``scatter_added_at``, ``put_at`` and ``scatter_at`` change
what belongs here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.ops.embedding import local_rows
from shardc.ops.index import along_names, index_specs, lookup_names, num_lookup_dims
from shardc.rule import Call, Rule, make_rule, rule

aten = torch.ops.aten
Dims = tuple[int, ...]  # the dims that are indexed, in order


def lookup_at(x: Tensor, *given: Any) -> Tensor:
    """``x[indices]`` where all positions are here, else 0; ``given``: an index and the rows of each dim, the dims."""
    indices, rows, dims = _taken_apart(given)
    elsewhere, local = _local(indices, rows)
    found = aten.index.Tensor(x, _at(local, dims))
    kept = x.ndim - dims[-1] - 1 if _is_run(dims) else x.ndim - len(dims)
    return found.masked_fill(elsewhere.reshape([*elsewhere.shape, *[1] * kept]), 0)


def add_at(values: Tensor, *given: Any) -> Tensor:
    """The sum of ``values``, of the shape of ``x[indices]``, at each position of ``x`` that is here."""
    indices, rows, dims = _taken_apart(given)
    elsewhere, local = _local(indices, rows)
    at, kept = _values_dims(values.ndim, dims, elsewhere.ndim)
    shape = [values.shape[dim] for dim in kept]
    for dim, row in zip(dims, rows, strict=True):
        shape.insert(dim, row.shape[0])
    mask = elsewhere.reshape([*elsewhere.shape, *[1] * (values.ndim - at - elsewhere.ndim)])
    return aten.index_put.default(values.new_zeros(shape), _at(local, dims), values.masked_fill(mask, 0), True)


def put_at(x: Tensor, values: Tensor, *given: Any) -> Tensor:
    """``x`` with ``values``, of the shape of ``x[indices]``, at the positions that are here."""
    indices, rows, dims = _taken_apart(given)
    elsewhere, local = _local(indices, rows)
    local[0] = local[0].masked_fill(elsewhere, x.shape[dims[0]])
    put = aten.index_put.default(_longer(x, dims[0]), _at(local, dims), values)
    return put.narrow(dims[0], 0, x.shape[dims[0]])


def gather_at(x: Tensor, index: Tensor, rows: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """``x.gather(dim, index)`` where the position is here, else 0; ``dtype``: that of the result, ``x``'s if None."""
    elsewhere, (local,) = _local([index], [rows])
    return x.gather(dim, local).to(dtype or x.dtype).masked_fill(elsewhere, 0)


def scatter_add_at(index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The sum of ``source`` at each position of ``dim`` that is here."""
    shape = [rows.shape[0] if i == dim else size for i, size in enumerate(source.shape)]
    return scatter_added_at_(source.new_zeros(shape), index, source, rows, dim)


def scatter_added_at(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``x.scatter_add(dim, index, source)`` at the positions that are here."""
    return scatter_added_at_(x.clone(), index, source, rows, dim)


def scatter_added_at_(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The same, written over ``x``."""
    elsewhere, (local,) = _local([index], [rows])
    return x.scatter_add_(dim, local, source.masked_fill(elsewhere, 0))


def scatter_at(x: Tensor, index: Tensor, source: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``x.scatter(dim, index, source)`` at the positions that are here."""
    elsewhere, (local,) = _local([index], [rows])
    kept = local.masked_fill(elsewhere, x.shape[dim])
    return _longer(x, dim).scatter(dim, kept, source).narrow(dim, 0, x.shape[dim])


def _taken_apart(given: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], Dims]:
    *tensors, dims = given
    return tensors[: len(dims)], tensors[len(dims) :], dims


def _local(indices: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Where any position is elsewhere, and each position as counted here."""
    elsewhere, local = zip(*map(local_rows, indices, rows), strict=True)
    return functools.reduce(operator.or_, elsewhere), list(local)


def _at(local: Sequence[Tensor], dims: Dims) -> list[Tensor | None]:
    """An index over all dims up to the last that is indexed."""
    found = dict(zip(dims, local, strict=True))
    return [found.get(dim) for dim in range(dims[-1] + 1)]


def _longer(x: Tensor, dim: int) -> Tensor:
    """``x`` with one position more, for what belongs elsewhere."""
    return torch.cat([x, x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])], dim)


def _is_run(dims: Dims) -> bool:
    return dims == tuple(range(dims[0], dims[-1] + 1))


def _values_dims(ndim: int, dims: Dims, lookup: int) -> tuple[int, list[int]]:
    """In ``x[indices]`` of ``ndim`` dims: where those of the indices begin, and which are others."""
    at = dims[0] if _is_run(dims) else 0  # indices apart from each other put their dims in front
    return at, [dim for dim in range(ndim) if not at <= dim < at + lookup]


# Their rules.


def _names(call: Call, first: int, ndim: int) -> tuple[str, str, str]:
    """The specs of ``x``, of ``x[indices]``, and of the indices, which follow ``first`` operands, and their rows."""
    dims: Dims = call.args[-1]
    indices = call.operands[first : first + len(dims)]
    names, lookup, found = lookup_names(ndim, dims, num_lookup_dims(indices))
    given = [*index_specs(indices, lookup), *(names[dim] for dim in dims)]
    return " ".join(names), " ".join(found), ", ".join(given)


def _lookup_at_rule(call: Call) -> Rule:
    x, values, given = _names(call, 1, len(call.operand.shape))
    return make_rule(f"{x}, {given} -> {values}", call, linear="0")


def _add_at_rule(call: Call) -> Rule:
    x, values, given = _names(call, 1, len(call.result.shape))
    return make_rule(f"{values}, {given} -> {x}", call, linear="0")


def _put_at_rule(call: Call) -> Rule:
    """What is put is whole along the index, as two values may go to one position."""
    x, values, given = _names(call, 2, len(call.operand.shape))
    whole = " ".join(name for name in values.split() if name.startswith("i"))
    return make_rule(f"{x}, {values}, {given} -> {x}", call, whole=whole)


def _gather_at_rule(call: Call) -> Rule:
    x, index = along_names(call.args[-1], call.operands[:2])
    return make_rule(f"{x}, {index}, v -> {index}", call, linear="0")


def _scatter_add_at_rule(call: Call) -> Rule:
    x, index = along_names(call.args[-1], call.operands[:2])
    return make_rule(f"{index}, {index}, v -> {x}", call, linear="1")


def _scatter_added_at_rule(call: Call) -> Rule:
    x, index = along_names(call.args[-1], call.operands[:2])
    return make_rule(f"{x}, {index}, {index}, v -> {x}", call, whole="i")


def _scatter_at_rule(call: Call) -> Rule:
    x, index = along_names(call.args[-1], call.operands[:3])
    return make_rule(f"{x}, {index}, {index}, v -> {x}", call, whole="i")


MAKE_NEW: frozenset[Any] = frozenset(  # what they return is in memory of its own
    {lookup_at, gather_at, add_at, scatter_add_at, scatter_added_at}
)
WRITE_OVER: dict[Any, Any] = {scatter_added_at: scatter_added_at_}  # the same over the first operand

rule(lookup_at, _lookup_at_rule)
rule(add_at, _add_at_rule)
rule(put_at, _put_at_rule)
rule(gather_at, _gather_at_rule)
rule(scatter_add_at, _scatter_add_at_rule)
rule(scatter_added_at, _scatter_added_at_rule)
rule(scatter_at, _scatter_at_rule)
