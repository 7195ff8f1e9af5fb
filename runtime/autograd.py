"""A compiled call as one node of torch's autograd graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph

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
        ctx.step, ctx.given = step, step.given(values, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs that are not handed to their parameters at once."""
        given = ctx.given.values
        nodes = [node for node, _ in ctx.next_functions][-len(given) :]
        is_graph = torch.is_grad_enabled()
        with torch.no_grad():
            ctx.given.check(given)
            if ctx.step.copies is not None:
                torch.autograd.Variable._execution_engine.queue_callback(ctx.step.copies.note_backward)
            waiting = {} if is_graph else ctx.step.waiting(given, nodes)
            found = ctx.step.backward(ctx.saved, gradients, ctx.given, keeps_graph(), waiting)
        return None, *(once_only(found) if is_graph else handed_over(found, given, nodes))
