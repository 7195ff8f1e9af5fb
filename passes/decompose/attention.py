"""Attention whose positions are cut, as a ring: keys and values go round, and each rank joins what its queries see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ops.attention import BACKWARD, FORWARD, Ring, ring_attention, ring_attention_backward

from .along import Along, Results, Windowed

POSITIONS = 2  # the dim of queries and keys


@dataclass(frozen=True, slots=True)
class Rings(Windowed):
    """A kernel of attention, in chunks of its positions."""

    def moved(self, along: Along) -> int | None:
        """Bytes that all ranks together send: each chunk of keys and values goes to all other ranks.

        In backward their gradients go with them. None where a mask has a gradient too.
        """
        given = along.given
        if along.dim != POSITIONS or (mask := given.get("grad_input_mask")) and mask[3]:
            return None
        tensors = [along.emit.type(given[name]).nbytes for name in ("key", "value")]
        return (along.count - 1) * sum(tensors) * (2 if along.node.target in BACKWARD else 1)


def _expand(along: Along) -> Results:
    emit, given = along.emit, along.given
    q, k, v = (given[name] for name in ("query", "key", "value"))
    mask = given.get("attn_mask") or given.get("attn_bias")
    masks = [] if mask is None else [mask]
    family = (FORWARD | BACKWARD)[along.node.target]
    lengths = along.size(q), along.size(k)
    ring = Ring(family, along.count, *lengths, given["is_causal"], given["scale"])
    fixed = (), POSITIONS, ring.values
    if along.node.target in FORWARD:
        call = emit(ring_attention, q, *fixed, k, v, *masks)
        results = emit.results(call)
        rest = [emit(torch.ops.aten.zeros.default, list(type_.shape), dtype=type_.dtype) if type_ else None
                for type_ in emit.program.types(along.node)[2:]]  # fmt: skip
        return [*results, *rest]
    grad = given.get("grad_out", given.get("grad_out_"))
    forward = given["out"], given["logsumexp"]
    call = emit(ring_attention_backward, grad, *fixed, q, k, v, *forward, *masks)
    missing = len(emit.program.types(along.node)) - 3
    return [*emit.results(call), *[None] * missing]


ATTENTION: dict[Any, Windowed] = {op: Rings(lambda along: [], _expand) for op in (*FORWARD, *BACKWARD)}
