"""Which kernel runs a call: a contraction bound to its shapes, with its bias; a result in the memory of an operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.node import is_getitem, is_pointwise, operand
from shardc.ops.contraction import BoundDot, dot
from shardc.ops.position import MAKE_NEW, WRITE_OVER
from shardc.program import Program

aten = torch.ops.aten
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


def biased(part: Sequence[fx.Node], program: Program) -> dict[fx.Node, fx.Node]:
    """Sums that add a bias to a contraction whose product no one else reads, each with the contraction."""
    here, found = set(part), {}
    for node in part:
        if node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
            product, bias = node.all_input_nodes
            if product in here and product.target is dot and len(product.users) == 1:
                if node.args == (product, bias) and _fits(program, product, bias, node):
                    found[node] = product
    return found


def _fits(program: Program, product: fx.Node, bias: fx.Node, total: fx.Node) -> bool:
    made, added = program.type(product), program.value_type(program.value(bias))
    is_row = added.shape == made.shape[-1:] and len(made.shape) > 1 and program.type(total) == made
    return is_row and added.dtype == made.dtype and BoundDot(str(product.args[2])).takes_bias


def dies_at(value: fx.Node, reader: fx.Node, part: Mapping[fx.Node, int]) -> bool:
    """Whether a value lies in memory that is made in a part, and no one reads while ``reader`` runs or after.

    ``part``: its calls, each with its place in the order in which they run. Someone who sends a value may still read it
    later, and what an op of another library gives may share its memory.
    """
    root = _root(value)
    if root not in part or not _is_new(root) or any(_root(each) is root for each in _others(reader, value)):
        return False
    sharing = [root]
    for node in sharing:  # which grows
        for user in set(node.users) - {reader}:
            if part.get(user, len(part)) > part[reader]:
                return False
            if _is_view(user):
                sharing.append(user)
            elif not _is_new(user):
                return False
    return True


def _others(reader: fx.Node, value: fx.Node) -> list[fx.Node]:
    return [node for node in reader.all_input_nodes if node is not value]


def _root(node: fx.Node) -> fx.Node:
    """The call that made the memory, as far as views say."""
    while _is_view(node):
        node = operand(node)
    return node


def _is_view(node: fx.Node) -> bool:
    """Whether a call of torch may look at its first operand."""
    is_of_torch = getattr(node.target, "namespace", "") == "aten"
    if not is_of_torch or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return node.target is aten._unsafe_view.default or not _makes(node.target, 0)


def _is_new(node: fx.Node) -> bool:
    """Whether what a call gives is in memory of its own. Virtual ranks share what a bucket makes."""
    if is_getitem(node):
        made_by, index = operand(node), node.args[1]
        twins = [user for user in made_by.users if user.args[1] == index]
        return len(twins) == 1 and _makes(made_by.target, index)
    return node.target is dot or node.target in MAKE_NEW or _makes(node.target, 0)


def _makes(target: Any, index: Any) -> bool:
    """Whether an op of torch puts a result into memory of its own."""
    if getattr(target, "namespace", "") != "aten" or target is aten._unsafe_view.default:
        return False
    returns = target._schema.returns
    return index < len(returns) and str(returns[index].type) == "Tensor" and returns[index].alias_info is None


def in_place(
    node: fx.Node, part: Mapping[fx.Node, int], program: Program
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The op, with its arguments, that writes the result over an operand that no one reads after; None without one."""
    twin = _twin(node.target)
    if twin is None:
        return None
    orders = [node.args, (*node.args[1::-1], *node.args[2:])] if node.target in COMMUTATIVE else [node.args]
    for args in orders:
        first = args[0] if args else None
        if isinstance(first, fx.Node) and dies_at(first, node, part):
            owner, type_ = (program.value_type(program.value(each)) for each in (_root(first), first))
            if type_ == program.type(node) and owner.numel == type_.numel:
                return twin, args
    return None


def _twin(target: Any) -> Callable[..., Any] | None:
    """The form of a pointwise op, or of one of our own, that writes over its first operand."""
    if target in WRITE_OVER:
        return WRITE_OVER[target]
    if not is_pointwise(target) or target.namespace != "aten" or target._schema.name.endswith("_"):
        return None
    packet = getattr(aten, f"{target._schema.name.partition('::')[2]}_", None)
    twin = getattr(packet, target._overloadname, None)
    return twin if twin is not None and _names(twin) == _names(target) else None


def _names(target: Any) -> list[str]:
    return [argument.name for argument in target._schema.arguments]
