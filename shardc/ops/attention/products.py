"""Attention kernels of our own for any device: two products, and a softmax with dropout between them.

On CUDA Inductor compiles the ops between the products, which takes a tenth of their time one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardc.language.sharding import TensorType
from shardc.ops.random import uniform_of
from shardc.ops.reduction import wide_dtype

from .score import ScoreMod, score_mod_of

Heads = tuple[slice, slice]  # some samples, and some heads of theirs
MOST_SCORES = 2**21  # scores that are made at a time
MORE_ON_CUDA = 16  # times as many; compiled kernels hold 4 bytes of each in forward and 8 in backward


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout mask of the probabilities: each becomes 0 with ``chance``; the others are divided by 1 - ``chance``.

    ``state``: the state of the stream of random numbers. ``first``: for each query the index in the stream of its score
    with the key at position 0, ``[batch, heads, queries]``. ``start``: the position of the first key.
    """

    state: Tensor
    first: Tensor
    start: int
    chance: float

    @property
    def factor(self) -> float:
        """The multiplier of the probabilities that are kept."""
        return 1 / (1 - self.chance) if self.chance < 1 else 0.0

    def of(self, heads: Heads) -> tuple[Tensor, Tensor, int, float]:
        """The arguments of ``_kept`` for some heads."""
        return self.state, self.first[heads], self.start, self.chance


@dataclass(frozen=True, slots=True)
class Scores:
    """The operations on scores: they are multiplied by ``scale``, and a ``mask`` is added.

    ``shift``: the number to subtract from the logsumexp of each query, ``[..., queries, 1]``. ``of_mask``: the tensor
    to which backward adds the gradient of the mask. ``score_mod``: changes scores before the mask is added.
    """

    mask: Tensor | None
    is_causal: bool
    scale: float | None
    dropout: Dropout | None = None
    shift: Tensor | None = None
    of_mask: Tensor | None = None
    score_mod: ScoreMod | None = None

    @property
    def hidden(self) -> Tensor:
        """The queries from which the mask hides all keys, shaped to broadcast to a logsumexp."""
        assert self.mask is not None
        return (self.mask == -torch.inf).all(-1)

    @property
    def factor(self) -> float:
        """The multiplier of the probabilities that dropout keeps."""
        return 1.0 if self.dropout is None else self.dropout.factor

    def scale_of(self, q: Tensor) -> float:
        """The scale of scores, by default 1 / sqrt(head size)."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def of(self, heads: Heads) -> tuple[Any, ...]:
        """The arguments of ``_to_probabilities`` for the scores of some heads."""
        mask, shift = _of_mask(self.mask, heads), _of_mask(self.shift, heads)
        return mask, shift, self.is_causal, None if self.dropout is None else self.dropout.of(heads)

    def changed(self, s: Tensor) -> Tensor:
        """Scores after ``score_mod``, before the mask is added."""
        return s if self.score_mod is None else self.score_mod.changed(s)

    def gradients(self, s: Tensor, ds: Tensor) -> Tensor:
        """The gradients of products of queries and keys ``s``, from those of the changed scores."""
        return ds if self.score_mod is None else self.score_mod.gradients(s, ds)

    def add_gradient(self, ds: Tensor, heads: Heads) -> None:
        """Add the gradients of the scores of some heads to that of the mask."""
        of_mask = _of_mask(self.of_mask, heads)
        if of_mask is not None:
            of_mask += ds.sum_to_size(of_mask.shape)


class Products:
    """Attention of a few heads at a time. Operands of 2 bytes are computed in float32, and the results are float32."""

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Attention, and its logsumexp ``[batch, heads, queries]``."""
        out = q.new_empty([*q.shape[:3], v.shape[3]], dtype=wide_dtype(q.dtype))
        lse = out.new_empty(q.shape[:3])
        if not k.shape[2]:
            return out.zero_(), lse.fill_(-torch.inf)
        for of_queries, of_keys in _some_heads(q, k):
            some_k, some_v = (_wide(x[of_keys]) for x in (k, v))
            p = scores.changed(_of_heads(_wide(q[of_queries]) * scores.scale_of(q), some_k.mT))
            lse[of_queries], total = fastest(_to_probabilities, q.device)(p, *scores.of(of_queries))
            out[of_queries] = _of_heads(p, some_v) * (scores.factor / total)
            del p  # before the next are made
        return out, lse

    @torch.no_grad()
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
        dq, dk, dv = (x.new_zeros(x.shape, dtype=wide_dtype(x.dtype)) for x in (q, k, v))
        for of_queries, of_keys in _some_heads(q, k):
            some_k, some_v = (_wide(x[of_keys]) for x in (k, v))
            some_q, some_grad = _wide(q[of_queries]) * scores.scale_of(q), _wide(grad[of_queries])
            delta = (some_grad * out[of_queries]).sum(-1)
            some_grad = some_grad * scores.factor
            s, ds = _of_heads(some_q, some_k.mT), _of_heads(some_grad, some_v.mT)
            p = scores.changed(s)
            fastest(_to_gradients, q.device)(p, ds, lse[of_queries], delta, *scores.of(of_queries))
            scores.add_gradient(ds, of_queries)
            dv[of_keys] += _of_keys(p, some_grad, some_v)
            ds = scores.gradients(s, ds)
            dq[of_queries] = _of_heads(ds, some_k) * scores.scale_of(q)
            dk[of_keys] += _of_keys(ds, some_q, some_k)
            del p, s, ds  # before the next are made
        return dq, dk, dv


@cache
def fastest(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function, compiled by Inductor on CUDA where Triton is installed."""
    return torch.compile(function, dynamic=True) if device.type == "cuda" and find_spec("triton") else function


def _to_probabilities(
    s: Tensor, mask: Tensor | None, shift: Tensor | None, is_causal: bool,
    dropout: tuple[Tensor, Tensor, int, float] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn scores into probabilities in place, with dropout, not yet divided by their sum.

    Returns the logsumexp, and the sum as ``[..., queries, 1]``, 1 for a query that sees no key.
    """
    _show(s, mask, is_causal)
    largest = s.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)  # of a query that sees no key
    s.sub_(largest).exp_()
    total = s.sum(-1, keepdim=True)
    if dropout is not None:
        s.mul_(_kept(s, *dropout))
    largest = largest if shift is None else largest - shift
    return (total.log() + largest).squeeze(-1), total.masked_fill(total == 0, 1.0)


def _to_gradients(
    s: Tensor, ds: Tensor, lse: Tensor, delta: Tensor, mask: Tensor | None, shift: Tensor | None, is_causal: bool,
    dropout: tuple[Tensor, Tensor, int, float] | None,
) -> None:  # fmt: skip
    """Turn scores into probabilities with dropout, and the gradients of these into those of scores, in place.

    ``delta``: for each query the dot product of its result and the gradient of that.
    """
    _show(s, mask, is_causal)
    if shift is not None:
        s.sub_(shift)
    s.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    kept = None if dropout is None else _kept(s, *dropout)
    (ds if kept is None else ds.mul_(kept)).sub_(delta.unsqueeze(-1)).mul_(s)
    if kept is not None:
        s.mul_(kept)


def _of_mask(mask: Tensor | None, heads: Heads) -> Tensor | None:
    """The part of a mask, or of a tensor with its dims, for some heads."""
    if mask is None or mask.ndim < 4:
        return mask
    return mask[tuple(slice(None) if size == 1 else some for size, some in zip(mask.shape, heads, strict=False))]


def _show(s: Tensor, mask: Tensor | None, is_causal: bool) -> None:
    if mask is not None:
        s.add_(mask)
    if is_causal:
        rows, columns = (torch.arange(size, device=s.device) for size in s.shape[-2:])
        s.masked_fill_(columns > rows.unsqueeze(-1), -torch.inf)


def _kept(s: Tensor, state: Tensor, first: Tensor, start: int, chance: float) -> Tensor:
    columns = torch.arange(s.shape[-1], device=s.device) + start
    return uniform_of(state, first.unsqueeze(-1) + columns) < 1 - chance


def tiled_workspace(
    q: TensorType, k: TensorType, tile: int, dropout: float, score_text: str = "", *, is_backward: bool
) -> int:
    """Bytes of scores that the kernels hold at a time, in tiles of at most ``tile`` rows and columns.

    They hold the scores, their gradients in backward, and for one head which scores are seen. Dropout adds for each
    score its index, of 8 bytes, the bits of its random number, of 8, and the number itself, of 4. Each step of a
    function that changes scores makes a further tensor of their size; its derivative needs the changed scores first.
    """
    (batch, heads, *_), num_keys, rows, columns = q.shape, k.shape[1], min(q.shape[2], tile), min(k.shape[2], tile)
    num_keys, num_each = _num_heads(heads // num_keys, rows, columns, MOST_SCORES)
    most = num_keys * num_each * rows * columns
    width = wide_dtype(q.dtype).itemsize
    score_mod = score_mod_of(score_text) if score_text else ScoreMod((), ())
    num_steps = max(len(score_mod.steps), is_backward and len(score_mod.derivative) + bool(score_mod.steps))
    each = width * (1 + is_backward + num_steps) + (20 if dropout else 0)
    return min(most, batch * heads * rows * columns) * each + rows * columns


def _num_heads(num_each: int, rows: int, columns: int, most_scores: int) -> tuple[int, int]:
    """The number of key heads, and of query heads of each (of its ``num_each``), whose scores are made at a time."""
    most = max(1, most_scores // max(1, rows * columns))
    return max(1, most // num_each), min(most, num_each)


def _some_heads(q: Tensor, k: Tensor) -> Iterator[tuple[Heads, Heads]]:
    """Heads of queries with the heads of keys that they see, few enough for the limit on scores made at a time.

    Yields none on meta, where nothing is computed.
    """
    if q.is_meta:
        return
    num_keys, num_each = k.shape[1], q.shape[1] // k.shape[1]
    most = MOST_SCORES * (MORE_ON_CUDA if q.is_cuda else 1)
    num_heads, num_of_each = _num_heads(num_each, q.shape[2], k.shape[2], most)
    num_samples, width = max(1, num_heads // num_keys), min(num_heads, num_keys)
    for sample, head in product(range(0, q.shape[0], num_samples), range(0, num_keys, width)):
        samples, start, stop = slice(sample, sample + num_samples), head * num_each, (head + width) * num_each
        step = num_of_each if width == 1 else stop - start
        for first in range(start, stop, step):
            yield (samples, slice(first, min(first + step, stop))), (samples, slice(head, head + width))


def _of_heads(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``, where ``y`` may have fewer heads, each for several consecutive heads of ``x``."""
    grouped = x.unflatten(1, (y.shape[1], -1)).flatten(2, 3)
    return (grouped @ y).view(*x.shape[:3], y.shape[-1])


def _of_keys(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """``x.mT @ y``, summed over the heads of ``x`` and ``y`` that share one of ``like``."""
    x, y = (each.unflatten(1, (like.shape[1], -1)).flatten(2, 3) for each in (x, y))
    return x.mT @ y


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))
