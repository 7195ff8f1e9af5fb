"""Convolution: batch and channels may be cut, and places, of which chunks need their neighbours' edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.ops.window import places
from shardc.rule import Call, Rule, make_rule, rule
from shardc.sharding import TensorType

aten = torch.ops.aten


def _convolution_rule(call: Call) -> Rule:
    """With a bias the input's channels are whole: were they cut, every shard would add it."""
    whole = "i" if call.operands[2] is not None else ""
    x, weight, bias, result = _convolution_specs(call.operands, call.result, call.args[6], call.args[8])
    spec = f"{x}, {weight}, {bias} -> {result}"
    sizes = places(call.operand, call.result, len(call.operand.shape) - 2)[1]
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
    sizes = places(operands[0], grad, len(grad.shape) - 2)[1]
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
    spec = places(given, result, len(kernel.shape) - 2)[0]
    return f"n {i} {spec}", weight, o, f"n {o} {spec}"


def _local_bias(call: Call, shard: Call) -> dict[int, Any]:
    return {} if call.args[3] is None else {3: [shard.operand.shape[1]]}


rule(aten.convolution.default, _convolution_rule)
rule(aten.convolution_backward.default, _convolution_backward_rule, local=_local_bias)
