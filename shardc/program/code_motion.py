"""Code motion of collectives: gathers of inputs may run earlier, reductions of gradients later."""

from __future__ import annotations

import re

from torch import fx

from shardc.ops.piece import fit
from shardc.program.collective import (
    EXCHANGES,
)
from shardc.program.communication import bucket, members
from shardc.program.node import descendants, is_getitem, operands
from shardc.program.program import Program, ends_of, parameters_of

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


def deferrable(program: Program) -> frozenset[fx.Node]:
    """The calls that may run once for several backwards, on the sums of what each backward has for them.

    An all_reduce that ends in gradients of parameters, through nothing but linear ops of such alone, and these ops. So
    a reduce_scatter under stage 1 of ``Zero``; elsewhere it makes a gradient smaller, and is not put off.
    """
    zero = program.options.zero
    kinds = {"all_reduce", "reduce_scatter"} if zero is not None and zero.stage == 1 else {"all_reduce"}
    parameters = _gradients_of_parameters(program)
    ends: set[fx.Node] = set()  # linear ops whose value goes to gradients of parameters alone
    found: set[fx.Node] = set()
    for node in reversed(list(program.graph.nodes)):
        users = set(node.users) - {program.output_node}
        is_result = program.output_node in node.users
        if node.op != "call_function" or not users <= ends | found or (is_result and node not in parameters):
            continue
        sent = members(node)
        if sent and all(each.kind in kinds and each.args[1] == "sum" for each in sent):
            found.add(node)
        elif _is_linear(program, node):
            ends.add(node)
    return frozenset(_closed(program, found))


def _gradients_of_parameters(program: Program) -> set[fx.Node]:
    """Results that are gradients of parameters and nothing else."""
    parameters, ends = set(parameters_of(program).values()), list(ends_of(program))
    others = {node for output, owner, node in ends if output.kind != "gradient" or owner not in parameters}
    return {node for *_, node in ends if node is not None} - others


def _is_linear(program: Program, node: fx.Node) -> bool:
    if is_getitem(node) or node.target is fit:
        return True
    if sent := members(node):
        return all(each.kind != "mask_padding" and each.args[1] not in ("max", "min") for each in sent)
    if node.target in EXCHANGES:
        return False  # its local types do not say its rule
    given = frozenset(i for i, taken in enumerate(operands(node)) if taken is not None)
    return given in program.rule(node).linear


def _closed(program: Program, reductions: set[fx.Node]) -> set[fx.Node]:
    """The reductions and what follows, without those that something else is joined to on the way."""
    while True:
        reached = {node: descendants(node) - {program.output_node} for node in reductions}
        closed = set().union(*reached.values())
        open_ends = {each for each in closed - reductions if not set(each.all_input_nodes) <= closed}
        if not open_ends:
            return closed
        reductions = {node for node in reductions if not reached[node] & open_ends}
