"""The op that ``shardc.annotate`` leaves in a graph: a copy of its operand, with the sharding that the user wrote."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from shardc.language.rule import rule
from shardc.ops.pointwise import pointwise


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
