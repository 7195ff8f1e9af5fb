"""Convolution and pooling: batch and channels may be cut, and places, of which chunks need their edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardc.rule import Call, Rule, make_rule, rule
from shardc.sharding import TensorType

aten = torch.ops.aten


def _convolution_rule(call: Call) -> Rule:
    """With a bias the input's channels are whole: were they cut, every shard would add it."""
    whole = "i" if call.operands[2] is not None else ""
    x, weight, bias, result = _convolution_specs(call.operands, call.result, call.args[6], call.args[8])
    spec = f"{x}, {weight}, {bias} -> {result}"
    sizes = _common_sizes(call.operand, call.result)
    return make_rule(
        spec, call, whole=whole, linear="" if whole else "0 1", sizes=sizes, chunks=dict.fromkeys(sizes, 1)
    )


def _convolution_backward_rule(call: Call) -> Rule:
    """With a bias the input's channels are whole: the bias's gradient lacks them and is no sum over them."""
    grad, operands = call.operand, call.operands[1:]
    x, weight, bias, result = _convolution_specs(operands, grad, call.args[7], call.args[9])
    whole = "i" if call.args[10][2] else ""
    spec = f"{result}, {x}, {weight} -> {x}, {weight}, {bias}"
    assert operands[0] is not None
    sizes = _common_sizes(operands[0], grad)
    return make_rule(spec, call, whole=whole, sizes=sizes, chunks=dict.fromkeys(sizes, 1))


def _convolution_specs(
    operands: Sequence[TensorType | None], result: TensorType, is_transposed: bool, groups: int
) -> tuple[str, str, str, str]:
    """The specs of input ``n i``, weight ``o i``, bias ``o`` and result ``n o``. With groups all channels are whole."""
    given, kernel = operands[:2]
    assert given is not None and kernel is not None
    i, o = ("i", "o") if groups == 1 else ("1", "1")
    kernel_places = " ".join("1" for _ in kernel.shape[2:])
    weight = f"{i} {o} {kernel_places}" if is_transposed else f"{o} {i} {kernel_places}"
    places = _places(given, result)
    return f"n {i} {places}", weight, o, f"n {o} {places}"


def _places(x: TensorType, y: TensorType) -> str:
    """A factor for each place that both have, of another size each: what it is cut in are chunks of both."""
    sizes = _common_sizes(x, y)
    return " ".join(f"s{i}" if f"s{i}" in sizes else "1" for i in range(len(x.shape) - 2))


def _common_sizes(x: TensorType, y: TensorType) -> dict[str, int]:
    """For each place that both have, in how many chunks both may be cut at most."""
    pairs = list(zip(x.shape, y.shape, strict=True))[2:]
    return {f"s{i}": math.gcd(*pair) for i, pair in enumerate(pairs) if min(pair) > 1}


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
