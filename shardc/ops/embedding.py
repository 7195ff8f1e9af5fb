"""Lookups in a table by token."""

from __future__ import annotations

import torch

from shardc.rule import Call, Rule, make_rule, rule

aten = torch.ops.aten


def _embedding_backward_rule(call: Call) -> Rule:
    """Tokens are reduced, unless each row is divided by how often it occurs in all of them."""
    tokens = " ".join(f"t{i}" for i in range(len(call.operands[1].shape)))  # type: ignore[union-attr]
    by_count = len(call.args) > 4 and call.args[4]
    return make_rule(f"{tokens} d, {tokens} -> v d", call, linear="0", whole=f"v {tokens if by_count else ''}")


rule(aten.embedding.default, "v d, ... -> ... d", whole="v", linear="0")
rule(aten.embedding_dense_backward.default, _embedding_backward_rule)
