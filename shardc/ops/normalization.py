"""Normalizations: the dims that are averaged are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.language.rule import Bind, OpCall, Rule, make_rule, rule
from shardc.ops.view import dim_names

aten = torch.ops.aten

# Kernels that refuse operands of any other layout; programs do not state layouts, so the executor makes them so.
TAKE_CONTIGUOUS = frozenset({aten.native_group_norm.default, aten.native_group_norm_backward.default})


def _layer_norm_rule(spec: str, operand: int) -> Bind:
    """``X`` in the spec is the input, whose normalized dims are whole, ``S`` its statistics, ``W`` the weight.

    The input is the tensor ``operand``, and the argument after it is the normalized shape.
    """

    def bind(call: OpCall) -> Rule:
        ndim, num_normalized = len(call.operands[operand].shape), len(call.args[operand + 1])  # type: ignore[union-attr]
        names = dim_names(ndim)
        weight = " ".join(names[ndim - num_normalized :])
        statistics = " ".join([*names[: ndim - num_normalized], *["1"] * num_normalized])
        bound = spec.replace("X", " ".join(names)).replace("S", statistics).replace("W", weight)
        return make_rule(bound, call, whole=weight)

    return bind


rule(aten.native_layer_norm.default, _layer_norm_rule("X, W, W -> X, S, S", operand=0))
rule(aten.native_layer_norm_backward.default, _layer_norm_rule("X, X, S, S, W, W -> X, W, W", operand=1))
rule(aten._fused_rms_norm.default, _layer_norm_rule("X, W -> X, S", operand=0))
rule(aten._fused_rms_norm_backward.default, _layer_norm_rule("X, X, S, W -> X, W", operand=1))


def _group_norm_rule(op: Any, spec: str, at: int) -> None:
    """``X`` in the spec is the input: groups are free, channels and places of a group are averaged.

    ``at``: the argument that is the size of the batch; channels follow it, and two further the number of groups.
    """

    def bind(call: OpCall) -> Rule:
        shape, groups = call.operand.shape, call.args[at + 3]
        places = " ".join(dim_names(len(shape))[2:])
        sizes = {"g": groups, "c": shape[1] // groups}
        return make_rule(spec.replace("X", f"n (g c) {places}"), call, whole=f"c {places}", sizes=sizes)

    def local(call: OpCall, shard: OpCall) -> dict[int, Any]:
        batch, channels = shard.operand.shape[:2]
        groups = call.args[at + 3] * channels // max(1, call.operand.shape[1])
        return {at: batch, at + 1: channels, at + 3: groups}

    rule(op, bind, local=local)


_group_norm_rule(aten.native_group_norm.default, "X, (g c), (g c) -> X, n g, n g", at=3)
_group_norm_rule(aten.native_group_norm_backward.default, "X, X, n g, n g, (g c) -> X, (g c), (g c)", at=5)


def _batch_norm_rule(training: int | bool) -> Bind:
    """Channels are free. In training the batch is averaged and whole. ``training``: a fact, or the argument's place."""

    def bind(call: OpCall) -> Rule:
        is_training = training if isinstance(training, bool) else call.args[training]
        x, whole = _batch_norm_dims(call.operand.shape, is_training)
        operands = [x, *["c"] * (len(call.operands) - 1)]
        results = [x, *("c" if result and result.shape != (0,) else "1" for result in call.results[1:])]
        return make_rule(f"{', '.join(operands)} -> {', '.join(results)}", call, whole=whole)

    return bind


def _batch_norm_backward_rule(call: OpCall) -> Rule:
    x, whole = _batch_norm_dims(call.operand.shape, call.args[7])
    channels = ["c" if operand and operand.shape != (0,) else "1" for operand in call.operands[2:]]
    return make_rule(f"{', '.join([x, x, *channels])} -> {x}, c, c", call, whole=whole)


def _batch_norm_dims(shape: Sequence[int], is_training: bool) -> tuple[str, str]:
    """The spec of the input, and the factors that are whole."""
    names = dim_names(len(shape))
    averaged = " ".join([*names[:1], *names[2:]])
    return " ".join([*names[:1], "c", *names[2:]]), averaged if is_training else ""


rule(aten.native_batch_norm.default, _batch_norm_rule(training=5))
rule(aten._native_batch_norm_legit_functional.default, _batch_norm_rule(training=True))  # new buffers have no batch
rule(aten._native_batch_norm_legit_no_training.default, _batch_norm_rule(training=False))
rule(aten._native_batch_norm_legit.no_stats, _batch_norm_rule(training=3))
rule(aten.native_batch_norm_backward.default, _batch_norm_backward_rule)
