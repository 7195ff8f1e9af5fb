"""Units: runs of forward ops that a cut leaves together, and what each costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import fx

from shardc.costs.flops import flops_of_call
from shardc.costs.time import bytes_moved
from shardc.language.sharding import ceil_div
from shardc.program.lifetime import split, storages
from shardc.program.node import is_cast, is_getitem, is_view, operand
from shardc.program.program import Input, Program, Value

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


COPIES = 4  # of a trained parameter: itself, its gradient and the two states of Adam


@dataclass(frozen=True)
class CrossingValue:
    """A value that another unit than its own reads."""

    name: str
    type: str
    nbytes: int
    maker: int
    readers: int


@dataclass(frozen=True)
class StageLoads:
    """Of the units of a program's forward. ``microbatches``: how many there are, if that is known.

    ``pieces``: in how many the batch is cut; what is saved is of one of them.
    """

    flow: Flow
    units: tuple[Unit, ...]
    microbatches: int | None = None
    pieces: int = 1
    counted: dict[tuple[str, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def parameters(self) -> dict[str, Input]:
        """The program's parameters by name."""
        return {put.name: put for put in self.flow.program.inputs if put.kind == "parameter"}

    @cached_property
    def crossings(self) -> tuple[CrossingValue, ...]:
        """Every value that crosses from a unit to others."""
        starts = [unit.start for unit in self.units]

        def found() -> Iterator[CrossingValue]:
            for value, places in self.flow.readers.items():
                maker, *readers = (bisect_right(starts, at) - 1 for at in (self.flow.place[value[0]], *places))
                if others := {reader for reader in readers if reader != maker}:
                    yield self._crossing(value, 1 << maker, mask_of(others))

        return tuple(found())

    def _crossing(self, value: Value, maker: int, readers: int) -> CrossingValue:
        node, index = value
        name = f"{node.name}[{index}]" if self.flow.program.has_many(node) else node.name
        return CrossingValue(name, str(self.flow.program.value_type(value)), self.flow.nbytes(value), maker, readers)

    @cached_property
    def edges(self) -> set[tuple[int, int]]:
        """Pairs of a unit and one that reads from it."""
        every = range(len(self.units))
        return {(c.maker.bit_length() - 1, i) for c in self.crossings for i in every if c.readers >> i & 1}

    @cached_property
    def made(self) -> tuple[int, ...]:
        """For each unit the bytes that it makes of one piece of a batch and backward reads."""
        starts, made = [unit.start for unit in self.units], [0] * len(self.units)
        for storage in storages(self.flow.program):
            place = self.flow.place.get(storage.value[0])
            if storage.is_saved and place is not None:
                made[bisect_right(starts, place) - 1] += storage.nbytes
        return tuple(ceil_div(each, self.pieces) for each in made)

    def received(self, stage: int) -> tuple[CrossingValue, ...]:
        """What a stage is sent, each value once."""
        return tuple(c for c in self.crossings if c.readers & stage and not c.maker & stage)

    def received_bytes(self, stage: int) -> int:
        """The bytes of that."""
        return self._known("received", stage, lambda: sum(c.nbytes for c in self.received(stage)))

    def each(self, balance: str) -> list[int]:
        """For each unit its parameters, those that it is first to read; its operations; its time; its saved bytes."""
        if balance == "params":
            return [sum(self.elements(name) for name in names) for names in self._new_parameters()]
        if balance == "memory":
            return list(self.made)
        return [unit.flops if balance == "flops" else unit.time for unit in self.units]

    def total(self, balance: str, stage: int) -> int:
        """Of a stage, of what ``each`` says of units."""
        return sum(weight for i, weight in enumerate(self.each(balance)) if stage >> i & 1)

    def elements(self, name: str) -> int:
        """The size of a parameter."""
        return self.parameters[name].type.numel

    def held(self, stage: int) -> frozenset[str]:
        """The parameters that a stage reads, those too that others read."""
        return frozenset().union(*(unit.parameters for i, unit in enumerate(self.units) if stage >> i & 1))

    def copies(self, name: str) -> int:
        """The bytes of a parameter with what training keeps beside it."""
        put = self.parameters[name]
        return put.type.nbytes * (COPIES if put.requires_grad else 1)

    def saved(self, stage: int) -> int:
        """The bytes that a stage keeps of one microbatch for backward; what it was sent is among them."""
        made = self._known("made", stage, lambda: sum(made for i, made in enumerate(self.made) if stage >> i & 1))
        return made + ceil_div(self.received_bytes(stage), self.pieces)

    def memory(self, stage: int, in_flight: int) -> int:
        """The bytes of a stage in training, with so many microbatches between their forward and backward."""
        flying = min(in_flight, self.microbatches or in_flight)
        copies = self._known("copies", stage, lambda: sum(map(self.copies, self.held(stage))))
        return copies + flying * self.saved(stage)

    def _known(self, kind: str, stage: int, count: Callable[[], int]) -> int:
        if (kind, stage) not in self.counted:
            self.counted[kind, stage] = count()
        return self.counted[kind, stage]

    def _new_parameters(self) -> Iterator[frozenset[str]]:
        met: set[str] = set()
        for unit in self.units:
            yield unit.parameters - met
            met |= unit.parameters


def mask_of(units: Sequence[int] | set[int]) -> int:
    """The set of these units."""
    return sum(1 << i for i in units)


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
