"""Numbers that a graph being traced knows already: those that depend on its constants alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from shardc.node import ancestors, is_pointwise, is_random

aten = torch.ops.aten


def known_number(asked: fx.Node, root: nn.Module) -> Any:
    """What the node would return, or None where it depends on an input or on chance. ``root`` holds the constants.

    A check by ``torch._check_tensor_all`` is taken to hold: it raises an error or does nothing.
    """
    if any(node.target is aten._is_all_true.default for node in asked.all_input_nodes):
        return True
    needed = ancestors(asked)
    if any(node.op == "placeholder" or is_random(node) for node in needed):
        return None
    values: dict[fx.Node, Any] = {}
    for node in asked.graph.nodes:
        if node in needed:
            values[node] = _evaluate(node, root, values)
    return values[asked]


def _evaluate(node: fx.Node, root: nn.Module, values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(root, str(node.target))
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return _on_one_row(node.target, args, kwargs)


def _on_one_row(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op; where the rows of dim 0 are all the same (stride 0, a batch), on one of them.

    So the cost of a capture does not grow with the batch.
    """
    tensors: list[torch.Tensor] = []
    map_aggregate((args, dict(kwargs)), lambda a: tensors.append(a) if isinstance(a, torch.Tensor) else None)
    ndim = max((tensor.ndim for tensor in tensors), default=0)
    tall = {id(tensor) for tensor in tensors if tensor.ndim == ndim and ndim and tensor.shape[0] > 1}
    spread = [tensor for tensor in tensors if id(tensor) in tall and tensor.stride(0) == 0]
    if not spread or len({id(tensor) for tensor in spread}) < len(tall) or not _goes_by_row(target, args, ndim):
        return target(*args, **kwargs)
    first: Any = lambda value: value[:1] if id(value) in tall else value  # noqa: E731
    result = target(*map_aggregate(args, first), **kwargs)
    return result.expand(spread[0].shape[0], *result.shape[1:]) if result.ndim else result


def _goes_by_row(target: Any, args: tuple[Any, ...], ndim: int) -> bool:
    """Whether equal rows in give equal rows out, or one number that does not depend on how many there are."""
    if target in (aten.cat.default, aten.cumsum.default):
        return len(args) > 1 and args[1] % ndim != 0
    return is_pointwise(target) or target in (aten.all.default, aten.any.default)
