"""A bucket: several collectives of one kind over the same axes that go as one, over a flat buffer.

In global shapes it is as much an identity as its members are; a runtime puts their local values into one buffer.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.language.kinds import LOCAL_KINDS, Kind
from shardc.language.mesh import axis_of
from shardc.program.collective import COLLECTIVES, EXCHANGES
from shardc.program.node import is_getitem
from shardc.program.program import Program


def bucket(kind: Kind, axes: tuple[str, ...], args: tuple[tuple[Any, ...], ...], *xs: Any) -> tuple[Any, ...]:
    """Each of ``xs`` through a collective of this kind, whose further arguments are those of ``args`` at its place."""
    return xs


@dataclass(frozen=True, slots=True)
class Member:
    """One collective: of ``operand``, with ``args`` after the value, to the node's result at ``index``."""

    kind: Kind
    args: tuple[Any, ...]
    operand: fx.Node
    index: int


def members(node: fx.Node) -> tuple[Member, ...]:
    """The collectives that a node is: itself, those of a bucket, or none."""
    given: tuple[Any, ...] = node.args
    if node.target in COLLECTIVES:
        return (Member(COLLECTIVES[node.target], given[1:], given[0], 0),)
    if node.target is not bucket:
        return ()
    kind, axes, args, *operands = given
    pairs = enumerate(zip(args, operands, strict=True))
    return tuple(Member(kind, (axes, *rest), operand, i) for i, (rest, operand) in pairs)


def axes_of(node: fx.Node) -> tuple[str, ...]:
    """The mesh axes along which ranks exchange what a node moves; none where it sends nothing."""
    sent = [part for part in members(node) if part.kind not in LOCAL_KINDS]
    given = [axes for part in sent for axes in part.args[: 2 if part.kind == "collective_permute" else 1]]
    given += [node.args[1]] if node.target in EXCHANGES else []
    return tuple(dict.fromkeys(axis_of(part) for axes in given for part in axes))


def set_operand(node: fx.Node, member: Member, operand: fx.Node) -> None:
    """Give a member another operand."""
    args = list(node.args)
    args[3 + member.index if node.target is bucket else 0] = operand
    node.args = tuple(args)


def results(node: fx.Node, member: Member) -> Iterator[fx.Node]:
    """The nodes that stand for what a member makes."""
    if node.target is not bucket:
        yield node
        return
    yield from (user for user in node.users if user.target is operator.getitem and user.args[1] == member.index)


MAX_CHAIN = 3  # ops between an input and its gather: a cast, views


def is_early(node: fx.Node) -> bool:
    """Whether a node is nothing but all_gathers of what a few ops make of inputs: it could be the first call of all."""
    parts = members(node)
    return bool(parts) and all(part.kind == "all_gather" and chain(part.operand) is not None for part in parts)


def chain(node: fx.Node) -> list[fx.Node] | None:
    """The ops that make a value of an input, first to last; None of what more is computed for."""
    found: list[fx.Node] = []
    while node.op == "call_function":
        if len(node.all_input_nodes) != 1 or is_getitem(node) or members(node) or len(found) == MAX_CHAIN:
            return None
        found.insert(0, node)
        node = node.all_input_nodes[0]
    return found if node.op == "placeholder" else None


def move_before(place: fx.Node, node: fx.Node) -> None:
    """Make what a gather takes before another node, unless it is made there already."""
    for part in members(node):
        for each in chain(part.operand) or ():
            if place < each:
                place.prepend(each)


def layer(program: Program, node: fx.Node) -> str:
    """Which layer reads a gather: the first user's module, up to the first number or else its first name.

    Copies that are kept between steps are no layer's: all of them live together.
    """
    if program.source(node).phase == "update":
        return ""
    module = program.source(node).module or program.source(next(iter(node.users), node)).module
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", module)
    return found[0] if found else module.partition(".")[0]


def first_reader(node: fx.Node) -> fx.Node | None:
    """The first call that reads what a gather makes; None where it is but returned."""
    picks = [user for user in node.users if is_getitem(user)] if node.target is bucket else [node]
    readers = [user for pick in picks for user in pick.users if user.op == "call_function"]
    return min(readers, default=None)
