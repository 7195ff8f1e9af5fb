"""Rings of attention: each rank's keys and values go to the next rank, while it computes with what it has.

Both functions take a column of tensors for each operand, with an entry for each rank that lives in this process, and
return a row of results for each. At most two chunks of keys and values of other ranks are alive at a time: the one that
is met and the one on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shardc.language.partition import parse_parts
from shardc.ops.attention.joining import Gradients, Joined
from shardc.ops.attention.ring import POSITIONS, Ring
from shardc.ops.reduction import wide_dtype

from .comm import Comm, PartNames, Rows, Tensors

Row = tuple[Tensor, ...]


def ring_attention(
    comm: Comm, axes: PartNames, ring: Ring, qs: Tensors, ks: Tensors, vs: Tensors, *leaves: Tensors
) -> list[Row]:
    """The attention of each rank's queries, and its logsumexp."""
    indices = _indices(comm, axes)
    joined = [Joined(ring, *each) for each in zip(indices, qs, vs, *leaves, strict=True)]
    met: Rows = list(zip(ks, vs, strict=True))
    if not ring.travels:
        for own, row in zip(joined, met, strict=True):
            own.meet(None, *row)
        return [each.results for each in joined]
    for step in range(ring.steps + 1):
        arriving = _send_on(comm, axes, met, step, ring)
        for own, index, (k, v) in zip(joined, indices, met, strict=True):
            own.meet((index - step) % ring.count, k, v)
        met = arriving()
    return [each.results for each in joined]


def ring_attention_backward(
    comm: Comm, axes: PartNames, ring: Ring, grads: Tensors, qs: Tensors, ks: Tensors, vs: Tensors, outs: Tensors,
    lses: Tensors, *leaves: Tensors,
) -> list[Row]:  # fmt: skip
    """The gradients of each rank's queries, keys and values.

    Those of keys and values travel one step behind them, each rank adding its part. From the last rank that sees the
    keys they go to their own, where its own part is added.
    """
    indices, last = _indices(comm, axes), ring.steps
    columns = grads, qs, outs, lses, *leaves
    gradients = [Gradients(ring, *each) for each in zip(indices, *columns, strict=True)]
    met: Rows = list(zip(ks, vs, strict=True))
    if not ring.travels:
        return [_gradients(own, own.meet(None, *row), q, row) for own, q, row in zip(gradients, qs, met, strict=True)]
    seen = ring.rows(min(1, last))  # of each chunk, by other ranks
    parts, travelling = list[Row](), None  # what queries add in a step, and sums on their way
    for step in range(last + 1):
        arriving = _send_on(comm, axes, met, step, ring)
        meetings = zip(gradients, indices, met, strict=True)
        parts = [own.meet((index - step) % ring.count, *row) for own, index, row in meetings]
        if step == 0:
            of_own = parts
        else:
            sums = parts if travelling is None else _added(parts, ring.rows(step), travelling(), seen)
            on = [_like(*each) for each in zip(sums, met, strict=True)]
            travelling = comm.rotate(on, axes, 1 if step < last else -last)
        met = arriving()
    sums = of_own if travelling is None else _added(of_own, ring.rows(0), travelling(), seen)
    own_rows = zip(ks, vs, strict=True)
    return [_gradients(*each) for each in zip(gradients, sums, qs, own_rows, strict=True)]


def _gradients(own: Gradients, of_keys: Row, q: Tensor, row: Sequence[Tensor]) -> Row:
    """The gradients of queries, keys and values, in their dtypes."""
    return own.of_queries.to(q.dtype), *_like(of_keys, row)


def _send_on(comm: Comm, axes: PartNames, met: Rows, step: int, ring: Ring) -> Callable[[], Rows]:
    """Start to send what ranks further on see of what was met to the next rank; after the last step nothing."""
    if step == ring.steps:
        return lambda: ()
    here, further = ring.rows(step), ring.rows(step + 1)
    if here != further:
        met = [tuple(_part(x, here, further).contiguous() for x in row) for row in met]
    return comm.rotate(met, axes)


def _part(x: Tensor, rows: range, of_them: range) -> Tensor:
    """Some of the rows of a chunk that a tensor has."""
    return x.narrow(POSITIONS, of_them.start - rows.start, len(of_them))


def _added(one: Rows, rows: range, other: Rows, of_other: range) -> list[Row]:
    """The sums of two gradients, of which one is for all rows of a chunk that the other is for."""
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


def _indices(comm: Comm, axes: PartNames) -> list[int]:
    parts = parse_parts(axes, comm.mesh)
    return [comm.mesh.index(position, parts) for position in comm.positions]
