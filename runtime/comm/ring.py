"""Rings of attention: each rank's keys and values go to the next rank, while it computes with what it has.

Both functions take a column of tensors for each operand, with an entry for each rank that lives in this process, and
return a row of results for each. At most two chunks of keys and values of other ranks are alive at a time: the one that
is met and the one on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shardc.language.partition import parse_parts
from shardc.ops.attention import Gradients, Joined, Ring

from .comm import Comm, PartNames, Rows, Tensors

Masks = Sequence[Tensors]  # one column of masks, or none
Row = tuple[Tensor, ...]


def ring_attention(
    comm: Comm, axes: PartNames, ring: Ring, qs: Tensors, ks: Tensors, vs: Tensors, *masks: Tensors
) -> list[Row]:
    """The attention of each rank's queries, and its logsumexp."""
    indices = _indices(comm, axes)
    joined = [Joined(ring, *each) for each in zip(indices, qs, vs, _masks(masks, qs), strict=True)]
    met: Rows = list(zip(ks, vs, strict=True))
    for step in range(ring.count):
        arriving = _send_on(comm, axes, met, step, ring)
        for own, index, (k, v) in zip(joined, indices, met, strict=True):
            own.meet((index - step) % ring.count, k, v)
        met = arriving()
    return [each.results for each in joined]


def ring_attention_backward(
    comm: Comm, axes: PartNames, ring: Ring, grads: Tensors, qs: Tensors, ks: Tensors, vs: Tensors, outs: Tensors,
    lses: Tensors, *masks: Tensors,
) -> list[Row]:  # fmt: skip
    """The gradients of each rank's queries, keys and values.

    Those of keys and values travel one step behind them, each rank adding its part, and reach their own rank at last,
    where its own part is added.
    """
    indices, count = _indices(comm, axes), ring.count
    columns = grads, qs, outs, lses, _masks(masks, qs)
    gradients = [Gradients(ring, *each) for each in zip(indices, *columns, strict=True)]
    met: Rows = list(zip(ks, vs, strict=True))
    of_own: list[Row] = []
    travelling: Callable[[], Rows] | None = None
    for step in range(count):
        arriving = _send_on(comm, axes, met, step, ring)
        parts = [own.meet((index - step) % count, *row) for own, index, row in zip(gradients, indices, met, strict=True)]
        if step == 0:
            of_own = parts
        else:
            sums = parts if travelling is None else [_added(*each) for each in zip(parts, travelling(), strict=True)]
            travelling = comm.rotate([_like(row, kv) for row, kv in zip(sums, met, strict=True)], axes)
        met = arriving()
    sums = of_own if travelling is None else [_added(*each) for each in zip(of_own, travelling(), strict=True)]
    rows = zip(gradients, sums, zip(ks, vs, strict=True), qs, strict=True)
    return [(own.of_queries.to(q.dtype), *_like(row, kv)) for own, row, kv, q in rows]


def _send_on(comm: Comm, axes: PartNames, met: Rows, step: int, ring: Ring) -> Callable[[], Rows]:
    """Start to send what was met to the next rank; after the last step nothing."""
    return comm.rotate(met, axes) if step + 1 < ring.count else lambda: ()


def _added(parts: Row, arrived: Sequence[Tensor]) -> Row:
    return tuple(part.add_(other) for part, other in zip(parts, arrived, strict=True))


def _like(row: Sequence[Tensor], others: Sequence[Tensor]) -> Row:
    """The tensors in the dtypes of others."""
    return tuple(each.to(other.dtype) for each, other in zip(row, others, strict=True))


def _indices(comm: Comm, axes: PartNames) -> list[int]:
    parts = parse_parts(axes, comm.mesh)
    return [comm.mesh.index(position, parts) for position in comm.positions]


def _masks(masks: Masks, like: Tensors) -> Sequence[Tensor | None]:
    return masks[0] if masks else [None] * len(like)
