"""Gathers of what is there from the start, as of parameters that are stored in pieces: what they take, and for whom."""

from __future__ import annotations

import re

from torch import fx

from shardc.bucket import bucket, members
from shardc.node import is_getitem
from shardc.program import Program

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
