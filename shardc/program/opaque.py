"""Opaque calls: work of a model that is no op of torch, as one node of a graph, with its backward as another.

Tracing sees ``torch.ops.shardc.opaque``, which takes a key and flat tensors and returns flat tensors. A program has
the ``Opaque`` of that key in its place. Both run it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import getitem
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from shardc.language.sharding import TensorType

_KEYS = count()
_ALIVE: WeakValueDictionary[int, Opaque] = WeakValueDictionary()  # by the key that torch's op takes


@dataclass(frozen=True, eq=False)
class Opaque:
    """A callable that a graph may hold: ``run`` on flat tensors gives a tensor for each of ``types``."""

    name: str
    run: Callable[..., Sequence[Tensor]]
    types: tuple[TensorType, ...]
    tags: tuple[Any, ...] = ()
    key: int = field(default_factory=lambda: next(_KEYS))

    def __post_init__(self) -> None:
        _ALIVE[self.key] = self

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        """Run through torch's op, so that a trace of a program's run has one op for it."""
        results: list[Tensor] = torch.ops.shardc.opaque(self.key, operands)
        return results


def hold_opaques(traced: fx.GraphModule) -> None:
    """Put the ``Opaque`` in place of its key in a traced graph, and make an opaque call of every nested call.

    Nested calls are those of higher-order ops, which tracing also makes of ops that change their operands, and those of
    ops with nested results.
    """
    for node in traced.graph.nodes:
        if node.target is torch.ops.shardc.opaque.default:
            key, operands = node.args
            node.target, node.args = _ALIVE[key], tuple(operands)
        elif node.op == "call_function":
            value = node.meta.get("val")
            entries = value if isinstance(value, (tuple, list)) else ()
            nests = isinstance(value, dict) or any(isinstance(entry, (tuple, list, dict)) for entry in entries)
            if isinstance(node.target, HigherOrderOperator) or (nests and node.target is not getitem):
                _flatten(traced, node)


def _flatten(traced: fx.GraphModule, node: fx.Node) -> None:
    """Replace a node by an opaque call, and the getitems of its results by those of the call."""
    arguments, nest = pytree.tree_flatten((node.args, node.kwargs))
    places = [i for i, leaf in enumerate(arguments) if isinstance(leaf, fx.Node) and _body(traced, leaf) is None]
    fixed = [_body(traced, leaf) if isinstance(leaf, fx.Node) and i not in places else leaf
             for i, leaf in enumerate(arguments)]  # fmt: skip
    leaves, shape = pytree.tree_flatten(node.meta["val"])
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    target: Any = node.target
    call_target = flat_call(target, fixed, nest, places)

    def run(*operands: Tensor) -> list[Tensor]:
        results = pytree.tree_leaves(call_target(*operands))
        return [results[i] for i in tensors]

    types = tuple(TensorType.of(leaves[i]) for i in tensors)
    inner = next((leaf for leaf in arguments if isinstance(leaf, torch._ops.OpOverload)), target)
    name = str(inner if str(target).startswith("auto_functionalized") else target).removesuffix(".default")
    opaque = Opaque(name, run, types, tags=tuple(getattr(inner, "tags", ())))
    with traced.graph.inserting_before(node):
        replacement = traced.graph.call_function(opaque, tuple(arguments[i] for i in places))
    replacement.meta["val"] = [leaves[i] for i in tensors]
    indices = [tensors.index(i) if i in tensors else None for i in range(len(leaves))]
    _repoint(node, replacement, pytree.tree_unflatten(indices, shape))


def flat_call(target: Any, given: Sequence[Any], nest: Any, places: Sequence[int]) -> Callable[..., Any]:
    """``target`` as a function of its flat arguments at ``places``; the others are as in ``given``."""

    def call(*operands: Tensor) -> Any:
        filled = list(given)
        for i, operand in zip(places, operands, strict=True):
            filled[i] = operand
        args, kwargs = pytree.tree_unflatten(filled, nest)
        return target(*args, **kwargs)

    return call


def _body(traced: fx.GraphModule, node: fx.Node) -> Any:
    """The attribute of a ``get_attr`` node that is no tensor, such as the graph argument of a higher-order op."""
    value = getattr(traced, str(node.target)) if node.op == "get_attr" else None
    return None if isinstance(value, Tensor) else value


def _repoint(node: fx.Node, source: fx.Node, indices: Any) -> None:
    """Let getitems of ``node`` read from ``source``. ``indices``: those of results there, nested like the results."""
    if isinstance(indices, int):
        with node.graph.inserting_after(source):
            only = node.graph.call_function(getitem, (source, indices))
        only.meta["val"] = source.meta["val"][indices]
        node.replace_all_uses_with(only)
        return
    for user in list(node.users):
        assert user.target is getitem, user
        index = indices[user.args[1]]
        if isinstance(index, int):
            user.args = (source, index)
        else:
            _repoint(user, source, index)


def call(forward: Opaque, backward: Opaque, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run ``forward`` on the operands, differentiably, once.

    ``backward`` takes the operands and the gradient of each floating result, and returns that of each floating operand.
    """
    results: tuple[Tensor, ...] = _Call.apply(forward, backward, *operands)
    return results


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(forward: Opaque, backward: Opaque, *operands: Tensor) -> tuple[Tensor, ...]:
        return tuple(forward(*operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.call, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.mark_non_differentiable(*(tensor for tensor in output if not tensor.is_floating_point()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        operands: tuple[Tensor, ...] = ctx.saved_tensors
        found = iter(ctx.call(*operands, *(tangent for tangent in tangents if tangent.is_floating_point())))
        return None, None, *(next(found) if operand.is_floating_point() else None for operand in operands)


def _run(key: int, operands: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in _ALIVE[key].run(*operands)]  # an op may not return an operand


def _fake(key: int, operands: Sequence[Tensor]) -> list[Tensor]:
    device = operands[0].device
    return [torch.empty(type_.shape, dtype=type_.dtype, device=device) for type_ in _ALIVE[key].types]


_OP = torch.library.custom_op(
    "shardc::opaque", _run, mutates_args=(), schema="(int key, Tensor[] operands) -> Tensor[]"
)
_OP.register_fake(_fake)
