"""Pointwise ops: those that a partial sum may pass, and those that torch does not tag as pointwise.

Every op that torch tags as pointwise has ``pointwise_rule`` without an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from shardc.language.rule import OpCall, Rule, pointwise_rule, rule

aten = torch.ops.aten


def is_pointwise(target: Any) -> bool:
    """Whether torch tags an op as pointwise: each element of the result depends on one element of each operand."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def pointwise(linear: str = "") -> Callable[[OpCall], Rule]:
    """A pointwise rule whose groups of operands are linear."""
    return lambda call: pointwise_rule(call, linear)


def _masked_fill_rule(call: OpCall) -> Rule:
    """Filling with zero is linear."""
    return pointwise_rule(call, linear="0" if call.args[2] == 0 else "")


# A sum of sums: a partial passes when both sides are partial.
rule(aten.add.Tensor, pointwise("01"))
rule(aten.sub.Tensor, pointwise("01"))
rule(aten.where.self, pointwise("12"))

# Linear in each side apart.
rule(aten.mul.Tensor, pointwise("0 1"))
rule(aten.mul.Scalar, pointwise("0"))
rule(aten.div.Tensor, pointwise("0"))
rule(aten.div.Scalar, pointwise("0"))
rule(aten.neg.default, pointwise("0"))
rule(aten.masked_fill.Scalar, _masked_fill_rule)
rule(aten.masked_fill.Tensor, pointwise())
rule(aten.complex.default, pointwise())

# Copies.
rule(aten.clone.default, pointwise("0"))
rule(aten.detach.default, pointwise("0"))
rule(aten.alias.default, pointwise("0"))
rule(aten.lift_fresh_copy.default, pointwise("0"))
rule(aten._conj.default, pointwise("0"))
rule(aten._neg_view.default, pointwise("0"))
rule(aten.copy.default, lambda call: pointwise_rule(call, linear="1"))


def _cast_rule(call: OpCall) -> Rule:
    """A sum of rounded numbers is not the rounded sum; of numbers made wider it is the sum made wider."""
    before, after = call.operands[0], call.result
    assert before is not None
    is_wider = before.dtype.is_floating_point and torch.promote_types(before.dtype, after.dtype) == after.dtype
    return pointwise_rule(call, linear="0" if is_wider else "")


rule(aten._to_copy.default, _cast_rule)
rule(torch.ops.prims.convert_element_type.default, _cast_rule)


def _division_rule(call: OpCall) -> Rule:
    """Whole numbers are not divided by the zeros that padding may have."""
    by_tensor = len(call.operands) > 1 and call.operands[1] is not None
    return replace(pointwise_rule(call), is_even=by_tensor and not call.result.dtype.is_floating_point)


for op in (aten.floor_divide.default, aten.div.Tensor_mode, aten.remainder.Tensor, aten.fmod.Tensor):
    rule(op, _division_rule)

# Gradients of pointwise ops are linear in the incoming gradient.
rule(aten.gelu_backward.default, pointwise("0"))
rule(aten.silu_backward.default, pointwise("0"))
rule(aten.tanh_backward.default, pointwise("0"))
rule(aten.sigmoid_backward.default, pointwise("0"))
rule(aten.softplus_backward.default, pointwise("0"))
rule(aten.threshold_backward.default, pointwise("0"))
rule(aten.leaky_relu_backward.default, pointwise("0"))
rule(aten.elu_backward.default, pointwise("0"))
rule(aten.hardtanh_backward.default, pointwise("0"))
rule(aten.hardswish_backward.default, pointwise("0"))
rule(aten.hardsigmoid_backward.default, pointwise("0"))
rule(aten.mish_backward.default, pointwise("0"))
rule(aten.log_sigmoid_backward.default, pointwise("0"))
rule(aten.rrelu_with_noise_backward.default, pointwise("0"))

# Pointwise, though torch does not say so.
for op in (
    aten.hardswish.default,
    aten.log_sigmoid_forward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.polar.default,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
):
    rule(op, pointwise())

# Values of the operand do not matter, its shape does.
rule(aten.zeros_like.default, pointwise("0"))
rule(aten.ones_like.default, pointwise())
rule(aten.full_like.default, pointwise())
rule(aten.empty_like.default, pointwise())
rule(aten.fill.Scalar, pointwise())
rule(aten.fill.Tensor, pointwise())


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory before anything wrote to it: what reads it has no value."""
    return torch.empty(shape, dtype=dtype, device="meta")


for op in (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format):
    rule(op, "-> ...", sizes=0)
for op in (aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default):
    rule(op, "_ -> ...", sizes=1)

# Where an element stands decides its value.
for op in (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default):
    rule(op, "-> 1")
for op in (aten.eye.default, aten.eye.m):
    rule(op, "-> 1 1")
rule(aten.scalar_tensor.default, "-> ")


# The op that ``shardc.annotate`` leaves in a graph.


@lru_cache(maxsize=1)
def annotate_op() -> Any:
    """``torch.ops.shardc.annotate(x, spec, priority=0, said="")``: a copy of x; its backward annotates the gradient.

    ``said``: the annotation as the user wrote it, where that is no call of ``annotate``.
    """

    def copy(x: torch.Tensor, spec: str, priority: int = 0, *, said: str = "") -> torch.Tensor:
        return x.clone()

    def keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, str], output: torch.Tensor) -> None:
        (_, ctx.spec, ctx.priority), ctx.said = inputs, keyword_only_inputs["said"]

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return op(gradient, ctx.spec, ctx.priority, said=ctx.said), None, None

    schema = "(Tensor x, str spec, int priority=0, *, str said='') -> Tensor"
    op = torch.library.custom_op("shardc::annotate", copy, mutates_args=(), schema=schema)
    op.register_fake(lambda x, spec, priority=0, *, said="": torch.empty_like(x))
    op.register_autograd(backward, setup_context=keep)
    return op


annotate_op()
rule(torch.ops.shardc.annotate.default, pointwise())  # not linear: the user's sharding closes every open sum
