"""What flows between the ops of forward: which value is read where, and how many bytes cross each place of a cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import fx

from shardc.cost import flops_of_call
from shardc.lifetime import split
from shardc.node import is_cast, is_getitem, is_view, operand
from shardc.program import Program, Value


@dataclass(frozen=True)
class Flow:
    """The ops of forward as they run, getitems apart; a place is the index of one of them.

    ``following``: calls that cost next to nothing and need no op: masks, positions, rotary tables, views and casts of
    parameters. They go where their users go. ``parameters``: the names that each op reads, through following calls too.
    ``readers``: for each value of an op the places where it is read, rising.
    """

    program: Program
    ops: tuple[fx.Node, ...]
    following: tuple[fx.Node, ...]
    parameters: tuple[frozenset[str], ...]
    readers: Mapping[Value, tuple[int, ...]]
    place: Mapping[fx.Node, int] = field(repr=False)

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """The bytes that cross a cut before each place and after the last, each value once."""
        change = [0] * (len(self.ops) + 1)
        for value, places in self.readers.items():
            nbytes = self.nbytes(value)
            change[self.place[value[0]] + 1] += nbytes
            change[places[-1] + 1] -= nbytes
        return tuple(accumulate(change))

    def nbytes(self, value: Value) -> int:
        """The bytes of a value."""
        return self.program.value_type(value).nbytes


def flow_of(program: Program) -> Flow:
    """The flow of a captured program's forward."""
    calls = forward_calls(program)
    names = {node: frozenset([put.name] if put.kind == "parameter" else [])
             for put, node in zip(program.inputs, program.placeholders, strict=True)}  # fmt: skip
    free = dict(names)  # what is there before any op, by the parameters that it is made of
    for node in calls:
        if all(read in free for read in node.all_input_nodes):
            made_of = frozenset().union(*(free[read] for read in node.all_input_nodes))
            if is_getitem(node) or _is_cheap(program, node, not made_of):
                free[node] = made_of
    ops = tuple(node for node in calls if node not in free and not is_getitem(node))
    place = {node: i for i, node in enumerate(ops)}
    readers: dict[Value, list[int]] = {}
    for i, node in enumerate(ops):
        for value in {program.value(read) for read in node.all_input_nodes}:
            if value[0] in place:
                readers.setdefault(value, []).append(i)
    parameters = (frozenset().union(*(free.get(read, frozenset()) for read in node.all_input_nodes)) for node in ops)
    following = tuple(node for node in calls if node in free)
    return Flow(program, ops, following, tuple(parameters), {v: tuple(p) for v, p in readers.items()}, place)


def forward_calls(program: Program) -> tuple[fx.Node, ...]:
    """The calls, getitems with them, that outputs and buffers need, and those of the user's forward beside."""
    needed = set(split(program).forward)
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return tuple(node for node in calls if node in needed or _is_forward(program, node))


def _is_forward(program: Program, node: fx.Node) -> bool:
    while is_getitem(node):
        node = operand(node)
    return program.source(node).phase == "forward"


def _is_cheap(program: Program, node: fx.Node, is_of_inputs: bool) -> bool:
    """Whether a call is as well made twice: of inputs, no contraction and no draw; a view or cast of a parameter."""
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not draws and not flops_of_call(program, node) and (is_of_inputs or is_cast(node) or is_view(node))
