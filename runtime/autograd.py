"""A compiled call as one node of torch's autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
from torch.distributed.tensor import DTensor

from shardc.error import OrderError

from .gradient import handed_over, once_only

if TYPE_CHECKING:
    from .step import Step


class Call(torch.autograd.Function):
    """The forward part in torch's forward, the backward part in its backward."""

    @staticmethod
    def forward(ctx: Any, step: Step, *values: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs."""
        ctx.set_materialize_grads(False)
        outputs, ctx.saved = step.forward(values)
        ctx.step, ctx.watched = step, step.watched(values, outputs)
        ctx.is_plain = [not isinstance(value, DTensor) for value in values]
        ctx.given = [None if value is None else ref(value) for value in values]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs that are not handed to their parameters at once."""
        given = [value and value() for value in ctx.given]
        nodes = [node for node, _ in ctx.next_functions][-len(given) :]
        is_graph = torch.is_grad_enabled()
        with torch.no_grad():
            _check(ctx.watched)
            if ctx.step.copies is not None:
                torch.autograd.Variable._execution_engine.queue_callback(ctx.step.copies.note_backward)
            waiting = {} if is_graph else ctx.step.waiting(given, nodes)
            found = ctx.step.backward(ctx.saved, gradients, ctx.is_plain, keeps_graph(), waiting)
        return None, *(once_only(found) if is_graph else handed_over(found, given, nodes))


def _check(watched: Sequence[tuple[ReferenceType[Tensor], int]]) -> None:
    """RuntimeError where a tensor that the backward needs was changed since the forward."""
    for reference, version in watched:
        tensor = reference()
        if tensor is not None and tensor._version != version:
            what, problem = (
                f"it needs a tensor of shape {list(tensor.shape)}",
                "that was changed in place after forward",
            )
            raise OrderError("backward", what, problem, "call backward before the optimizer's step")
