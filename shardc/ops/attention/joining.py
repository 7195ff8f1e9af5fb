"""On one rank: the attention of its chunk of queries to one chunk of keys after the other.

A rank that has a chunk of the queries needs every key once. It takes the chunks of keys and values one after the other,
as they come round, and joins what each gives by its logsumexp (Milakov and Gimelshein 2018)::

    lse = logaddexp(lse_a, lse_b);  out = out_a + (out_b - out_a) * sigmoid(lse_b - lse_a)

Backward runs torch's own kernel on each block with the final result and logsumexp, so that nothing is computed again
but what that kernel does (Ring Attention, Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.ops.reduction import wide_dtype

from .kernels import kernels
from .ring import Ring


class Joined:
    """The attention of a chunk of queries to all keys that it has met.

    State: ``out``, in the dtype that sums are made in and in the layout of torch's kernels, and ``lse``, minus
    infinity where a query has seen no key yet.
    """

    def __init__(self, ring: Ring, index: int, q: Tensor, v: Tensor, *leaves: Tensor) -> None:
        self.ring, self.index, self.q, self.leaves = ring, index, q, ring.prepared(leaves)
        batch, heads, rows, _ = q.shape
        self.out = v.new_zeros([batch, rows, heads, v.shape[3]], dtype=wide_dtype(v.dtype)).transpose(1, 2)
        self.lse = v.new_full(q.shape[:3], -torch.inf, dtype=self.out.dtype)

    def meet(self, source: int | None, k: Tensor, v: Tensor, rows: range | None = None) -> None:
        """Let the queries attend to ``rows`` of a chunk of keys and values, or to all keys if ``source`` is None."""
        for tile in self.ring.tiles(self.index, source, rows, self.q.is_cuda):
            q, out, lse = (x[:, :, tile.rows] for x in (self.q, self.out, self.lse))
            scores = self.ring.scores(tile, self.leaves)
            run = kernels(self.ring.family, scores).forward
            more, further = run(q, k[:, :, tile.columns], v[:, :, tile.columns], scores)
            if scores.mask is not None:
                more = more.masked_fill(scores.hidden.unsqueeze(-1), 0.0)
                further = further.masked_fill(scores.hidden, -torch.inf)
            weight = (further - lse).nan_to_num(nan=-torch.inf).sigmoid()  # 0 where no key has been seen at all
            out.lerp_(more.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
            lse.copy_(torch.logaddexp(lse, further))

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """The result in the dtype of the operands, and its logsumexp, 0 where a query sees no key."""
        return self.out.to(self.q.dtype), self.lse.masked_fill(self.lse == -torch.inf, 0.0)


class Gradients:
    """The gradients that a chunk of queries gives.

    State: ``of_queries``, a sum over the keys that it has met; ``of_mask``, in the columns of these keys.
    """

    def __init__(
        self, ring: Ring, index: int, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, *leaves: Tensor
    ) -> None:
        self.ring, self.index, self.rows, self.leaves = ring, index, (grad, q, out, lse), ring.prepared(leaves)
        self.of_queries, self.of_mask = q.new_zeros(q.shape, dtype=wide_dtype(q.dtype)), ring.zeros_of_mask(q)

    def meet(
        self, source: int | None, k: Tensor, v: Tensor, rows: range | None = None, is_sent: bool = False
    ) -> tuple[Tensor, Tensor]:
        """What the queries add to the gradients of these keys and values, which are as in ``Joined.meet``.

        ``is_sent``: to other ranks, for which they are one after the other in memory.
        """
        dtype = wide_dtype(k.dtype)
        dk, dv = beside_one_another((k, v), dtype) if is_sent else (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
        for tile in self.ring.tiles(self.index, source, rows, self.of_queries.is_cuda):
            grad, q, out, lse = (x[:, :, tile.rows] for x in self.rows)
            scores = self.ring.scores(tile, self.leaves, self.of_mask)
            run = kernels(self.ring.family, scores).backward
            parts = run(grad, q, k[:, :, tile.columns], v[:, :, tile.columns], out, lse, scores)
            for total, part in zip(
                (self.of_queries[:, :, tile.rows], dk[:, :, tile.columns], dv[:, :, tile.columns]), parts, strict=True
            ):
                total += part
        return dk, dv

    def results(self, of_keys: Sequence[Tensor], q: Tensor) -> tuple[Tensor, ...]:
        """The gradients of queries, keys and values, and of the mask where it is asked for, in their dtypes."""
        of_mask = () if self.of_mask is None else (self.of_mask.to(q.dtype),)
        return self.of_queries.to(q.dtype), *of_keys, *of_mask


def beside_one_another(xs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Zeros of the shapes of tensors, one after the other in memory, so that they are sent together as they are."""
    pieces = xs[0].new_zeros(sum(x.numel() for x in xs), dtype=dtype).split([x.numel() for x in xs])
    return [piece.view(x.shape) for piece, x in zip(pieces, xs, strict=True)]
