"""Embeddings: rows of a table by their ids, and the sums of rows that bags look up."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType
from shardc.ops.index import local_positions

aten = torch.ops.aten


def lookup_rows(weight: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """``weight[ids - rows[0]]`` where that row is here, else 0; ``rows``: the numbers of the rows that ``weight`` has.

    Over all pieces of a table cut by rows the sum is the lookup in the whole table.
    """
    elsewhere, local = local_positions(ids, rows)
    return torch.embedding(weight, local).masked_fill_(elsewhere.unsqueeze(-1), 0)


def scatter_rows(gradient: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the rows that are here: each the sum of ``gradient`` over the tokens that looked it up."""
    elsewhere, local = local_positions(ids, rows)
    flat = gradient.masked_fill(elsewhere.unsqueeze(-1), 0)
    result = flat.new_zeros(rows.shape[0], gradient.shape[-1])
    return result.index_add(0, local.flatten(), flat.flatten(0, -2))


def _tokens(call: OpCall) -> str:
    return " ".join(f"t{i}" for i in range(len(call.operands[1].shape)))  # type: ignore[union-attr]


def _embedding_backward_rule(call: OpCall) -> Rule:
    """Tokens are reduced, unless each row is divided by how often it occurs in all of them."""
    tokens = _tokens(call)
    by_count = len(call.args) > 4 and call.args[4]
    return make_rule(f"{tokens} d, {tokens} -> v d", call, linear="0", whole=f"v {tokens if by_count else ''}")


def _bag_maxima(tensor: TensorType | None, without: str) -> str:
    """The dims of the places of maxima: per bag and column, or ``without`` columns."""
    return "1 d" if tensor is not None and len(tensor.shape) == 2 else without


rule(aten.embedding.default, "v d, ... -> ... d", whole="v", linear="0")
rule(aten.embedding_dense_backward.default, _embedding_backward_rule)
rule(lookup_rows, lambda call: make_rule("v d, ..., v -> ... d", call, linear="0", contiguous="v"))
rule(
    scatter_rows,
    lambda call: make_rule("T d, T, v -> v d".replace("T", _tokens(call)), call, linear="0", contiguous="v"),
)
rule(  # where bags begin and how large they are does not depend on the columns
    (aten._embedding_bag.default, aten._embedding_bag_forward_only.default),
    lambda call: make_rule(f"1 d, 1, 1, 1 -> 1 d, _, _, {_bag_maxima(call.results[3], '_')}", call),
)
rule(
    aten._embedding_bag_backward.default,
    lambda call: make_rule(f"1 d, 1, 1, 1, 1, {_bag_maxima(call.operands[5], '1')}, 1 -> 1 d", call, linear="0"),
)
rule(aten._embedding_bag_per_sample_weights_backward.default, "1 d, 1 d, 1, 1, 1 -> 1")
