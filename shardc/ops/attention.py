"""Fused scaled dot product attention: batch and heads are free, positions and channels whole."""

from __future__ import annotations

from typing import Any

import torch

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType

aten = torch.ops.aten


def _attention_rule(call: OpCall) -> Rule:
    """Queries, keys, values, their gradients and masks are ``[batch, heads, 1, 1]``, the logsumexp has 3 dims.

    Where keys have fewer heads than queries, those of the queries are ``(h r)``, and the keys' gradients are sums over
    ``r``. A mask may lack leading dims. Seeds and lengths, of one dim or none, have no constraint.
    """
    large = [operand for operand in call.operands if operand is not None and len(operand.shape) == 4]
    heads = sorted({operand.shape[1] for operand in large} - {1})
    names = {heads[0]: "h", heads[-1]: "(h r)" if len(heads) == 2 else "h"} if len(heads) in (1, 2) else {}

    def spec(tensor: TensorType | None) -> str:
        ndim = 0 if tensor is None else len(tensor.shape)
        if tensor is None or ndim not in (2, 3, 4):
            return "_"
        if ndim == 2:
            return "1 1"
        return " ".join(["b", names.get(tensor.shape[1], "1"), *["1"] * (ndim - 2)])

    return make_rule(f"{', '.join(map(spec, call.operands))} -> {', '.join(map(spec, call.results))}", call)


FUSED = tuple(
    getattr(aten, f"_scaled_dot_product_{kernel}{direction}").default
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for direction in ("", "_backward")
)
rule(FUSED, _attention_rule, is_dense=True)  # torch 2.13 silently computes wrong values for other layouts


def is_attention(target: Any) -> bool:
    """Whether an op is fused attention, or its backward."""
    return target in FUSED
