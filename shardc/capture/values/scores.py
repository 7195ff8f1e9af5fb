"""Split a function on scores of attention into a change of each score by itself and terms that are then added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ops.attention.mask import CONSTANTS, REFERENCE, Step
from shardc.ops.pointwise import is_pointwise
from shardc.program.node import ancestors, last_node

aten = torch.ops.aten
SAME = (aten.alias.default, aten.detach.default)

Added = tuple[str, fx.Node]  # "add" or "sub" a value, or "show" scores where it is true, and hide them elsewhere


def added_to(graph: fx.Graph) -> tuple[fx.Node, list[Added]]:
    """Split the one result of a graph: a value made from the first operand, and the terms added to it in the end."""
    score = next(iter(graph.nodes))
    changed = {score}
    changed.update(node for node in graph.nodes if not changed.isdisjoint(node.all_input_nodes))  # in order
    results: Any = last_node(graph).args[0]
    root, added = results[0], list[Added]()
    while (step := _added_last(root, changed)) is not None:
        root, last = step
        added.append(last)
    return root, added


def _added_last(root: fx.Node, changed: set[fx.Node]) -> tuple[fx.Node, Added] | None:
    """The value before the last addition, and the added term; None if the last step is no addition."""
    args: Any = root.args
    if root not in changed or root.kwargs:
        return None
    if root.target is aten.where.self and args[0] not in changed and args[1] in changed and _hides(args[2]):
        return args[1], ("show", args[0])
    if root.target not in (aten.add.Tensor, aten.sub.Tensor) or not all(isinstance(arg, fx.Node) for arg in args):
        return None
    one, other = args
    if root.target is aten.add.Tensor and one not in changed:
        one, other = other, one
    return (one, (root.target.overloadpacket.__name__, other)) if one in changed and other not in changed else None


def _hides(node: Any) -> bool:
    is_number = isinstance(node, fx.Node) and str(node.target).removeprefix("aten.") in CONSTANTS
    return is_number and -inf in node.args


def steps_between(given: Sequence[fx.Node], root: fx.Node) -> tuple[Step, ...] | None:
    """The steps that compute ``root`` from ``given`` and numbers alone; None if it takes other values or ops."""
    places, steps = {node: i for i, node in enumerate(given)}, list[Step]()
    needed = ancestors(root)
    for node in root.graph.nodes:
        if node not in needed or node in places:
            continue
        args = [places.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target in SAME and isinstance(args[0], int):
            places[node] = args[0]
        elif (step := _step(node, places)) is None:
            return None
        else:
            places[node] = len(given) + len(steps)
            steps.append(step)
    return tuple(steps) if places[root] == len(given) + len(steps) - 1 else None


def _step(node: fx.Node, places: Mapping[fx.Node, int]) -> Step | None:
    is_plain = node.op == "call_function" and is_pointwise(node.target) and not node.kwargs
    if not is_plain or not all(arg in places if isinstance(arg, fx.Node) else _is_number(arg) for arg in node.args):
        return None
    args = tuple((REFERENCE, places[arg]) if isinstance(arg, fx.Node) else arg for arg in node.args)
    return Step(str(node.target).removeprefix("aten."), args)


def _is_number(arg: Any) -> bool:
    return arg is None or isinstance(arg, (bool, int, float))


def sum_of(module: fx.GraphModule, added: Sequence[Added], operands: Sequence[Tensor]) -> Tensor | None:
    """The sum of the added terms, given the operands of the graph after the first; None if nothing is added."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(placeholders[1:], operands, strict=True))
    total: Tensor | None = None
    for kind, node in added:
        value = _value(module, node, values)
        if kind == "show":
            shown, hidden = (torch.scalar_tensor(number, device=value.device) for number in (0.0, -inf))
            value = torch.where(value, shown, hidden)
        value = -value if kind == "sub" else value
        total = value if total is None else total + value
    return total


def _value(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node, computed now. It is added to ``values``, with all that it depends on."""
    for each in _unknown(node, values):
        if each.op == "get_attr":
            values[each] = getattr(module, str(each.target))
        else:
            args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
            values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _unknown(node: fx.Node, values: Mapping[fx.Node, Any]) -> Iterator[fx.Node]:
    needed = ancestors(node)
    return (each for each in list(node.graph.nodes) if each in needed and each not in values)
