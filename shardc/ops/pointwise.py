"""Pointwise ops: those that a partial sum may pass, and those that torch does not tag as pointwise.

Every op that torch tags as pointwise has ``pointwise_rule`` without an entry here. Here are also ops that make tensors,
and the op of ``shardc.annotate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from shardc.language.rule import Bind, OpCall, Rule, pointwise_rule, rule

aten = torch.ops.aten


def is_pointwise(target: Any) -> bool:
    """Whether torch tags an op as pointwise: each element of the result depends on one element of each operand."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _pointwise(linear: str = "") -> Bind:
    """A pointwise rule whose groups of operands are linear."""
    return lambda call: pointwise_rule(call, linear)


def _cast_rule(call: OpCall) -> Rule:
    """A cast to a wider dtype is linear; to a narrower one it rounds."""
    src, dst = call.operand.dtype, call.result.dtype
    is_wider = src.is_floating_point and torch.promote_types(src, dst) == dst
    return pointwise_rule(call, linear="0" if is_wider else "")


def _division_rule(call: OpCall) -> Rule:
    """Integer division by a tensor is cut evenly: padding may hold zeros, which raise errors."""
    by_tensor = len(call.operands) > 1 and call.operands[1] is not None
    return replace(pointwise_rule(call), is_even=by_tensor and not call.result.dtype.is_floating_point)


# A sum of sums: a partial passes when both sides are partial.
rule((aten.add.Tensor, aten.sub.Tensor), _pointwise("01"))
rule(aten.where.self, _pointwise("12"))

# Linear in each side apart.
rule(aten.mul.Tensor, _pointwise("0 1"))
rule((aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default), _pointwise("0"))
rule(aten.masked_fill.Scalar, lambda call: pointwise_rule(call, linear="0" if call.args[2] == 0 else ""))

# Copies and casts.
for op in (
    aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten._conj.default,
    aten._neg_view.default,
):  # fmt: skip
    rule(op, _pointwise("0"))
rule(aten.copy.default, _pointwise("1"))
rule((aten._to_copy.default, torch.ops.prims.convert_element_type.default), _cast_rule)
rule((aten.floor_divide.default, aten.div.Tensor_mode, aten.remainder.Tensor, aten.fmod.Tensor), _division_rule)

# Gradients of pointwise ops are linear in the incoming gradient.
for op in (
    aten.gelu_backward.default, aten.silu_backward.default, aten.tanh_backward.default,
    aten.sigmoid_backward.default, aten.softplus_backward.default, aten.threshold_backward.default,
    aten.leaky_relu_backward.default, aten.elu_backward.default, aten.hardtanh_backward.default,
    aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.mish_backward.default,
    aten.log_sigmoid_backward.default, aten.rrelu_with_noise_backward.default,
):  # fmt: skip
    rule(op, _pointwise("0"))

# Pointwise, though torch does not tag them; of the last ones only the operand's shape matters.
for op in (
    aten.masked_fill.Tensor, aten.complex.default, aten.hardswish.default, aten.log_sigmoid_forward.default,
    aten._prelu_kernel.default, aten._prelu_kernel_backward.default, aten.polar.default, aten.rsub.Tensor,
    aten.rsub.Scalar, aten.ones_like.default, aten.full_like.default, aten.empty_like.default, aten.fill.Scalar,
    aten.fill.Tensor,
):  # fmt: skip
    rule(op, _pointwise())
rule(aten.zeros_like.default, _pointwise("0"))


# Ops that make tensors.


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of unwritten memory, on meta: it has no values."""
    return torch.empty(shape, dtype=dtype, device="meta")


rule((aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format), "-> ...", sizes=0)
new = (aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)
rule(new, "_ -> ...", sizes=1)

# The value of an element depends on its position.
rule((aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default), "-> 1")
rule((aten.eye.default, aten.eye.m), "-> 1 1")
rule(aten.scalar_tensor.default, "-> ")


# The op that ``shardc.annotate`` leaves in a graph.


@lru_cache(maxsize=1)
def annotate_op() -> Any:
    """``torch.ops.shardc.annotate(x, spec, priorities, text="")``: a copy of x; its backward annotates the gradient.

    ``text``: the annotation as the user wrote it, if that is no call of ``annotate``.
    """

    def copy(x: torch.Tensor, spec: str, priorities: Sequence[int] = (), *, text: str = "") -> torch.Tensor:
        return x.clone()

    def keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, str], output: torch.Tensor) -> None:
        (_, ctx.spec, ctx.priorities), ctx.text = inputs, keyword_only_inputs["text"]

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return op(gradient, ctx.spec, ctx.priorities, text=ctx.text), None, None

    schema = "(Tensor x, str spec, int[] priorities=[], *, str text='') -> Tensor"
    op = torch.library.custom_op("shardc::annotate", copy, mutates_args=(), schema=schema)
    op.register_fake(lambda x, spec, priorities=(), *, text="": torch.empty_like(x))
    op.register_autograd(backward, setup_context=keep)
    return op


annotate_op()
ANNOTATE: Any = torch.ops.shardc.annotate.default
rule(ANNOTATE, _pointwise())  # not linear: the user's sharding closes every open sum
