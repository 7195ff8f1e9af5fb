"""Gradients at the end of a backward: given to their parameters at once where autograd would do nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .open_sum import join


def is_accumulated(node: Any) -> bool:
    """Whether the backward that runs adds to ``.grad`` there; not so ``autograd.grad``, nor one of other ``inputs``."""
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad of a leaf
        return False


def once_only(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, where a graph of them is made (``create_graph``): a RuntimeError if someone goes through it."""
    refuse: Any = torch._C._functions.DelayedError(
        b"a gradient of a parallel model has no gradient itself: leave create_graph out", len(gradients)
    )
    refused = refuse(*(gradient if gradient is None else gradient.detach().requires_grad_() for gradient in gradients))
    return tuple(refused)


def handed_over(
    gradients: Sequence[Tensor | None], values: Sequence[Tensor | None], nodes: Sequence[Any]
) -> list[Tensor | None]:
    """The gradients that are left for autograd, where those of parameters are set that have none yet, or an open one.

    ``values``: the inputs that the gradients are of; ``nodes`` of autograd: where these would be passed on to, in a
    list that alone holds them. Autograd would detach each gradient first, which for a DTensor costs more than a small
    op. What hooks are to see is left, also where someone holds a node, who may have given it a hook.
    """
    holders, unheld = list(map(sys.getrefcount, nodes)), _unheld()
    left, is_all = list(gradients), is_accumulated(_other_node())
    for i, (gradient, value) in enumerate(zip(gradients, values, strict=True)):
        if isinstance(gradient, DTensor) and isinstance(value, DTensor) and holders[i] == unheld:
            if _is_free(value) and (is_all or is_accumulated(nodes[i])) and _is_set(value, gradient):
                left[i] = None
    return left


@cache
@torch.enable_grad()
def _unheld() -> int:
    """How many hold a node in a list of nodes, if no one holds it beside."""
    leaf = torch.zeros((), requires_grad=True)
    made_by: Any = leaf.view_as(leaf).grad_fn
    nodes = [node for node, _ in made_by.next_functions]
    return next(map(sys.getrefcount, nodes))


@cache
@torch.enable_grad()
def _other_node() -> Any:
    """A leaf's node that is in no one's graph: a backward of all leaves would run it too."""
    return torch.zeros((), requires_grad=True).view(()).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _is_free(leaf: Tensor) -> bool:
    """Whether no one is told of its gradient."""
    return leaf.is_leaf and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks


def _is_set(leaf: DTensor, gradient: DTensor) -> bool:
    """Whether a leaf has its gradient now, with nothing to be computed."""
    before = leaf.grad
    if before is None and gradient.stride() == leaf.stride():
        leaf.grad = gradient
        return True
    return isinstance(before, DTensor) and join(before, gradient)
