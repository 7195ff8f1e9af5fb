"""Kernels of attention with the same arguments: torch's, of all families, and one of our own for any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardc.language.sharding import TensorType
from shardc.ops.reduction import wide_dtype

aten = torch.ops.aten

Family = Literal["flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "tiled"]
TILED_FAMILY: Family = "tiled"
FAMILIES: tuple[Family, ...] = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


Heads = tuple[slice, slice]  # some samples, and some heads of theirs


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of scores: they are multiplied by ``scale``, and a ``mask`` is added.

    ``kept``: which probabilities of some heads are kept, and divided by 1 - ``dropout``.
    """

    mask: Tensor | None
    is_causal: bool
    scale: float | None
    kept: Callable[[Heads], Tensor] | None = None
    dropout: float = 0.0

    @property
    def hidden(self) -> Tensor:
        """The queries that the mask lets see no key, shaped to broadcast to a logsumexp."""
        assert self.mask is not None
        return (self.mask == -torch.inf).all(-1)


class Kernels(Protocol):
    """The forward kernel of a family and its backward. They are never given empty tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Attention, and its logsumexp ``[batch, heads, queries]``."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""


def kernels(family: Family, scores: Scores) -> Kernels:
    """The kernels of a family; cuDNN's give way to others, and so do those that take no mask where there is one."""
    if family == TILED_FAMILY:
        return _Tiled()
    if family == "flash_attention_for_cpu":
        return _OfCpu()
    return _Flash() if scores.mask is None and family != "efficient_attention" else _Efficient()


class _OfCpu:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        run, tensors = aten._scaled_dot_product_flash_attention_for_cpu.default, map(_dense, (q, k, v))
        out, lse = run(*tensors, 0.0, scores.is_causal, attn_mask=scores.mask, scale=scores.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, tensors = (
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            map(_dense, (grad, q, k, v, out)),
        )
        dq, dk, dv = run(*tensors, lse, 0.0, scores.is_causal, attn_mask=scores.mask, scale=scores.scale)
        return dq, dk, dv


class _Flash:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        run = aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = run(*map(_dense, (q, k, v)), 0.0, scores.is_causal, scale=scores.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, tensors, seed = (
            aten._scaled_dot_product_flash_attention_backward.default,
            map(_dense, (grad, q, k, v, out)),
            _seed(q),
        )
        lengths = None, None, q.shape[2], k.shape[2]
        dq, dk, dv = run(*tensors, lse.contiguous(), *lengths, 0.0, scores.is_causal, seed, seed, scale=scores.scale)
        return dq, dk, dv


class _Efficient:
    """Its logsumexp has a multiple of 32 queries, and its mask rows of a multiple of 16 elements in memory."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        run, bias = aten._scaled_dot_product_efficient_attention.default, self._bias(q, k, scores.mask)
        out, lse, *_ = run(*map(_dense, (q, k, v)), bias, True, 0.0, scores.is_causal, scale=scores.scale)
        return out, lse[:, :, : q.shape[2]]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, bias, seed = (
            aten._scaled_dot_product_efficient_attention_backward.default,
            self._bias(q, k, scores.mask),
            _seed(q),
        )
        lse = pad(lse, [0, -lse.shape[2] % 32], value=torch.inf)
        dq, dk, dv, _ = run(
            *map(_dense, (grad, q, k, v)), bias, _dense(out), lse, seed, seed, 0.0, [True, True, True, False],
            scores.is_causal, scale=scores.scale,
        )  # fmt: skip
        return dq, dk, dv

    def _bias(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        return pad(mask, [0, -mask.shape[-1] % 16])[..., : mask.shape[-1]].expand(*q.shape[:3], k.shape[2])


MOST_SCORES = 2**21  # that are made at a time


class _Tiled:
    """Two products and a softmax, of some heads at a time; of numbers of 2 bytes in 4, as are its results."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out = q.new_empty([*q.shape[:3], v.shape[3]], dtype=wide_dtype(q.dtype))
        lse = out.new_empty(q.shape[:3])
        if not k.shape[2]:
            return out.zero_(), lse.fill_(-torch.inf)
        for of_queries, of_keys in _some_heads(q, k):
            some_k, some_v = (_wide(x[of_keys]) for x in (k, v))
            p = self._scores(_wide(q[of_queries]) * _scale(q, scores), some_k, scores, of_queries)
            largest = p.amax(-1, keepdim=True)
            largest.masked_fill_(largest == -torch.inf, 0.0)  # of a query that sees no key
            p.sub_(largest).exp_()
            total = p.sum(-1, keepdim=True)
            lse[of_queries] = (total.log() + largest).squeeze(-1)
            if scores.kept is not None:
                p *= scores.kept(of_queries)
            out[of_queries] = _of_heads(p, some_v) * (self._factor(scores) / total.masked_fill(total == 0, 1.0))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_zeros(x.shape, dtype=wide_dtype(x.dtype)) for x in (q, k, v))
        for of_queries, of_keys in _some_heads(q, k):
            some_grad, some_out = (_wide(x[of_queries]) for x in (grad, out))
            some_k, some_v = (_wide(x[of_keys]) for x in (k, v))
            some_q, of_values = _wide(q[of_queries]) * _scale(q, scores), some_grad * self._factor(scores)
            some_lse = lse[of_queries].unsqueeze(-1)
            p = self._scores(some_q, some_k, scores, of_queries)
            p.sub_(some_lse.masked_fill(some_lse == -torch.inf, 0.0)).exp_()
            ds = _of_heads(of_values, some_v.mT)
            is_kept = None if scores.kept is None else scores.kept(of_queries)
            dv[of_keys] += _of_keys(p if is_kept is None else p * is_kept, of_values, some_v)
            if is_kept is not None:
                ds *= is_kept
            ds.sub_((some_grad * some_out).sum(-1, keepdim=True)).mul_(p)
            dq[of_queries] = _of_heads(ds, some_k) * _scale(q, scores)
            dk[of_keys] += _of_keys(ds, some_q, some_k)
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor, scores: Scores, heads: Heads) -> Tensor:
        s = _of_heads(q, k.mT)
        if (mask := scores.mask) is not None:
            dims = zip(mask.shape[:2], heads, strict=False) if mask.ndim == s.ndim else ()
            s += mask[tuple(slice(None) if size == 1 else some for size, some in dims)]
        if scores.is_causal:
            s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
        return s

    def _factor(self, scores: Scores) -> float:
        """Of the probabilities that are kept."""
        return 1 / (1 - scores.dropout) if scores.dropout < 1 else 0.0


def tiled_workspace(q: TensorType, k: TensorType, tile: int, dropout: float, *, is_backward: bool) -> int:
    """Bytes that the kernel of our own holds of scores at a time, whose tiles have at most so many rows and columns.

    Scores and probabilities, in backward their gradients; with dropout the index of each, of 8 bytes, that of its
    random number, and the number itself, of 4.
    """
    (batch, heads, *_), num_keys, rows, columns = q.shape, k.shape[1], min(q.shape[2], tile), min(k.shape[2], tile)
    num_keys, num_each = _num_heads(heads // num_keys, rows, columns)
    most = num_keys * num_each * rows * columns
    width = wide_dtype(q.dtype).itemsize
    each = width * (2 + is_backward) if not dropout else width * (1 + is_backward) + 20
    return min(most, batch * heads * rows * columns) * each


def _num_heads(num_each: int, rows: int, columns: int) -> tuple[int, int]:
    """Heads of keys, and of each some of its ``num_each`` heads of queries, whose scores are made at a time."""
    most = max(1, MOST_SCORES // max(1, rows * columns))
    return max(1, most // num_each), min(most, num_each)


def _some_heads(q: Tensor, k: Tensor) -> Iterator[tuple[Heads, Heads]]:
    """Heads of queries, and those of keys that they see, of which few enough scores are made at a time."""
    num_keys, num_each = k.shape[1], q.shape[1] // k.shape[1]
    num_heads, num_of_each = _num_heads(num_each, q.shape[2], k.shape[2])
    num_samples, width = max(1, num_heads // num_keys), min(num_heads, num_keys)
    for sample, head in product(range(0, q.shape[0], num_samples), range(0, num_keys, width)):
        samples, start, stop = slice(sample, sample + num_samples), head * num_each, (head + width) * num_each
        step = num_of_each if width == 1 else stop - start
        for first in range(start, stop, step):
            yield (samples, slice(first, min(first + step, stop))), (samples, slice(head, head + width))


def _scale(q: Tensor, scores: Scores) -> float:
    return q.shape[-1] ** -0.5 if scores.scale is None else scores.scale


def _of_heads(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``, where ``y`` may have fewer heads, each for several of ``x`` that follow one another."""
    grouped = x.unflatten(1, (y.shape[1], -1)).flatten(2, 3)
    return (grouped @ y).view(*x.shape[:3], y.shape[-1])


def _of_keys(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """``x.mT @ y``, summed over the heads of ``x`` and ``y`` that share one of ``like``."""
    x, y = (each.unflatten(1, (like.shape[1], -1)).flatten(2, 3) for each in (x, y))
    return x.mT @ y


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _seed(x: Tensor) -> Tensor:
    """What kernels read where there is dropout."""
    return torch.empty([], dtype=torch.long, device=x.device)
