"""Units: runs of forward ops that a cut leaves together, and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from shardc.cost import bytes_moved, flops_of_call
from shardc.forward_flow import Flow
from shardc.node import is_getitem, is_view
from shardc.program import Program

FLOPS_PER_BYTE = 100  # of memory traffic in the same time: a CPU does about 10, an accelerator in fp32 about 100


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops from the place ``start`` to before ``end``.

    ``first`` and ``last``: the largest modules that begin with it and end with it. ``parameters``: the names that it
    reads. ``flops`` and ``time`` are of forward and backward; time in bytes of memory traffic that take as long.
    """

    start: int
    end: int
    first: str
    last: str
    parameters: frozenset[str]
    flops: int
    time: int


def units_of(flow: Flow, num_units: int, forced: Sequence[int] = (), is_fine: bool = True) -> tuple[Unit, ...]:
    """The units of forward, in the order in which they run.

    ``num_units``: so many there should be at least. ``forced``: places where one begins in any case. Not ``is_fine``:
    blocks whole, if they are enough.
    """
    if not flow.ops:
        return ()
    starts = sorted({*_starts(flow, num_units, is_fine), *forced})
    flops, time = (_with_backward(flow, cost) for cost in (flops_of_call, time_of_call))
    firsts, lasts = _begun(flow, range(len(flow.ops))), _begun(flow, range(len(flow.ops) - 1, -1, -1))
    return tuple(
        Unit(
            start,
            end,
            firsts[start],
            lasts[end - 1],
            frozenset().union(*flow.parameters[start:end]),
            sum(flops[start:end]),
            sum(time[start:end]),
        )
        for start, end in pairwise([*starts, len(flow.ops)])
    )


# Where a unit may begin.


def _starts(flow: Flow, num_units: int, is_fine: bool) -> list[int]:
    """Between two ops that hold parameters or contract, the place where the fewest bytes cross.

    Of these those stay where a block begins, and those in a block where less crosses than around them, no more than at
    an end of the block, and that leave some of its work on both sides. Where that makes fewer than ``num_units`` units
    all stay, and where those are too few still, a unit may begin at every op. None begins between two ops after one
    another that read no other, such as the embeddings of tokens and of positions.
    """
    heavy = [i for i, node in enumerate(flow.ops) if flow.parameters[i] or flops_of_call(flow.program, node)]
    reads = {place for places in flow.readers.values() for place in places}
    apart = [(a, b) for a, b in pairwise(heavy) if a in reads or b in reads]
    blocks = _blocks(flow)
    begins = [i > 0 and blocks[i] != blocks[i - 1] for i in range(len(blocks))]
    narrow = [min(range(a + 1, b + 1), key=lambda i: (flow.crossing[i], not begins[i], -i)) for a, b in apart]
    ends = [0, *(i for i in narrow if begins[i]), len(flow.ops)]
    work = list(accumulate((flops_of_call(flow.program, node) for node in flow.ops), initial=0))
    fine = [
        i
        for a, b in pairwise(ends)
        for i in _valleys(flow, narrow)
        if a < i < b and flow.crossing[i] <= max(flow.crossing[a], flow.crossing[b]) and work[a] < work[i] < work[b]
    ]
    whole = ends[:-1]
    choices = ([] if is_fine else whole, [*whole, *fine], [0, *narrow], range(len(flow.ops)))
    return sorted(next((starts for starts in choices if len(starts) >= num_units), choices[1]))


def _valleys(flow: Flow, places: Sequence[int]) -> list[int]:
    """The places from which more crosses on both sides, past those where as much does."""
    heights = [flow.crossing[i] for i in places]

    def is_lower(height: int, others: Iterable[int]) -> bool:
        return next((other for other in others if other != height), height) >= height

    return [
        place
        for i, place in enumerate(places)
        if is_lower(heights[i], heights[i + 1 :]) and is_lower(heights[i], reversed(heights[:i]))
    ]


def _blocks(flow: Flow) -> list[str]:
    """For each op the outermost module of a list that it is in; else the outermost one that holds no list."""
    paths = [_module(flow, i).split(".") for i in range(len(flow.ops))]
    depths = [next((i for i, name in enumerate(path) if name.isdigit()), 0) for path in paths]
    holders = {tuple(path[:i]) for path, depth in zip(paths, depths, strict=True) for i in range(depth + 1)}

    def depth_of(path: list[str], depth: int) -> int:
        return depth or next((i for i in range(len(path)) if tuple(path[: i + 1]) not in holders), len(path))

    return [".".join(path[: depth_of(path, depth) + 1]) for path, depth in zip(paths, depths, strict=True)]


def _begun(flow: Flow, order: Sequence[int]) -> dict[int, str]:
    """For each place its block, if it is the first op of that in this order, else the largest module that it begins."""
    blocks, met, found = _blocks(flow), {""}, {}
    for i in order:
        path = _module(flow, i)
        above = prefixes(path)
        new = [blocks[i], *above]
        found[i] = next((module for module in new if module not in met), path)
        met.update(above)
    return found


def prefixes(path: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    return [path[:end] for end, letter in enumerate(f"{path}.") if letter == "."] if path else []


def _module(flow: Flow, place: int) -> str:
    return flow.program.source(flow.ops[place]).module


# Costs.


def _with_backward(flow: Flow, cost: Callable[[Program, fx.Node], int]) -> list[int]:
    """For each op of forward what it costs, and what the calls of backward cost that were made for it.

    One made for a call that follows its users goes to the last op of that one's module, or to the last of all.
    """
    program, ops = flow.program, flow.ops
    total = [cost(program, node) for node in ops]
    by_ordinal = {program.source(node).ordinal: i for i, node in enumerate(ops)}
    by_ordinal.pop(-1, None)
    by_module = {_module(flow, i): i for i in range(len(ops))}
    forward = {*ops, *flow.following}
    for node in program.calls:
        if node not in forward:
            source = program.source(node)
            place = by_ordinal.get(source.ordinal, by_module.get(source.module, len(ops) - 1))
            total[place] += cost(program, node)
    return total


def time_of_call(program: Program, node: fx.Node) -> int:
    """Estimated: the longer of computing and of moving operands and results; none of what only shows a value.

    In bytes of memory traffic that take as long.
    """
    if is_getitem(node) or is_view(node):
        return 0
    return max(bytes_moved(program, node), flops_of_call(program, node) // FLOPS_PER_BYTE)
