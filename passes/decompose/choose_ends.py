"""Where an input and an output are cut by one axis along different dims: whose cuts the ops between them have.

Propagate lets both speak at once: each op is cut as what reaches it first, and the value moves where they meet::

    y: f32[128@a, 112, 112, 64] = convolution(x, w)     # x: f32[128@a, 224, 224, 3]
    output: f32[128, 112@a, 112, 64] = reshard(y)
        ->
    r: f32[128, 224@a, 224, 3] = reshard(x)             # x is 10 times smaller than y
    output: f32[128, 112@a, 112, 64] = convolution(r, w)

Both are compiled, and the outputs speak first where that sends fewer bytes and leaves each rank no more to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from shardc.costs.count import flops_of
from shardc.language.sharding import Sharding
from shardc.program.communication import bytes_sent, is_collective
from shardc.program.program import Program

from ..propagate.cut_blocks import cut_blocks
from ..propagate.propagate import propagate
from ..reshard.choose_cuts import Plan, assign, claims_on
from ..reshard.insert_reshards import insert_reshards
from ..reshard.lower_reshards import lower_reshards


def cheapest_ends(program: Program, decomposed: Callable[[Program], Program]) -> Program:
    """The program after ``decomposed``, as it is propagated, or with its outputs before its inputs if that is cheaper.

    Not where the user has set priorities.
    """
    ours = decomposed(program)
    if not _meet(program):
        return ours
    pins = tuple(replace(pin, priority=-1) if pin.kind == "output" else pin for pin in program.pins)
    theirs = decomposed(propagate(cut_blocks(replace(program.copy(level="canonical"), pins=pins))))
    sent, flops = zip(*map(_costs, (ours, theirs)), strict=True)
    return theirs if sent[1] < sent[0] and flops[1] <= flops[0] else ours


def _meet(program: Program) -> bool:
    """Whether an axis of inputs and outputs both moves to another dim somewhere, and no one said who speaks first."""
    axes: dict[str, set[str]] = {"input": set(), "output": set()}
    for pin in program.pins:
        axes.setdefault(pin.kind, set()).update(_dims_of(pin.sharding))
    shared = axes["input"] & axes["output"]
    if not shared or any(pin.priority for pin in program.pins):
        return False
    every = [(node, i) for node in program.graph.nodes for i in range(len(program.shardings(node)))]
    lies = {(node, i): lie for node, i in every if (lie := program.shardings(node)[i]) is not None}
    plan = Plan(program, set(), {}, lies=lies)
    return any(_moves(plan, node, shared) for node in program.calls)


def _moves(plan: Plan, node: fx.Node, axes: set[str]) -> bool:
    """Whether one of the axes cuts an operand or a result along another dim than the op wants or makes it."""
    program, rule = plan.program, plan.program.rule(node)
    cuts = assign(rule, claims_on(program, node, rule, plan.seen_by(node)))
    wanted, made = plan.way(node, rule, cuts, frozenset(), ())
    lies = [value and plan.lies[value] for value in program.operand_values(node)]
    pairs = [*zip(lies, wanted, strict=True), *zip(program.shardings(node), made, strict=True)]
    dims = [(_dims_of(one), _dims_of(other)) for one, other in pairs if one is not None and other is not None]
    return any(one[axis] != other[axis] for one, other in dims for axis in axes & one.keys() & other.keys())


def _dims_of(sharding: Sharding) -> dict[str, int]:
    """The dim that each axis cuts."""
    return {part.name: dim for dim, cut in enumerate(sharding.dims) for part in cut.all_axes}


def _costs(program: Program) -> tuple[int, int]:
    """Bytes that one rank sends, and its floating-point operations."""
    lowered = lower_reshards(insert_reshards(program))
    return sum(bytes_sent(lowered, node) for node in lowered.calls if is_collective(node)), flops_of(lowered, True)
