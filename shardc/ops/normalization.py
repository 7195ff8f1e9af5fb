"""Normalizations: the dims that are averaged are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.ops.view import dim_names

aten = torch.ops.aten


def _layer_norm_dims(call: OpCall, operand: int = 0) -> tuple[str, str, str]:
    """The specs of the input, of its statistics and of the weight; normalized dims are whole."""
    shape = call.operands[operand].shape  # type: ignore[union-attr]
    normalized = len(call.args[operand + 1])
    lead = len(shape) - normalized
    names = dim_names(len(shape))
    return " ".join(names), " ".join([*names[:lead], *["1"] * normalized]), " ".join(names[lead:])


def _layer_norm_rule(call: OpCall) -> Rule:
    x, stat, weight = _layer_norm_dims(call)
    return make_rule(f"{x}, {weight}, {weight} -> {x}, {stat}, {stat}", call, whole=weight)


def _layer_norm_backward_rule(call: OpCall) -> Rule:
    x, stat, weight = _layer_norm_dims(call, operand=1)
    return make_rule(f"{x}, {x}, {stat}, {stat}, {weight}, {weight} -> {x}, {weight}, {weight}", call, whole=weight)


def _rms_norm_rule(call: OpCall) -> Rule:
    x, stat, weight = _layer_norm_dims(call)
    return make_rule(f"{x}, {weight} -> {x}, {stat}", call, whole=weight)


def _rms_norm_backward_rule(call: OpCall) -> Rule:
    x, stat, weight = _layer_norm_dims(call, operand=1)
    return make_rule(f"{x}, {x}, {stat}, {weight} -> {x}, {weight}", call, whole=weight)


def _group_norm_rule(call: OpCall) -> Rule:
    """Groups are free, the channels and places of one are averaged."""
    x, sizes, whole = _group_norm_dims(call.operand.shape, groups=call.args[6])
    return make_rule(f"{x}, (g c), (g c) -> {x}, n g, n g", call, whole=whole, sizes=sizes)


def _group_norm_backward_rule(call: OpCall) -> Rule:
    x, sizes, whole = _group_norm_dims(call.operand.shape, groups=call.args[8])
    return make_rule(f"{x}, {x}, n g, n g, (g c) -> {x}, (g c), (g c)", call, whole=whole, sizes=sizes)


def _group_norm_dims(shape: Sequence[int], groups: int) -> tuple[str, dict[str, int], str]:
    """The spec of the input, sizes of factors, and those that are averaged."""
    places = dim_names(len(shape))[2:]
    return " ".join(["n", "(g c)", *places]), {"g": groups, "c": shape[1] // groups}, " ".join(["c", *places])


def _local_group_norm(at: int) -> Callable[[OpCall, OpCall], dict[int, Any]]:
    """Group norm names the sizes of batch and channels, and how many groups there are; ``at``: from which position."""

    def local(call: OpCall, shard: OpCall) -> dict[int, Any]:
        batch, channels = shard.operand.shape[:2]
        whole = call.operand.shape[1]
        return {at: batch, at + 1: channels, at + 3: call.args[at + 3] * channels // max(1, whole)}

    return local


def _batch_norm_rule(training: int | bool) -> Callable[[OpCall], Rule]:
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
    names = dim_names(len(shape))
    names[1] = "c"
    return " ".join(names), " ".join(name for name in names if name != "c") if is_training else ""


# Kernels that refuse operands of any other layout; no program says layouts, so what runs one makes them so.
TAKE_CONTIGUOUS = frozenset({aten.native_group_norm.default, aten.native_group_norm_backward.default})

rule(aten.native_layer_norm.default, _layer_norm_rule)
rule(aten.native_layer_norm_backward.default, _layer_norm_backward_rule)
rule(aten._fused_rms_norm.default, _rms_norm_rule)
rule(aten._fused_rms_norm_backward.default, _rms_norm_backward_rule)
rule(aten.native_group_norm.default, _group_norm_rule, local=_local_group_norm(3))
rule(aten.native_group_norm_backward.default, _group_norm_backward_rule, local=_local_group_norm(5))
rule(aten.native_batch_norm.default, _batch_norm_rule(training=5))
rule(aten._native_batch_norm_legit_functional.default, _batch_norm_rule(training=True))  # new buffers have no batch
rule(aten._native_batch_norm_legit_no_training.default, _batch_norm_rule(training=False))
rule(aten._native_batch_norm_legit.no_stats, _batch_norm_rule(training=3))
rule(aten.native_batch_norm_backward.default, _batch_norm_backward_rule)
