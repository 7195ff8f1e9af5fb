"""The attention of one rank's chunk of queries to the chunks of keys, one after the other.

A rank with a chunk of the queries needs every key once. It takes the chunks of keys and values as they come round, and
joins the results by their logsumexps (Milakov and Gimelshein 2018)::

    lse = logaddexp(lse_a, lse_b);  out = out_a + (out_b - out_a) * sigmoid(lse_b - lse_a)

Backward runs torch's own kernel on each block with the final result and logsumexp, so that nothing is recomputed except
in that kernel (Ring Attention, Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.ops.reduction import wide_dtype

from .kernels import kernels
from .layout import positions_first
from .ring import POSITIONS, Ring
from .tiles import Tile


class Joined:
    """The attention of a chunk of queries to all keys that it has met.

    State: ``out``, in the dtype of sums and the layout of torch's kernels, and ``lse``, minus infinity for a query that
    has seen no key yet. If the first tile has all queries, its result is taken as it is.
    """

    def __init__(self, ring: Ring, index: int, q: Tensor, v: Tensor, *leaves: Tensor) -> None:
        self.ring, self.index, self.q, self.leaves = ring, index, q, ring.prepared(leaves)
        self.shape, self.dtype = (*q.shape[:3], v.shape[3]), wide_dtype(v.dtype)
        self.state: tuple[Tensor, Tensor] | None = None  # out and lse

    def meet(self, source: int | None, k: Tensor, v: Tensor, rows: range | None = None) -> None:
        """Let the queries attend to ``rows`` of a chunk of keys and values, or to all keys if ``source`` is None."""
        for tile in self.ring.tiles(self.index, source, rows, self.q.is_cuda):
            scores = self.ring.scores(tile, self.leaves)
            run = kernels(self.ring.family, scores).forward
            more, further = run(self.q[:, :, tile.rows], k[:, :, tile.columns], v[:, :, tile.columns], scores)
            if scores.mask is not None:
                more = more.masked_fill(scores.hidden.unsqueeze(-1), 0.0)
                further = further.masked_fill(scores.hidden, -torch.inf)
            if self.state is None and _is_all(tile.rows, self.q):
                self.state = positions_first(more.to(self.dtype)), further.to(self.dtype)
                continue
            out, lse = (x[:, :, tile.rows] for x in self._ready())
            weight = (further - lse).nan_to_num(nan=-torch.inf).sigmoid()  # 0 where no key has been seen at all
            out.lerp_(more.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
            lse.copy_(torch.logaddexp(lse, further))

    def _ready(self) -> tuple[Tensor, Tensor]:
        if self.state is None:
            batch, heads, rows, size = self.shape
            out = self.q.new_zeros([batch, rows, heads, size], dtype=self.dtype).transpose(1, 2)
            self.state = out, self.q.new_full(self.shape[:3], -torch.inf, dtype=self.dtype)
        return self.state

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """The result in the dtype of the operands, and its logsumexp, 0 for a query that sees no key."""
        out, lse = self._ready()
        return out.to(self.q.dtype), lse.masked_fill(lse == -torch.inf, 0.0)


class Gradients:
    """The gradients that come from a chunk of queries.

    State: ``of_queries``, a sum over the keys that it has met, None before the first; ``of_mask``, known in the columns
    of these keys.
    """

    def __init__(
        self, ring: Ring, index: int, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, *leaves: Tensor
    ) -> None:
        self.ring, self.index, self.rows, self.leaves = ring, index, (grad, q, out, lse), ring.prepared(leaves)
        self.of_queries: Tensor | None = None
        self.of_mask = ring.zeros_of_mask(q)

    def meet(
        self, source: int | None, k: Tensor, v: Tensor, rows: range | None = None, is_sent: bool = False
    ) -> tuple[Tensor, ...]:
        """The terms that the queries add to the gradients of these keys and values; arguments as of ``Joined.meet``.

        ``is_sent``: they are sent to other ranks, so they are one after the other in memory.
        """
        tiles, dtype = list(self.ring.tiles(self.index, source, rows, k.is_cuda)), wide_dtype(k.dtype)
        is_one = len(tiles) == 1 and _is_all(tiles[0].columns, k)  # then its gradients are those of all keys
        if is_one and not is_sent:
            return tuple(part.to(dtype).contiguous() for part in self._of_tile(tiles[0], k, v))
        sums = beside_one_another((k, v), dtype) if is_sent else [x.new_empty(x.shape, dtype=dtype) for x in (k, v)]
        if not is_one:
            sums = [each.zero_() for each in sums]
        for tile in tiles:
            for total, part in zip(sums, self._of_tile(tile, k, v), strict=True):
                place = total[:, :, tile.columns]
                place.copy_(part) if is_one else place.add_(part)
        return tuple(sums)

    def _of_tile(self, tile: Tile, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of a tile's keys and values; that of its queries is added to ``of_queries``."""
        grad, q, out, lse = (x[:, :, tile.rows] for x in self.rows)
        scores = self.ring.scores(tile, self.leaves, self.of_mask)
        run = kernels(self.ring.family, scores).backward
        dq, dk, dv = run(grad, q, k[:, :, tile.columns], v[:, :, tile.columns], out, lse, scores)
        if self.of_queries is None and _is_all(tile.rows, self.rows[1]):
            self.of_queries = dq.to(wide_dtype(q.dtype)).contiguous()
        else:
            self._sum_of_queries()[:, :, tile.rows].add_(dq)
        return dk, dv

    def _sum_of_queries(self) -> Tensor:
        if self.of_queries is None:
            q = self.rows[1]
            self.of_queries = q.new_zeros(q.shape, dtype=wide_dtype(q.dtype))
        return self.of_queries

    def results(self, of_keys: Sequence[Tensor], q: Tensor) -> tuple[Tensor, ...]:
        """The gradients of queries, keys and values, and of the mask if it is requested, in their dtypes."""
        of_mask = () if self.of_mask is None else (self.of_mask.to(q.dtype),)
        return self._sum_of_queries().to(q.dtype), *of_keys, *of_mask


def beside_one_another(xs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Empty tensors of the shapes of ``xs``, one after the other in memory, to be sent together without a copy."""
    pieces = xs[0].new_empty(sum(x.numel() for x in xs), dtype=dtype).split([x.numel() for x in xs])
    return [piece.view(x.shape) for piece, x in zip(pieces, xs, strict=True)]


def _is_all(part: slice, x: Tensor) -> bool:
    """Whether a tile has all positions of a tensor."""
    return part.start == 0 and part.stop == x.shape[POSITIONS]
