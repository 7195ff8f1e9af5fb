"""Rings: each rank sends its current chunk to the next rank, or to both neighbours, while it computes with it.

All functions take a column of tensors for each operand, with an entry for each rank in this process, and return a row
of results for each rank. At most two chunks of other ranks are alive at a time: the current one (``met``) and the one
on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor

from shardc.language.partition import parse_parts
from shardc.language.sharding import num_shards
from shardc.ops.attention.joining import Gradients, Joined, beside_one_another
from shardc.ops.attention.ring import POSITIONS, Hop, Ring
from shardc.ops.contraction import BoundDot, dot, gathered_dims, gathered_shapes, scattered_dims
from shardc.ops.reduction import wide_dtype

from .comm import Comm, PartNames, Rows, Tensors, chunk
from .process_group import is_traced

Row = tuple[Tensor, ...]


def ring_attention(
    comm: Comm, axes: PartNames, dim: int, values: tuple[Any, ...], qs: Tensors, ks: Tensors, vs: Tensors,
    *leaves: Tensors,
) -> list[Row]:  # fmt: skip
    """The attention of each rank's queries, and its logsumexp. ``values``: the fields of a ``Ring``."""
    indices, ring = _indices(comm, axes), Ring(*values)
    joined = [Joined(ring, *each) for each in zip(indices, qs, vs, *leaves, strict=True)]
    chunks: Rows = list(zip(ks, vs, strict=True))
    if not ring.travels:
        for own, (k, v) in zip(joined, chunks, strict=True):
            own.meet(None, k, v)
        return [each.results for each in joined]
    met, hops = chunks, ring.hops
    for hop, following in zip_longest(hops, hops[1:]):
        arriving = _send_on(comm, axes, chunks, met, hop, following)
        for own, index, (k, v) in zip(joined, indices, met, strict=True):
            own.meet(ring.source(index, hop), k, v, hop.rows)
        met = arriving()
    return [each.results for each in joined]


def ring_attention_backward(
    comm: Comm, axes: PartNames, dim: int, values: tuple[Any, ...], grads: Tensors, qs: Tensors, ks: Tensors,
    vs: Tensors, outs: Tensors, lses: Tensors, *leaves: Tensors,
) -> list[Row]:  # fmt: skip
    """The gradients of each rank's queries, keys and values, and of its rows of the mask if the ring asks for them.

    Gradients of keys and values travel one step behind these, and each rank adds its part. From the last rank that sees
    the keys, in either direction, they return to the keys' own rank, which adds its own part.
    """
    indices, ring = _indices(comm, axes), Ring(*values)
    columns = grads, qs, outs, lses, *leaves
    gradients = [Gradients(ring, *each) for each in zip(indices, *columns, strict=True)]
    chunks: Rows = list(zip(ks, vs, strict=True))
    if not ring.travels:
        alone = zip(gradients, qs, chunks, strict=True)
        return [own.results(_like(own.meet(None, k, v), (k, v)), q) for own, q, (k, v) in alone]
    met, hops = chunks, ring.hops
    of_own, travelling, seen = list[Row](), None, range(0)  # sums of own chunks; those on their way; the rows of these
    for hop, following in zip_longest(hops, hops[1:]):
        arriving = _send_on(comm, axes, chunks, met, hop, following)
        meetings = zip(gradients, indices, met, strict=True)
        parts: list[Row] = [
            own.meet(ring.source(index, hop), k, v, hop.rows, is_sent=hop.distance > 0)
            for own, index, (k, v) in meetings
        ]
        if travelling is not None and hop.is_first:
            of_own = _added(of_own, hops[0].rows, travelling(), seen)
        elif travelling is not None:
            parts = _added(parts, hop.rows, travelling(), seen)
        if hop.distance == 0:
            of_own = parts
        else:
            is_last, seen = following is None or following.is_first, hop.seen
            on = [_sent_as(*each) for each in zip(parts, met, strict=True)]
            travelling = comm.rotate(on, axes, -hop.distance if is_last else hop.way)
        met = arriving()
    sums = of_own if travelling is None else _added(of_own, hops[0].rows, travelling(), seen)
    return [own.results(_like(*each), q) for own, q, *each in zip(gradients, qs, sums, chunks, strict=True)]


def _send_on(
    comm: Comm, axes: PartNames, chunks: Rows, met: Rows, hop: Hop, following: Hop | None
) -> Callable[[], Rows]:
    """Start to send the rows that later ranks see: of the current chunks, or of own chunks where a direction begins.

    Sends nothing after the last hop.
    """
    if following is None:
        return lambda: ()
    sent, rows = (chunks, range(chunks[0][0].shape[POSITIONS])) if following.is_first else (met, hop.rows)
    if rows != following.rows:
        sent = [tuple(_part(x, rows, following.rows).contiguous() for x in row) for row in sent]
    return comm.rotate(sent, axes, following.way)


def _part(x: Tensor, rows: range, of_them: range) -> Tensor:
    """The rows ``of_them`` of a tensor that has the ``rows`` of a chunk."""
    return x.narrow(POSITIONS, of_them.start - rows.start, len(of_them))


def _added(one: Rows, rows: range, other: Rows, of_other: range) -> list[Row]:
    """The sums of two gradients of a chunk; the rows of one contain the rows of the other."""
    if len(rows) < len(of_other):
        one, rows, other, of_other = other, of_other, one, rows
    sums = [tuple(x.to(wide_dtype(x.dtype)) for x in row) for row in one]
    for totals, parts in zip(sums, other, strict=True):
        for total, part in zip(totals, parts, strict=True):
            _part(total, rows, of_other).add_(part)
    return sums


def _like(row: Sequence[Tensor], others: Sequence[Tensor]) -> Row:
    """The tensors in the dtypes of others."""
    return tuple(each.to(other.dtype) for each, other in zip(row, others, strict=True))


def _sent_as(row: Sequence[Tensor], others: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors in the dtype of others; converted ones are adjacent in memory."""
    dtype = others[0].dtype
    if row[0].dtype == dtype:
        return row
    narrow = beside_one_another(row, dtype)
    for to, each in zip(narrow, row, strict=True):
        to.copy_(each)
    return narrow


# Products.


def gather_dots(
    comm: Comm, axes: PartNames, dim: int, specs: tuple[str, ...], keeps: bool, xs: Tensors, *others: Tensors
) -> list[Row]:
    """The products of a value of which each rank has a chunk; preceded by the whole value if it ``keeps`` that."""
    indices, count = _indices(comm, axes), num_shards(parse_parts(axes, comm.mesh))
    rows, dims = list(zip(*others, strict=True)), gathered_dims(dim, specs, keeps)
    shapes = [gathered_shapes(dim, specs, keeps, count, *pair) for pair in zip(xs, rows, strict=True)]
    made = [tuple(map(x.new_empty, each)) for x, each in zip(xs, shapes, strict=True)]
    met: Rows = [(x,) for x in xs]
    for step in range(count):
        arriving = comm.rotate(met, axes) if step < count - 1 else tuple
        for i, results in enumerate(made):
            source = (indices[i] - step) % count
            places = [chunk(result, count, at, source) for result, at in zip(results, dims, strict=True)]
            _multiply(places, met[i][0], rows[i], specs)
        met = arriving()
    return made


def _multiply(places: Sequence[Tensor], x: Tensor, others: Sequence[Tensor], specs: Sequence[str]) -> None:
    """Write the products of a chunk to their places, and the chunk itself if there is a place for it, the first."""
    for kept in places[: -len(specs)]:
        kept.copy_(x)
    for place, other, spec in zip(places[-len(specs) :], others, specs, strict=True):
        bound = BoundDot(spec, x.shape, other.shape)
        place.copy_(bound(x, other)) if is_traced() else bound.put(x, other, place)


def dots_scatter(comm: Comm, axes: PartNames, dim: int, specs: tuple[str, ...], *columns: Tensors) -> list[Tensor]:
    """Each rank's chunk of the sum of all ranks' products: sums go round the ring, and each rank adds its part.

    Each rank rounds the sum to the dtype in which it is sent.
    """
    indices, count = _indices(comm, axes), num_shards(parse_parts(axes, comm.mesh))
    rows, dims = list(zip(*columns, strict=True)), scattered_dims(dim, specs)
    parts, arriving = list[Tensor](), None
    for step in range(count):
        sources = [(index - 1 - step) % count for index in indices]
        parts = [_part_of_sum(row, dims, specs, count, source) for row, source in zip(rows, sources, strict=True)]
        if arriving is not None:
            _add(parts, arriving())
        if step < count - 1:
            arriving = comm.rotate([(part,) for part in parts], axes)
    return parts


def _part_of_sum(
    operands: Sequence[Tensor], dims: Sequence[int | None], specs: Sequence[str], count: int, source: int
) -> Tensor:
    """The term that a rank adds to one chunk of the sum."""
    chunks = [x if dim is None else chunk(x, count, dim, source) for x, dim in zip(operands, dims, strict=True)]
    total, *further = map(dot, chunks[::2], chunks[1::2], specs)
    for product in further:
        total.add_(product)
    return total.contiguous()


def _add(parts: Sequence[Tensor], arrived: Rows) -> None:
    for part, (total,) in zip(parts, arrived, strict=True):
        part.add_(total)


def _indices(comm: Comm, axes: PartNames) -> list[int]:
    parts = parse_parts(axes, comm.mesh)
    return [comm.mesh.index(position, parts) for position in comm.positions]
