"""Units: runs of forward ops that a cut into stages leaves together, with their costs and bytes saved and sent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from torch import fx

from shardc.costs.count import bytes_moved, flops_of_call
from shardc.costs.replay import ledgers_of
from shardc.language.sharding import ceil_div
from shardc.program.lifetime import split
from shardc.program.node import is_cast, is_free, is_getitem, is_random, is_view, operand
from shardc.program.program import Input, Program, Value

FLOPS_PER_BYTE = 100  # operations in the time of a byte of memory traffic: about 10 on a CPU, 100 on a GPU in fp32


@dataclass(frozen=True)
class Flow:
    """The ops of forward in the order in which they run, without getitems; a *position* is the index of an op.

    ``cheap``: calls that cost next to nothing and go where their users go: masks, positions, rotary tables, views and
    casts of parameters. ``parameters``: the names that each op reads, also through cheap calls. ``readers``: for each
    value of an op the positions that read it, rising.
    """

    program: Program
    ops: tuple[fx.Node, ...]
    cheap: tuple[fx.Node, ...]
    parameters: tuple[frozenset[str], ...]
    readers: Mapping[Value, tuple[int, ...]]
    position: Mapping[fx.Node, int] = field(repr=False)

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """The bytes that cross a cut before each position and after the last, each value once."""
        change = [0] * (len(self.ops) + 1)
        for value, positions in self.readers.items():
            nbytes = self.program.value_type(value).nbytes
            change[self.position[value[0]] + 1] += nbytes
            change[positions[-1] + 1] -= nbytes
        return tuple(accumulate(change))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The path of the module of each op."""
        return tuple(self.program.source(node).module for node in self.ops)

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """The operations of each op with its backward."""
        return tuple(_with_backward(self, flops_of_call))

    @cached_property
    def times(self) -> tuple[int, ...]:
        """The estimated time of each op with its backward, by ``time_of_call``."""
        return tuple(_with_backward(self, time_of_call))


def flow_of(program: Program) -> Flow:
    """The flow of a captured program's forward."""
    calls = forward_calls(program)
    sources = {node: frozenset([put.name] if put.kind == "parameter" else [])
               for put, node in zip(program.inputs, program.placeholders, strict=True)}  # fmt: skip
    for node in calls:  # sources: the names of the parameters that inputs and cheap calls are made of
        if all(read in sources for read in node.all_input_nodes):
            names = frozenset().union(*(sources[read] for read in node.all_input_nodes))
            repeats = not is_random(node) and not flops_of_call(program, node)  # might as well be computed again
            if is_getitem(node) or (repeats and (not names or is_cast(node) or is_view(node))):
                sources[node] = names
    ops = tuple(node for node in calls if node not in sources and not is_getitem(node))
    position = {node: i for i, node in enumerate(ops)}
    readers: dict[Value, list[int]] = {}
    for i, node in enumerate(ops):
        for value in {program.value(read) for read in node.all_input_nodes}:
            if value[0] in position:
                readers.setdefault(value, []).append(i)
    parameters = (frozenset().union(*(sources.get(read, frozenset()) for read in node.all_input_nodes)) for node in ops)
    cheap = tuple(node for node in calls if node in sources)
    return Flow(program, ops, cheap, tuple(parameters), {v: tuple(p) for v, p in readers.items()}, position)


def forward_calls(program: Program) -> tuple[fx.Node, ...]:
    """The calls, getitems included, that outputs and buffers need, and all others of the user's forward."""
    needed = set(split(program).forward)

    def is_forward(node: fx.Node) -> bool:
        while is_getitem(node):
            node = operand(node)
        return program.source(node).phase == "forward"

    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return tuple(node for node in calls if node in needed or is_forward(node))


@dataclass(frozen=True, slots=True)
class Unit:
    """The ops from position ``start`` to before ``end``.

    ``first``, ``last``: the largest modules that begin and end with it. ``parameters``: the names that it reads.
    ``flops``, ``time``: of forward and backward; time is in bytes of memory traffic that take as long.
    """

    start: int
    end: int
    first: str
    last: str
    parameters: frozenset[str]
    flops: int
    time: int


def units_of(flow: Flow, num_units: int, forced: Sequence[int] = (), is_fine: bool = True) -> tuple[Unit, ...]:
    """The units of forward in the order in which they run, if possible at least ``num_units``.

    ``forced``: positions at which a unit begins in any case. ``is_fine=False`` leaves blocks whole if these are enough.
    """
    if not flow.ops:
        return ()
    starts = sorted({*_starts(flow, num_units, is_fine), *forced})
    firsts, lasts = _module_names(flow, range(len(flow.ops))), _module_names(flow, range(len(flow.ops) - 1, -1, -1))
    units = []
    for start, end in pairwise([*starts, len(flow.ops)]):
        parameters = frozenset[str]().union(*flow.parameters[start:end])
        cost = sum(flow.flops[start:end]), sum(flow.times[start:end])
        units.append(Unit(start, end, firsts[start], lasts[end - 1], parameters, *cost))
    return tuple(units)


def _starts(flow: Flow, num_units: int, is_fine: bool) -> list[int]:
    """The positions at which units begin: between two heavy ops (with parameters or contractions), the narrowest cut.

    Of these cuts, the starts of blocks stay. Within a block, a cut stays if it is narrower than its neighbours and no
    wider than the ends of the block, with work on both sides. If that makes fewer than ``num_units`` units, all these
    cuts stay; if they are too few, a unit may begin at every op. No unit begins between two consecutive heavy ops that
    read no other op, such as the embeddings of tokens and of positions.
    """
    flops = [flops_of_call(flow.program, node) for node in flow.ops]
    heavy = [i for i in range(len(flow.ops)) if flow.parameters[i] or flops[i]]
    reads = {position for positions in flow.readers.values() for position in positions}
    blocks = _blocks(flow)
    begins = [i > 0 and blocks[i] != blocks[i - 1] for i in range(len(blocks))]
    narrow = [
        min(range(a + 1, b + 1), key=lambda i: (flow.crossing[i], not begins[i], -i))
        for a, b in pairwise(heavy)
        if a in reads or b in reads
    ]
    whole, work = [0, *(i for i in narrow if begins[i])], list(accumulate(flops, initial=0))
    valleys = _valleys(flow, narrow)
    fine = [
        i
        for a, b in pairwise([*whole, len(flow.ops)])
        for i in valleys
        if a < i < b and flow.crossing[i] <= max(flow.crossing[a], flow.crossing[b]) and work[a] < work[i] < work[b]
    ]
    choices = ([] if is_fine else whole, [*whole, *fine], [0, *narrow], range(len(flow.ops)))
    return sorted(next((starts for starts in choices if len(starts) >= num_units), choices[1]))


def _valleys(flow: Flow, positions: Sequence[int]) -> list[int]:
    """The positions that are narrower than the next different ones on both sides."""
    heights = [flow.crossing[i] for i in positions]

    def is_lower(height: int, others: Iterable[int]) -> bool:
        return next((other for other in others if other != height), height) >= height

    sides = ((heights[i + 1 :], heights[:i][::-1]) for i in range(len(heights)))
    triples = zip(positions, heights, sides, strict=True)
    return [position for position, height, both in triples if all(is_lower(height, side) for side in both)]


def _blocks(flow: Flow) -> list[str]:
    """For each op the outermost item of a module list that contains it; else the outermost module without lists."""
    paths = [path.split(".") for path in flow.modules]
    depths = [next((i for i, name in enumerate(path) if name.isdigit()), 0) for path in paths]
    holders = {tuple(path[:i]) for path, depth in zip(paths, depths, strict=True) for i in range(depth + 1)}

    blocks = []
    for path, depth in zip(paths, depths, strict=True):
        outermost = next((i for i in range(len(path)) if tuple(path[: i + 1]) not in holders), len(path))
        blocks.append(".".join(path[: (depth or outermost) + 1]))
    return blocks


def items_of(flow: Flow) -> tuple[str, ...]:
    """The items of module lists, such as ``blocks.0``, in the order in which forward reaches them."""
    return tuple(dict.fromkeys(block for block in _blocks(flow) if block.rpartition(".")[2].isdigit()))


def _module_names(flow: Flow, order: Sequence[int]) -> dict[int, str]:
    """For each position its block, if it is the block's first op in this order; else the largest module it begins."""
    blocks, known, names = _blocks(flow), {""}, {}
    for i in order:
        above = prefixes(flow.modules[i])
        names[i] = next((module for module in (blocks[i], *above) if module not in known), flow.modules[i])
        known.update(above)
    return names


def prefixes(path: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``."""
    return [path[:end] for end, letter in enumerate(f"{path}.") if letter == "."] if path else []


def _with_backward(flow: Flow, cost: Callable[[Program, fx.Node], int]) -> list[int]:
    """The cost of each op with the calls of backward that were made for it.

    The backward of a cheap call counts at the last op of its module, or at the last of all.
    """
    program, ops = flow.program, flow.ops
    total = [cost(program, node) for node in ops]
    by_ordinal = {program.source(node).ordinal: i for i, node in enumerate(ops)}
    by_ordinal.pop(-1, None)
    by_module = {module: i for i, module in enumerate(flow.modules)}
    forward = {*ops, *flow.cheap}
    for node in program.calls:
        if node not in forward:
            source = program.source(node)
            position = by_ordinal.get(source.ordinal, by_module.get(source.module, len(ops) - 1))
            total[position] += cost(program, node)
    return total


def time_of_call(program: Program, node: fx.Node) -> int:
    """The estimated time of a call in bytes of memory traffic: the longer of moving and computing; 0 for a view."""
    if is_free(node):
        return 0
    return max(bytes_moved(program, node), flops_of_call(program, node) // FLOPS_PER_BYTE)


@dataclass(frozen=True)
class CrossingValue:
    """A value that units read other than the one that makes it. ``maker``, ``readers``: bit masks of units."""

    name: str
    type: str
    nbytes: int
    maker: int
    readers: int


@dataclass(frozen=True)
class StageLoads:
    """The cost of stages; a stage is a bit mask of units.

    ``microbatches``: their number, if it is known. ``pieces``: the number of pieces of the batch; saved bytes are those
    of one piece.
    """

    flow: Flow
    units: tuple[Unit, ...]
    microbatches: int | None = None
    pieces: int = 1
    cache: dict[tuple[str, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def parameters(self) -> dict[str, Input]:
        """The program's parameters by name."""
        return {put.name: put for put in self.flow.program.inputs if put.kind == "parameter"}

    @cached_property
    def crossings(self) -> tuple[CrossingValue, ...]:
        """Every value that crosses from a unit to others."""
        program, starts = self.flow.program, [unit.start for unit in self.units]
        crossings = []
        for value, positions in self.flow.readers.items():
            node, index = value
            maker, *readers = (bisect_right(starts, at) - 1 for at in (self.flow.position[node], *positions))
            if others := {reader for reader in readers if reader != maker}:
                name = f"{node.name}[{index}]" if program.has_many(node) else node.name
                type_ = program.value_type(value)
                crossings.append(CrossingValue(name, str(type_), type_.nbytes, 1 << maker, mask_of(others)))
        return tuple(crossings)

    @cached_property
    def edges(self) -> set[tuple[int, int]]:
        """Pairs of a unit and a unit that reads from it."""
        every = range(len(self.units))
        return {(c.maker.bit_length() - 1, i) for c in self.crossings for i in every if c.readers >> i & 1}

    @cached_property
    def unit_saved_bytes(self) -> tuple[int, ...]:
        """For each unit, the bytes of one piece of a batch that it makes and backward reads."""
        starts, saved = [unit.start for unit in self.units], [0] * len(self.units)
        (ledger,) = ledgers_of(self.flow.program)
        for block in ledger.saved:
            position = self.flow.position.get(block.value[0])
            if position is not None:
                saved[bisect_right(starts, position) - 1] += block.nbytes
        return tuple(ceil_div(each, self.pieces) for each in saved)

    def unit_weights(self, balance: str) -> list[int]:
        """For each unit its ``params`` (those that it is first to read), ``flops``, ``time`` or saved ``memory``."""
        if balance == "params":
            before = accumulate((unit.parameters for unit in self.units), frozenset.union, initial=frozenset[str]())
            pairs = zip(self.units, before, strict=False)
            return [sum(map(self.elements, unit.parameters - known)) for unit, known in pairs]
        if balance == "memory":
            return list(self.unit_saved_bytes)
        return [unit.flops if balance == "flops" else unit.time for unit in self.units]

    def weight(self, balance: str, stage: int) -> int:
        """The weight of a stage: the sum of ``unit_weights``."""
        return sum(weight for i, weight in enumerate(self.unit_weights(balance)) if stage >> i & 1)

    def elements(self, name: str) -> int:
        """The number of elements of a parameter."""
        return self.parameters[name].type.numel

    def parameters_of(self, stage: int) -> frozenset[str]:
        """The names of the parameters that a stage reads, including those that other stages read too."""
        return frozenset().union(*(unit.parameters for i, unit in enumerate(self.units) if stage >> i & 1))

    def training_bytes(self, name: str) -> int:
        """The bytes of a parameter with its gradient and the optimizer's states."""
        put, states = self.parameters[name], self.flow.program.options.optimizer_states
        return put.type.nbytes * (2 + states if put.requires_grad else 1)

    def received(self, stage: int) -> tuple[CrossingValue, ...]:
        """The values that a stage receives, each once."""
        return tuple(c for c in self.crossings if c.readers & stage and not c.maker & stage)

    def received_bytes(self, stage: int) -> int:
        """The bytes that a stage receives."""
        return self._cached("received", stage, lambda: sum(c.nbytes for c in self.received(stage)))

    def saved_bytes(self, stage: int) -> int:
        """The bytes that a stage keeps of one microbatch for backward, with those that it receives."""
        units = enumerate(self.unit_saved_bytes)
        saved = self._cached("saved", stage, lambda: sum(nbytes for i, nbytes in units if stage >> i & 1))
        return saved + ceil_div(self.received_bytes(stage), self.pieces)

    def memory(self, stage: int, in_flight: int) -> int:
        """The bytes of a stage in training, with ``in_flight`` microbatches between forward and backward."""
        num_saved = min(in_flight, self.microbatches or in_flight)
        stored = self._cached("stored", stage, lambda: sum(map(self.training_bytes, self.parameters_of(stage))))
        return stored + num_saved * self.saved_bytes(stage)

    def _cached(self, kind: str, stage: int, count: Callable[[], int]) -> int:
        if (kind, stage) not in self.cache:
            self.cache[kind, stage] = count()
        return self.cache[kind, stage]


def mask_of(units: Iterable[int]) -> int:
    """The bit mask of these units, which are distinct."""
    return sum(1 << i for i in units)
