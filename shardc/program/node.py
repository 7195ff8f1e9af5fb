"""An fx node: what it calls, its arguments, what it depends on. No facts about values live here."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.ops.pointwise import ANNOTATE


def is_size(node: fx.Node) -> bool:
    """Whether a node of a traced graph is a number that follows from sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one result of an op that has several."""
    return node.op == "call_function" and node.target is operator.getitem


def is_annotation(node: fx.Node) -> bool:
    """Whether a node is a ``shardc.annotate`` of the user's model."""
    return node.target is ANNOTATE


def is_cast(node: fx.Node) -> bool:
    """Whether a node changes the dtype of its operand, and nothing else."""
    return str(node.target) in ("aten._to_copy.default", "prims.convert_element_type.default")


def is_view(node: fx.Node) -> bool:
    """Whether the result of a node may share its operand's memory."""
    return isinstance(node.target, torch._ops.OpOverload) and _returns_view(node.target)


@functools.cache
def _returns_view(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return bool(returns) and all(entry.alias_info is not None for entry in returns)


def is_free(node: fx.Node) -> bool:
    """Whether a node computes nothing: it views its operand, or picks one of its results."""
    return is_getitem(node) or is_view(node)


def casts_behind(node: fx.Node, *others: Any) -> list[fx.Node]:
    """A node, its operand if it is a cast or a call of ``others``, and so on to the first node that is neither."""
    chain = [node]
    while is_cast(chain[-1]) or chain[-1].target in others:
        chain.append(operand(chain[-1]))
    return chain


def last_node(graph: fx.Graph) -> fx.Node:
    """The last node of a graph; the output node if the graph is complete."""
    return next(iter(reversed(graph.nodes)))


def add_node(graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None,
             name: str | None = None) -> fx.Node:  # fmt: skip
    """Add a node to a graph. The arguments are set afterwards, since ``create_node`` would search them for symbols."""
    node = graph.create_node(op, target, name=name)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = dict(kwargs)
    return node


def add_copy(graph: fx.Graph, node: fx.Node, transform: Callable[[fx.Node], Any]) -> fx.Node:
    """Add a copy of a node, of another graph or of this one, to a graph; ``transform`` maps its operands."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), transform)
    copied = add_node(graph, node.op, node.target, args, kwargs, node.name)
    copied.meta.update(node.meta)
    return copied


def op_name(target: Any) -> str:
    """The short name of an op: ``add`` for ``aten.add.Tensor``."""
    schema = getattr(target, "_schema", None)
    return str(target.__name__) if schema is None else str(schema.name).partition("::")[2]


def is_uniform(node: fx.Node) -> bool:
    """Whether all elements of a value are one number, so that no rank needs another's."""
    return node.target is torch.ops.aten.full.default


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from torch's generator; attention does only with dropout and without a seed of its own."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = arguments(node) if hasattr(node.target, "_schema") else {}
    return given.get("dropout_p") != 0.0 and given.get("random") is None


def takes_device(target: Any) -> bool:
    """Whether an op has a ``device`` argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of a call of an op, by name and in order, defaults included."""
    if not hasattr(node.target, "_schema"):
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
        bound.apply_defaults()
        return dict(bound.arguments)
    schema = node.target._schema.arguments
    return {
        argument.name: node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(schema)
    }


def operand(node: fx.Node, position: int = 0) -> fx.Node:
    """The node that is the argument at a position."""
    given = node.args[position]
    assert isinstance(given, fx.Node), (node, position, given)
    return given


def operands(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """The tensor arguments of a call in schema order, lists flattened, None where an optional one is absent."""
    args, found = node.args, list[fx.Node | None]()
    if not hasattr(node.target, "_schema"):
        return tuple([entry for entry in args if isinstance(entry, fx.Node)])
    for i, name in _tensor_places(node.target):
        given = args[i] if i < len(args) else node.kwargs.get(name)
        if isinstance(given, (list, tuple)):
            found += [entry if isinstance(entry, fx.Node) else None for entry in given]
        else:
            found.append(given if isinstance(given, fx.Node) else None)
    return tuple(found)


def set_operands(node: fx.Node, new: Sequence[fx.Node | None]) -> None:
    """Replace the tensor arguments of a call, in the order of ``operands``; None keeps the present one."""
    left = iter(new)

    def replaced(entry: Any) -> Any:
        return next(left) or entry

    if not hasattr(node.target, "_schema"):
        node.args = tuple(replaced(entry) if isinstance(entry, fx.Node) else entry for entry in node.args)
        return
    args, kwargs = list(node.args), dict(node.kwargs)
    for key, given in _tensor_arguments(node):
        fresh = type(given)(map(replaced, given)) if isinstance(given, (list, tuple)) else replaced(given)
        if isinstance(key, int):
            args[key] = fresh
        elif key in kwargs:
            kwargs[key] = fresh
    node.args, node.kwargs = tuple(args), kwargs


def nodes_after(last: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a graph that come after one of its nodes."""
    while (last := last.next).op != "root":
        yield last


def ancestors(*ends: fx.Node) -> set[fx.Node]:
    """The nodes and all that they depend on."""
    return reached(ends, lambda node: node.all_input_nodes)


def descendants(*starts: fx.Node) -> set[fx.Node]:
    """The nodes and all that depends on them, the output node included."""
    return reached(starts, lambda node: node.users)


def reached(starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes and all that are reached from them by ``step``, which leads from one node to others."""
    nodes = set(starts)
    todo = list(nodes)
    while todo:
        fresh = [node for node in step(todo.pop()) if node not in nodes]
        nodes.update(fresh)
        todo += fresh
    return nodes


def _tensor_arguments(node: fx.Node) -> Iterator[tuple[int | str, Any]]:
    """The arguments that may hold tensors, each by its position or, beyond those given by position, its name."""
    for i, name in _tensor_places(node.target):
        yield (i, node.args[i]) if i < len(node.args) else (name, node.kwargs.get(name))


@functools.cache
def _tensor_places(target: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument of an op that may hold tensors."""
    arguments = enumerate(target._schema.arguments)
    return tuple((i, argument.name) for i, argument in arguments if "Tensor" in str(argument.type))
