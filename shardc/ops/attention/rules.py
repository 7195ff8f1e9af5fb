"""The rules of torch's fused attention, and of rings, which equal torch's attention on whole values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType
from shardc.ops.zigzag import in_order, zigzag

from .joining import Gradients, Joined
from .kernels import FAMILIES, TILED_FAMILY, Family, kernels
from .mask import has_rows
from .products import Scores
from .ring import Ring
from .tiled import TILED, TILED_BACKWARD, TILED_MASK_BACKWARD
from .tiles import Tile

aten = torch.ops.aten

OF_TORCH = {getattr(aten, f"_scaled_dot_product_{family}").default: family for family in FAMILIES}
OF_TORCH_BACKWARD = {getattr(aten, f"_scaled_dot_product_{family}_backward").default: family for family in FAMILIES}


def _in_chunks(call: OpCall, first: int = 0, count: int | None = None, travels: bool = True) -> Rule:
    """Queries, keys, values, their gradients and masks are ``[batch, heads, positions, 1]``, the logsumexp has 3 dims.

    ``first``: the position of the queries among the operands. If keys have fewer heads than queries, the heads of
    queries are ``(h r)``, and the gradients of keys are sums over ``r``. A mask may lack leading dims. Positions are
    whole until ``decompose`` splits the op into ``count`` chunks, since a chunk of the queries needs all keys. With one
    chunk, or a single position, they stay whole. ``travels``: keys are cut like queries. Seeds and lengths have no
    constraint.
    """
    q, k = call.operands[first : first + 2]
    assert q is not None and k is not None
    heads, lengths = sorted({q.shape[1], k.shape[1]}), (q.shape[2], k.shape[2])
    names = {heads[0]: "h", heads[-1]: "(h r)" if len(heads) == 2 else "h"}

    of_keys = {1 - len(call.results), 2 - len(call.results)} if first else set[int]()
    has_whole_keys = {first + 1, first + 2, *of_keys} if not travels else set[int]()

    def spec(place: int, tensor: TensorType | None) -> str:
        ndim = 0 if tensor is None else len(tensor.shape)
        if tensor is None or ndim not in (2, 3, 4):
            return "_"
        row = tensor.shape[2 if ndim > 2 else 0]
        is_cut = row in lengths and 1 not in (row, count, *lengths) and place not in has_whole_keys
        along, head = "t" if is_cut else "1", names.get(tensor.shape[1], "1")
        return f"{along} 1" if ndim == 2 else " ".join(["b", head, along, *["1"] * (ndim - 3)])

    left, right = list(enumerate(call.operands)), list(enumerate(call.results, -len(call.results)))
    text = " -> ".join(", ".join(spec(*each) for each in side) for side in (left, right))
    return make_rule(text, call, chunks={} if count == 1 else {"t": count or 1})


FORWARD: dict[Any, Family] = {TILED: TILED_FAMILY, **OF_TORCH}
BACKWARD: dict[Any, Family] = {
    TILED_BACKWARD: TILED_FAMILY,
    TILED_MASK_BACKWARD: TILED_FAMILY,
    **OF_TORCH_BACKWARD,
}

rule(tuple(FORWARD), _in_chunks)
rule(tuple(BACKWARD), partial(_in_chunks, first=1))


def is_attention(target: Any) -> bool:
    """Whether an op is fused attention, or its backward."""
    return target in FORWARD or target in BACKWARD


# Rings.


def ring_attention(
    q: Tensor, axes: tuple[str, ...], dim: int, values: tuple[Any, ...], k: Tensor, v: Tensor, *leaves: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention and its logsumexp. ``axes`` cut the positions, dim 2; ``values`` are those of a ``Ring``.

    ``leaves``: those of its mask, and the operands of dropout. With one chunk it is computed in tiles, as on a rank
    that has all positions.
    """
    ring = Ring(*values)
    if ring.count == 1:
        joined = Joined(ring, 0, q, v, *leaves)
        joined.meet(0, k, v)
        return joined.results
    q, k, v = ring.reorder(in_order, [q], [k, v])
    scores = _whole_scores(ring, leaves)
    out, lse = ring.reorder(zigzag, kernels(ring.family, scores).forward(q, k, v, scores), [])
    return out.to(q.dtype), lse


def ring_attention_backward(
    grad: Tensor, axes: tuple[str, ...], dim: int, values: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *leaves: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of queries, keys and values, from that of the result ``out`` with logsumexp ``lse``.

    Also returns the gradient of the mask if the ring has ``of_mask``.
    """
    ring = Ring(*values)
    if ring.count == 1:
        gradients = Gradients(ring, 0, grad, q, out, lse, *leaves)
        of_keys = zip(gradients.meet(0, k, v), (k, v), strict=True)
        return gradients.results([total.to(own.dtype) for total, own in of_keys], q)
    grad, q, out, lse, k, v = ring.reorder(in_order, [grad, q, out, lse], [k, v])
    of_mask = ring.zeros_of_mask(q)
    scores = _whole_scores(ring, leaves, of_mask)
    dq, dk, dv = kernels(ring.family, scores).backward(grad, q, k, v, out, lse, scores)
    dq, dk, dv = ring.reorder(zigzag, [dq], [dk, dv])
    results = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    if of_mask is None:
        return results
    of_mask = _of_rows(ring, of_mask, zigzag) if ring.in_zigzag[0] else of_mask
    return *results, of_mask.to(q.dtype)


def _of_rows(ring: Ring, x: Tensor, op: Callable[..., Tensor]) -> Tensor:
    """Bring the rows that a mask has for queries into zigzag or back in order."""
    return op(x, x.ndim - 2, 1, 1, ring.count) if has_rows(x.shape) else x


def _whole_scores(ring: Ring, leaves: Sequence[Tensor], of_mask: Tensor | None = None) -> Scores:
    if ring.in_zigzag[0]:
        given, drawn = (leaves[:-2], leaves[-2:]) if ring.dropout else (leaves, ())
        ordered = [_of_rows(ring, x, in_order) for x in given]
        leaves = [*ordered, *drawn[:1], *ring.reorder(in_order, drawn[1:], [])]
    everything = Tile(slice(0, ring.queries), slice(0, ring.keys), 0, ring.is_causal, ring.mask is not None)
    return ring.scores(everything, ring.prepared(leaves), of_mask)


RINGS = (ring_attention, ring_attention_backward)


def _ring_rule(call: OpCall, first: int) -> Rule:
    ring = Ring(*call.args[3])
    return _in_chunks(call, first, ring.count, ring.travels)


rule(ring_attention, partial(_ring_rule, first=0))
rule(ring_attention_backward, partial(_ring_rule, first=1))


def ring_flops(target: Any, args: tuple[Any, ...]) -> int:
    """FLOPs of a call of ``RINGS``, from its arguments with shapes for tensors: every query meets all keys."""
    first, _, _, values, *others = args
    (q, k, v) = (first, *others[:2]) if target is ring_attention else others[:3]
    k, v = ((*shape[:2], Ring(*values).keys, shape[3]) for shape in (k, v))
    count: int = sdpa_flop_count(q, k, v) if target is ring_attention else sdpa_backward_flop_count(first, q, k, v)
    return count
