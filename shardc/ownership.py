"""Whose memory a value lies in, and whether anyone still reads it there: then it may be written over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.node import is_getitem, operand
from shardc.ops.contraction import dot
from shardc.ops.embedding import lookup_rows, scatter_rows
from shardc.ops.position import MAKE_NEW
from shardc.program import Program

aten = torch.ops.aten
NEW = {dot, lookup_rows, scatter_rows, *MAKE_NEW}


def dies_at(value: fx.Node, reader: fx.Node, part: Mapping[fx.Node, int]) -> bool:
    """Whether a value lies in memory that is made in a part, and no one reads while ``reader`` runs or after.

    ``part``: its calls, each with its place in the order in which they run. Someone who sends a value may still read it
    later, and what an op of another library gives may share its memory.
    """
    root = maker(value)
    if root not in part or not is_new(root) or any(maker(each) is root for each in _others(reader, value)):
        return False
    sharing = [root]
    for node in sharing:  # which grows
        for user in set(node.users) - {reader}:
            if part.get(user, len(part)) > part[reader]:
                return False
            if _is_view(user):
                sharing.append(user)
            elif not is_new(user):
                return False
    return True


def is_whole(value: fx.Node, program: Program) -> bool:
    """Whether a value is all of the memory that it lies in, each element once: not so a part of it, expanded again."""
    chain = looked_at(value)
    sizes = {program.value_type(program.value(each)).numel for each in chain}
    return len(sizes) == 1 and all(each.target is not aten.as_strided.default for each in chain)


def alone_in_memory(values: Sequence[fx.Node]) -> set[fx.Node]:
    """Those of values that lie in memory which a call of torch made, and in which none of the others lies."""
    count = Counter(map(maker, values))
    return {value for value in values if count[maker(value)] == 1 and is_new(maker(value))}


def _others(reader: fx.Node, value: fx.Node) -> list[fx.Node]:
    return [node for node in reader.all_input_nodes if node is not value]


def maker(node: fx.Node) -> fx.Node:
    """The call that made the memory, as far as views say."""
    return looked_at(node)[-1]


def looked_at(value: fx.Node) -> list[fx.Node]:
    """A value, what it is a view of, and so on to what made the memory."""
    chain = [value]
    while _is_view(chain[-1]):
        chain.append(operand(chain[-1]))
    return chain


def _is_view(node: fx.Node) -> bool:
    """Whether a call of torch may look at its first operand."""
    is_of_torch = getattr(node.target, "namespace", "") == "aten"
    if not is_of_torch or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return node.target is aten._unsafe_view.default or not _makes(node.target, 0)


def is_new(node: fx.Node) -> bool:
    """Whether what a call gives is in memory of its own. Virtual ranks share what a bucket makes."""
    if is_getitem(node):
        made_by, index = operand(node), node.args[1]
        twins = [user for user in made_by.users if user.args[1] == index]
        return len(twins) == 1 and _makes(made_by.target, index)
    return node.target in NEW or _makes(node.target, 0)


def _makes(target: Any, index: Any) -> bool:
    """Whether an op of torch puts a result into memory of its own."""
    if getattr(target, "namespace", "") != "aten" or target is aten._unsafe_view.default:
        return False
    returns = target._schema.returns
    return index < len(returns) and str(returns[index].type) == "Tensor" and returns[index].alias_info is None
