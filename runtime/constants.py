"""What no input has a part in, as the numbers of rows: it is made once, and not again at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shardc.collective import COLLECTIVES, LOCAL_KINDS, collective_kind
from shardc.ownership import is_new
from shardc.program import Program

LARGEST = 2**20  # bytes; what is larger is not worth its memory between steps


def constants(program: Program) -> list[fx.Node]:
    """The calls whose results are the same at every step and small, in program order.

    None of which a user could be given the memory: what is returned, or looked at by what may be.
    """
    found: dict[fx.Node, None] = {}
    for node in program.calls:
        if found.keys() >= set(node.all_input_nodes) and not program.has_many(node) and _is_repeatable(node):
            type_ = program.local_type(node)
            if type_ is not None and type_.nbytes <= LARGEST:
                found[node] = None
    for node in reversed(list(found)):
        if not all(user in found or is_new(user) for user in node.users):
            del found[node]
    return list(found)


def share(values: list[Any]) -> None:
    """Let tensors of the same bits be one, as the masks that every layer makes; none of them is ever written."""
    seen: dict[tuple[Any, ...], list[Tensor]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and not (value.is_conj() or value.is_neg()):
            alike = seen.setdefault((value.dtype, value.shape, value.stride()), [])
            values[i] = next((each for each in alike if torch.equal(_bits(each), _bits(value))), value)
            if values[i] is value:
                alike.append(value)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_repeatable(node: fx.Node) -> bool:
    """Whether a call does the same each time, sends nothing, and is torch's."""
    if node.target in COLLECTIVES:
        return collective_kind(node) in LOCAL_KINDS
    target: Any = node.target
    is_torch = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    return is_torch and torch.Tag.nondeterministic_seeded not in target.tags
