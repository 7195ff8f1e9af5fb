"""Convolution, pooling and resampling: batch and channels may be cut, positions are whole."""

from __future__ import annotations

from typing import Any

import torch

from shardc.rule import Call, Rule, make_rule, rule

aten = torch.ops.aten


def _convolution_specs(ndim: int, is_transposed: bool, groups: int) -> tuple[str, str, str]:
    """The specs of input, weight and result: ``n i``, ``o i`` and ``n o``. With groups all channels are whole."""
    i, o = ("i", "o") if groups == 1 else ("1", "1")
    places = " ".join(["1"] * (ndim - 2))
    weight = f"{i} {o} {places}" if is_transposed else f"{o} {i} {places}"
    return f"n {i} {places}", weight, f"n {o} {places}"


def _convolution_rule(call: Call) -> Rule:
    """With a bias the input's channels are whole: were they cut, every shard would add it."""
    transposed, groups = call.args[6], call.args[8]
    x, weight, result = _convolution_specs(len(call.operand.shape), transposed, groups)
    bias = "o" if groups == 1 else "1"
    whole = "i" if call.operands[2] is not None else ""
    return make_rule(f"{x}, {weight}, {bias} -> {result}", call, whole=whole, linear="" if whole else "0 1")


def _convolution_backward_rule(call: Call) -> Rule:
    """With a bias the input's channels are whole: the bias's gradient lacks them and is no sum over them."""
    transposed, groups, mask = call.args[7], call.args[9], call.args[10]
    x, weight, grad = _convolution_specs(len(call.operand.shape), transposed, groups)
    bias = "o" if groups == 1 else "1"
    return make_rule(f"{grad}, {x}, {weight} -> {x}, {weight}, {bias}", call, whole="i" if mask[2] else "")


def _local_bias(call: Call, shard: Call) -> dict[int, Any]:
    return {} if call.args[3] is None else {3: [shard.operand.shape[1]]}


rule(aten.convolution.default, _convolution_rule)
rule(aten.convolution_backward.default, _convolution_backward_rule, local=_local_bias)

rule(aten.max_pool2d_with_indices.default, "... 1 1 -> ... 1 1, ... 1 1")
rule(aten.max_pool2d_with_indices_backward.default, "... 1 1, ... 1 1, ... 1 1 -> ... 1 1", linear="0")
rule(aten.max_pool3d_with_indices.default, "... 1 1 1 -> ... 1 1 1, ... 1 1 1")
rule(aten.max_pool3d_with_indices_backward.default, "... 1 1 1, ... 1 1 1, ... 1 1 1 -> ... 1 1 1", linear="0")
rule(aten.avg_pool2d.default, "... 1 1 -> ... 1 1", linear="0")
rule(aten.avg_pool2d_backward.default, "... 1 1, ... 1 1 -> ... 1 1", linear="0")
rule(aten.avg_pool3d.default, "... 1 1 1 -> ... 1 1 1", linear="0")
rule(aten.avg_pool3d_backward.default, "... 1 1 1, ... 1 1 1 -> ... 1 1 1", linear="0")
rule(aten._adaptive_avg_pool2d.default, "... 1 1 -> ... 1 1", linear="0")
rule(aten._adaptive_avg_pool2d_backward.default, "... 1 1, ... 1 1 -> ... 1 1", linear="0")
rule(aten.upsample_nearest2d.default, "... 1 1 -> ... 1 1")
rule(aten.upsample_nearest2d_backward.default, "... 1 1 -> ... 1 1", sizes=2)
rule(aten.upsample_bilinear2d.default, "... 1 1 -> ... 1 1")
rule(aten.upsample_bilinear2d_backward.default, "... 1 1 -> ... 1 1", sizes=2)
