"""Attention kernels with one interface: torch's, of all families, and one of our own for any device."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardc.ops.attention.layout import EFFICIENT, EFFICIENT_BACKWARD, dense, positions_first, with_long_rows
from shardc.ops.reduction import wide_dtype

from .products import Products, Scores

aten = torch.ops.aten

Family = Literal["flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "tiled"]
TILED_FAMILY: Family = "tiled"
FAMILIES: tuple[Family, ...] = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


class Kernels(Protocol):
    """The forward kernel of a family and its backward. They are never given empty tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Attention, and its logsumexp ``[batch, heads, queries]``."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""


def kernels(family: Family, scores: Scores) -> Kernels:
    """The kernels of a family. Flash attention replaces cuDNN's, and with a mask memory-efficient attention does."""
    if family == TILED_FAMILY:
        return Products()
    if family == "flash_attention_for_cpu":
        return _OfCpu()
    return _Flash() if scores.mask is None and family != "efficient_attention" else _Efficient()


class _OfCpu:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        run, tensors = aten._scaled_dot_product_flash_attention_for_cpu.default, map(dense, (q, k, v))
        out, lse = run(*tensors, 0.0, scores.is_causal, attn_mask=scores.mask, scale=scores.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, tensors = (
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            map(dense, (grad, q, k, v, out)),
        )
        dq, dk, dv = run(*tensors, lse, 0.0, scores.is_causal, attn_mask=scores.mask, scale=scores.scale)
        return dq, dk, dv


class _Flash:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        run = aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = run(*map(dense, (q, k, v)), 0.0, scores.is_causal, scale=scores.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, tensors, seed = (
            aten._scaled_dot_product_flash_attention_backward.default,
            map(dense, (grad, q, k, v, out)),
            _seed(q),
        )
        lengths = None, None, q.shape[2], k.shape[2]
        dq, dk, dv = run(*tensors, lse.contiguous(), *lengths, 0.0, scores.is_causal, seed, seed, scale=scores.scale)
        return dq, dk, dv


class _Efficient:
    """Memory-efficient attention. Keys need as many heads as queries; the logsumexp has a multiple of 32 queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        k, v = (self._repeated(x, q.shape[1]) for x in (k, v))
        tensors, bias = map(dense, (q, k, v)), self._bias(q, k, scores.mask)
        out, lse, *_ = EFFICIENT(*tensors, bias, True, 0.0, scores.is_causal, scale=scores.scale)
        return out, lse[:, :, : q.shape[2]]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = k.shape[1]
        k, v = (self._repeated(x, q.shape[1]) for x in (k, v))
        tensors, bias, seed = map(dense, (grad, q, k, v)), self._bias(q, k, scores.mask), _seed(q)
        lse = pad(lse, [0, -lse.shape[2] % 32], value=torch.inf)
        dq, dk, dv, _ = EFFICIENT_BACKWARD(
            *tensors, bias, positions_first(out), lse, seed, seed, 0.0, [True, True, True, False],
            scores.is_causal, scale=scores.scale,
        )  # fmt: skip
        return dq, self._summed(dk, groups), self._summed(dv, groups)

    def _repeated(self, x: Tensor, heads: int) -> Tensor:
        return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)

    def _summed(self, x: Tensor, groups: int) -> Tensor:
        """The gradient summed over repeated heads, in float32 at least."""
        return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2, dtype=wide_dtype(x.dtype))

    def _bias(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        return with_long_rows(mask).expand(*q.shape[:3], k.shape[2])


def _seed(x: Tensor) -> Tensor:
    """A stand-in for the seeds, which kernels read only with dropout."""
    return torch.empty([], dtype=torch.long, device=x.device)
