"""Code motion of collectives: gathers of inputs may run earlier, reductions of gradients later."""

from __future__ import annotations

import re

from torch import fx

from shardc.ops.piece import fit
from shardc.program.collective import EXCHANGES
from shardc.program.communication import bucket, members
from shardc.program.node import descendants, is_getitem, operands
from shardc.program.program import Program, ends_of, parameters_of

MAX_CHAIN = 3  # ops between an input and its gather: a cast, views


def is_early(node: fx.Node) -> bool:
    """Whether a node only gathers inputs, a few ops after them, so that it could be the first call of the program."""
    parts = members(node)
    return bool(parts) and all(part.kind == "all_gather" and chain(part.operand) is not None for part in parts)


def chain(node: fx.Node) -> list[fx.Node] | None:
    """The ops from an input to a value, in order; None where there are more than ``MAX_CHAIN`` or several operands."""
    ops: list[fx.Node] = []
    while node.op == "call_function":
        if len(node.all_input_nodes) != 1 or is_getitem(node) or members(node) or len(ops) == MAX_CHAIN:
            return None
        ops.insert(0, node)
        node = node.all_input_nodes[0]
    return ops if node.op == "placeholder" else None


def move_before(place: fx.Node, node: fx.Node) -> None:
    """Move the operands of an early gather before another node, where they are not there already."""
    for part in members(node):
        for each in chain(part.operand) or ():
            if place < each:
                place.prepend(each)


def layer(program: Program, node: fx.Node) -> str:
    """The layer that reads a gather: the path of the first user's module up to its first number, or its first name.

    Empty for copies that are kept between steps, which are all alive at once.
    """
    if program.source(node).phase == "update":
        return ""
    module = program.source(node).module or program.source(next(iter(node.users), node)).module
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.|$)", module)
    return numbered[0] if numbered else module.partition(".")[0]


def first_reader(node: fx.Node) -> fx.Node | None:
    """The first call that reads the result of a gather; None where it is only returned."""
    results = [user for user in node.users if is_getitem(user)] if node.target is bucket else [node]
    readers = [user for result in results for user in result.users if user.op == "call_function"]
    return min(readers, default=None)


def deferrable(program: Program) -> frozenset[fx.Node]:
    """The calls that may run once for several backwards, on the sums of their operands over these backwards.

    They are the ``all_reduce``s whose results reach only gradients of parameters, through linear ops, and those ops.
    Under stage 1 of ``Zero`` that holds for a ``reduce_scatter`` too; elsewhere one makes a gradient smaller at once.
    """
    zero = program.options.zero
    kinds = {"all_reduce", "reduce_scatter"} if zero is not None and zero.stage == 1 else {"all_reduce"}
    parameters, ends = set(parameters_of(program).values()), list(ends_of(program))
    others = {node for output, owner, node in ends if output.kind != "gradient" or owner not in parameters}
    gradients = {node for *_, node in ends} - others  # results that are gradients of parameters and nothing else
    linear: set[fx.Node] = set()  # ops whose result reaches gradients of parameters alone
    reductions: set[fx.Node] = set()
    for node in reversed(list(program.graph.nodes)):
        users = set(node.users) - {program.output_node}
        is_result = program.output_node in node.users
        if node.op != "call_function" or not users <= linear | reductions or (is_result and node not in gradients):
            continue
        parts = members(node)
        if parts and all(part.kind in kinds and part.args[1] == "sum" for part in parts):
            reductions.add(node)
        elif _is_linear(program, node):
            linear.add(node)
    return frozenset(_closed(program, reductions))


def _is_linear(program: Program, node: fx.Node) -> bool:
    if is_getitem(node) or node.target is fit:
        return True
    if parts := members(node):
        return all(part.kind != "mask_padding" and part.args[1] not in ("max", "min") for part in parts)
    if node.target in EXCHANGES:
        return False  # its rule cannot be bound to local types
    present = frozenset(i for i, operand in enumerate(operands(node)) if operand is not None)
    return present in program.rule(node).linear


def _closed(program: Program, reductions: set[fx.Node]) -> set[fx.Node]:
    """The reductions and all ops after them, without the reductions after which an op has another operand."""
    while True:
        reached = {node: descendants(node) - {program.output_node} for node in reductions}
        closed = set().union(*reached.values())
        joined = {each for each in closed - reductions if not set(each.all_input_nodes) <= closed}
        if not joined:
            return closed
        reductions = {node for node in reductions if not reached[node] & joined}
