"""Convolution: batch, channels and groups may be cut, and places, of which chunks need their neighbours' edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardc.rule import Call, Rule, make_rule, rule
from shardc.sharding import TensorType

aten = torch.ops.aten


def sums_over_kernel(kernel: int, result: int, is_transposed: bool) -> bool:
    """Whether a place is best cut where it is summed over: the kernel is larger than the result, as for a gradient."""
    return kernel > result and not is_transposed


def _convolution_rule(call: Call) -> Rule:
    """With a bias the input's channels are whole: were they cut, every shard would add it."""
    whole = "i" if call.operands[2] is not None else ""
    specs, sizes, chunks = _specs(call.operands[0], call.operands[1], call.result, call.args[6], call.args[8])
    spec = "{x}, {weight}, {bias} -> {result}".format(**specs)
    return make_rule(spec, call, whole=whole, linear="" if whole else "0 1", sizes=sizes, chunks=chunks)


def _convolution_backward_rule(call: Call) -> Rule:
    """With a bias the input's channels are whole: the bias's gradient lacks them and is no sum over them."""
    specs, sizes, chunks = _specs(call.operands[1], call.operands[2], call.operand, call.args[7], call.args[9])
    spec = "{result}, {x}, {weight} -> {x}, {weight}, {bias}".format(**specs)
    return make_rule(spec, call, whole="i" if call.args[10][2] else "", sizes=sizes, chunks=chunks)


def _specs(
    x: TensorType | None, weight: TensorType | None, result: TensorType | None, is_transposed: bool, groups: int
) -> tuple[Mapping[str, str], dict[str, int], dict[str, int]]:
    """The specs of input ``n (g i)``, weight ``(g o) i`` and result ``n (g o)``; sizes of factors; and those in chunks.

    A place is a factor of input and result, or of input and kernel; it has another size on each.
    """
    assert x is not None and weight is not None and result is not None
    shapes = list(zip(x.shape, weight.shape, result.shape, strict=True))[2:]
    names = [_place(i, *sizes, is_transposed) for i, sizes in enumerate(shapes)]
    of_x, of_weight, of_result = (" ".join(place[i] for place in names) for i in range(3))
    specs = {
        "x": f"n (g i) {of_x}",
        "weight": f"(g i) o {of_weight}" if is_transposed else f"(g o) i {of_weight}",
        "bias": "(g o)",
        "result": f"n (g o) {of_result}",
    }
    chunks = {place[0]: 1 for place in names if place[0] != "1"}
    return specs, {"g": groups, "i": x.shape[1] // groups, "o": result.shape[1] // groups}, chunks


def _place(i: int, x: int, kernel: int, result: int, is_transposed: bool) -> tuple[str, str, str]:
    """The factor of a place on input, weight and result."""
    if min(x, kernel) > 1 and sums_over_kernel(kernel, result, is_transposed):
        return f"k{i}", f"k{i}", "1"
    return (f"s{i}", "1", f"s{i}") if min(x, result) > 1 else ("1", "1", "1")


def _num_groups(x: TensorType | None, weight: TensorType | None, result: TensorType | None, is_transposed: bool) -> int:
    """How many groups tensors have: their channels by those of one group in the weight."""
    channels = result if is_transposed else x
    assert channels is not None and weight is not None
    return channels.shape[1] // max(1, weight.shape[1])


def _local_convolution(call: Call, shard: Call) -> dict[int, Any]:
    x, weight = shard.operands[:2]
    return {8: _num_groups(x, weight, shard.result, call.args[6])}


def _local_convolution_backward(call: Call, shard: Call) -> dict[int, Any]:
    grad, x, weight = shard.operands[:3]
    groups = _num_groups(x, weight, grad, call.args[7])
    return {9: groups} if call.args[3] is None else {3: [shard.operand.shape[1]], 9: groups}


rule(aten.convolution.default, _convolution_rule, local=_local_convolution)
rule(aten.convolution_backward.default, _convolution_backward_rule, local=_local_convolution_backward)
