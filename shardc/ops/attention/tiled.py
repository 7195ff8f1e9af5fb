"""Attention tile by tile, for any device: with dropout, odd head sizes, the mask's gradient, or a function of scores.

No tensor as large as all scores is made or saved. Every mesh drops the same probabilities. Their random numbers are
computed from ``random``, the program's seed and step, from ``draw``, the number of this draw in the step, and from the
index of each score, which ``first`` gives (see ``Ring.prepared``). The pass ``draw_random`` sets these three arguments.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from shardc.ops.reduction import wide_dtype

from .joining import Gradients, Joined
from .kernels import TILED_FAMILY
from .mask import AS_IT_IS
from .ring import Ring, wide_dims


@torch.library.custom_op("shardc::tiled_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def tiled_attention(
    query: Tensor, key: Tensor, value: Tensor, random: Tensor | None, first: Tensor | None, dropout_p: float, draw: int,
    is_causal: bool, attn_mask: Tensor | None, scale: float | None, score_mod: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention and its logsumexp, both as torch's kernels have them. ``score_mod``: the text of a ``ScoreMod``."""
    leaves = [each for each in (attn_mask, random, first) if each is not None]
    ring = _on_one_rank(query, key, dropout_p, draw, is_causal, attn_mask, scale, score_mod)
    joined = Joined(ring, 0, query, value, *leaves)
    joined.meet(None, key, value)
    return joined.results


@torch.library.custom_op("shardc::tiled_attention_backward", mutates_args=())
def tiled_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, random: Tensor | None,
    first: Tensor | None, dropout_p: float, draw: int, is_causal: bool, attn_mask: Tensor | None, scale: float | None,
    score_mod: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values."""
    ring = _on_one_rank(query, key, dropout_p, draw, is_causal, attn_mask, scale, score_mod)
    dq, dk, dv = _gradients(ring, grad_out, query, key, value, out, logsumexp, attn_mask, random, first)
    return dq, dk, dv


@torch.library.custom_op("shardc::tiled_attention_mask_backward", mutates_args=())
def tiled_attention_mask_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, random: Tensor | None,
    first: Tensor | None, dropout_p: float, draw: int, is_causal: bool, attn_mask: Tensor, scale: float | None,
    score_mod: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values, and of the mask that is added to scores."""
    ring = _on_one_rank(query, key, dropout_p, draw, is_causal, attn_mask, scale, score_mod)
    ring = replace(ring, of_mask=wide_dims(attn_mask.shape))
    dq, dk, dv, of_mask = _gradients(ring, grad_out, query, key, value, out, logsumexp, attn_mask, random, first)
    return dq, dk, dv, of_mask


def _gradients(
    ring: Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *leaves: Tensor | None
) -> tuple[Tensor, ...]:
    gradients = Gradients(ring, 0, grad, q, out, lse, *[each for each in leaves if each is not None])
    dk, dv = gradients.meet(None, k, v)
    return gradients.results([dk.to(k.dtype), dv.to(v.dtype)], q)


def _on_one_rank(
    q: Tensor, k: Tensor, dropout_p: float, draw: int, is_causal: bool, mask: Tensor | None, scale: float | None,
    score_mod: str,
) -> Ring:  # fmt: skip
    made_by = None if mask is None else astuple(AS_IT_IS)
    ring = Ring(TILED_FAMILY, 1, q.shape[2], k.shape[2], is_causal, scale, False, made_by, score_text=score_mod)
    return replace(ring, dropout=dropout_p, draw=draw)


@tiled_attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))


@tiled_attention_backward.register_fake
def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@tiled_attention_mask_backward.register_fake
def _fake_mask_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = others[7]
    return *_fake_backward(grad, q, k, v), q.new_empty(mask.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, random, first, *ctx.options, mask, ctx.scale, ctx.score_mod = inputs
    ctx.save_for_backward(q, k, v, *output, random, first, mask)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, grad_of_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, mask = ctx.saved_tensors
    op = TILED_MASK_BACKWARD if ctx.needs_input_grad[8] else TILED_BACKWARD
    dq, dk, dv, *of_mask = op(grad, *tensors, *ctx.options, mask, ctx.scale, ctx.score_mod)
    return dq, dk, dv, *[None] * 5, *(of_mask or [None]), None, None


tiled_attention.register_autograd(_backward, setup_context=_keep)
TILED: Any = torch.ops.shardc.tiled_attention.default
TILED_BACKWARD: Any = torch.ops.shardc.tiled_attention_backward.default
TILED_MASK_BACKWARD: Any = torch.ops.shardc.tiled_attention_mask_backward.default
