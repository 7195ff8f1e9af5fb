"""Numbers that a graph being traced knows already: those that depend on its constants alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn


def known_number(asked: fx.Node, root: nn.Module) -> Any:
    """What the node would return, or None where it depends on an input or on chance. ``root`` holds the constants."""
    needed = _ancestors(asked)
    if any(node.op == "placeholder" or _is_random(node) for node in needed):
        return None
    values: dict[fx.Node, Any] = {}
    for node in asked.graph.nodes:
        if node in needed:
            values[node] = _evaluate(node, root, values)
    return values[asked]


def _ancestors(asked: fx.Node) -> set[fx.Node]:
    """The node and all that it depends on."""
    found = {asked}
    todo = [asked]
    while todo:
        operands = [operand for operand in todo.pop().all_input_nodes if operand not in found]
        found.update(operands)
        todo += operands
    return found


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _evaluate(node: fx.Node, root: nn.Module, values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(root, str(node.target))
    assert callable(node.target), node
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)
