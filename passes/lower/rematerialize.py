"""rematerialize: lowered -> lowered. Backward makes again what it reads of forward, from less that is saved.

What is made again are copies of forward's calls, just before the first call of backward that reads them::

    y = relu(x);  z = dot(y, w)                 y = relu(x);  z = dot(y, w)
    ...                                  ->     ...
    dw = dot(y, dz)                             y_1 = relu(x);  dw = dot(y_1, dz)

The option ``Remat`` says what: what is made inside of modules, or what is cheap to make again and large
(choose_saved.py). Random numbers are drawn by counters, so they are drawn again as they were. Where backward gathers a
parameter once more anyway, copies read that; what a pipeline makes once a step is not made again. Invariant: forward is
as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from shardc.costs.flops import flops_of_call
from shardc.costs.pipeline_memory import rank_bytes
from shardc.costs.stage_schedule import schedule_of
from shardc.language.errors import OptionError, did_you_mean
from shardc.options import Remat
from shardc.program.communication import bytes_sent, is_collective
from shardc.program.lifetime import Parts, owners_of, split
from shardc.program.node import is_getitem, reached
from shardc.program.program import Program, Value
from shardc.program.stages import Kinds, Places, stages_of
from shardc.schedules.schedule import Schedule


def rematerialize(program: Program) -> Program:
    """The program that saves what ``Remat`` says; the same without it."""
    remat = program.options.remat
    if remat is None or not split(program).backward:
        return program
    if remat.blocks:
        return _remade(program, lambda copied, parts, _: in_blocks(copied, parts, remat))
    if program.options.pipeline is not None:
        return within_budget_a_rank(program, remat, _remade)
    return _remade(program, lambda copied, parts, twins: within_budget(copied, parts, twins, remat))


def _remade(program: Program, choose: Choose) -> Program:
    """A copy in which backward makes again what is chosen."""
    program = program.copy()
    parts = split(program)
    twins, made_anew = _twins(parts), _made_anew(program)
    forgotten = {value for value in choose(program, parts, twins) if value[0] in made_anew}
    _Maker(program, parts, forgotten | {program.value(node) for node in twins}, twins).run(parts.backward)
    return program


def _made_anew(program: Program) -> Container[fx.Node]:
    """Calls whose values need not be saved: what a pipeline makes once a step is there to its end, and not twice."""
    return Kinds(program).timed if program.options.pipeline is not None else set(program.graph.nodes)


def in_blocks(program: Program, parts: Parts, remat: Remat) -> set[Value]:
    """The values that are made in the blocks and read in no other place of forward, be it a block or a stage."""
    chosen = blocks_of(program, parts, remat)
    block = {node: _block(program.source(node).module, chosen) for node in parts.forward}
    room = {node: (block[node], program.source(node).stage) for node in parts.forward}
    inside = {(node, i) for node in parts.forward if block[node] for i in range(len(program.types(node)))}
    kept = {(node, 0) for node in parts.forward if is_collective(node) and not remat.collectives}
    for reader in (*parts.forward, program.output_node):
        read = () if is_getitem(reader) else reader.all_input_nodes
        kept |= {
            value for value in map(program.value, read) if block.get(value[0]) and room[value[0]] != room.get(reader)
        }
    return inside - kept


def blocks_of(program: Program, parts: Parts, remat: Remat) -> set[str]:
    """The paths of the modules whose inside is made again. OptionError where the glob matches none."""
    paths = [path for node in parts.forward for path in reversed(list(_and_above(program.source(node).module)))]
    known = dict.fromkeys(paths)
    matched = dict.fromkeys(path for path in known if fnmatchcase(path, remat.blocks))
    outermost = [path for path in matched if not any(above in matched for above in list(_and_above(path))[1:])]
    if not outermost:
        raise OptionError(
            f"Remat(blocks={remat.blocks!r})",
            f"a glob over {len(known)} modules",
            "it matches none that makes a value",
            did_you_mean(remat.blocks, known) or f"use one of {', '.join(list(known)[:8])}",
        )
    return set(outermost[:: remat.every])


def _and_above(module: str) -> Iterator[str]:
    """A module's path and those of the modules that hold it, but for the model."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _block(module: str, chosen: set[str]) -> str:
    return next((path for path in _and_above(module) if path in chosen), "")


def _twins(parts: Parts) -> dict[fx.Node, fx.Node]:
    """Collectives of forward that backward has too, and what leads to them: ZeRO's stage 3 has such."""
    same: dict[fx.Node, fx.Node] = {}
    known = {_key(node, {}): node for node in parts.backward}
    for node in parts.forward:
        if (twin := known.get(_key(node, same))) is not None:
            same[node] = twin
    needed = reached(filter(is_collective, same), lambda node: same.keys() & node.all_input_nodes)
    return {node: twin for node, twin in same.items() if node in needed}


def _key(node: fx.Node, given: dict[fx.Node, fx.Node]) -> object:
    return node.target, fx.map_arg((node.args, node.kwargs), lambda operand: given.get(operand, operand))


class _Maker:
    """Makes forgotten values again. State: ``made``, for a call of forward the one that stands for it in backward."""

    def __init__(self, program: Program, parts: Parts, forgotten: set[Value], twins: Mapping[fx.Node, fx.Node]) -> None:
        self.program, self.forgotten, self.twins = program, forgotten, twins
        self.forward = set(parts.forward)
        self.place = {node: i for i, node in enumerate(program.graph.nodes)}
        self.made: dict[fx.Node, fx.Node] = {}

    def run(self, backward: Sequence[fx.Node]) -> None:
        for reader in backward:
            missing = self._missing(reader)
            for node in sorted(missing, key=self.place.__getitem__):
                self.made[node] = self._make(node, reader)
            for operand in reader.all_input_nodes:
                if operand in self.made and self.program.value(operand) in self.forgotten:
                    reader.replace_input_with(operand, self.made[operand])

    def _missing(self, reader: fx.Node) -> set[fx.Node]:
        """The calls of forward that must be made again before a call, and are not yet."""

        def missing(node: fx.Node) -> Iterator[fx.Node]:
            for operand in node.all_input_nodes:
                is_wanted = is_getitem(node) or self.program.value(operand) in self.forgotten
                if is_wanted and operand in self.forward and operand not in self.made:
                    yield operand

        return reached([reader], missing) - {reader}

    def _make(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        twin = self.twins.get(node)
        if twin is not None:
            if self.place[twin] > self.place[reader]:
                reader.prepend(twin)
            return twin
        with self.program.graph.inserting_before(reader):
            return self.program.repeat(node, self.made)


FLOPS_PER_BYTE = 64  # between a CPU's, about 10, and a GPU's, about 150: what is contracted or attended is saved first
WIRE = 16  # bytes of memory that are moved in the time of one on the wire
SLANT = 0.1  # how much dearer the first byte saved is than the last: it is held longest, and like blocks differ
WINDOW = 8  # calls on each side of a narrow place that are no narrower
UNIT = 1024  # capacities are whole numbers of 1/1024 byte
LOW, HIGH = -10.0, 24.0  # prices, as powers of 2: bytes moved that saving one less is worth
HALVINGS = 12
LUMPS = 3  # values that are tried to be held


@dataclass(frozen=True, slots=True)
class Share:
    """What is chosen at once: of a pipeline, for one of its ranks.

    ``forward``: the calls whose results may be saved there; of those ``fixed`` nothing is made again. ``times``: how
    many microbatches of a call's results are saved at a time, where it is not one.
    """

    forward: Sequence[fx.Node]
    backward: Sequence[fx.Node]
    fixed: Collection[fx.Node] = ()
    times: Mapping[fx.Node, int] = field(default_factory=dict)


def within_budget(program: Program, parts: Parts, twins: Collection[fx.Node], remat: Remat) -> set[Value]:
    """The values that backward makes again. OptionError where the budget is below what must be saved."""
    assert remat.budget is not None
    owners = owners_of(program, (*parts.update, *parts.forward))
    chooser = Chooser(program, Share(parts.forward, parts.backward), remat, twins, owners)
    whole, saved = chooser.bytes_of(chooser.read), chooser.within(remat.budget)
    if whole <= remat.budget:
        return set()
    if (least := chooser.bytes_of(saved)) > remat.budget:
        raise too_little(remat, whole, least)
    return chooser.forgotten(saved)


def too_little(remat: Remat, whole: int, least: int) -> OptionError:
    """The error of a budget below the ``least`` bytes that can be saved; ``whole``: those without it."""
    return OptionError(
        f"Remat(budget={remat.budget})",
        f"bytes that a rank may save; {whole} are saved without it",
        f"at least {least} must be saved" + ("" if remat.collectives else ": results of collectives are"),
        f"say budget={least} or more" + ("" if remat.collectives else ", or collectives=True"),
    )


class Chooser:
    """The cut of one share of a program, for any price.

    Values are those that own their bytes (``owners``); their views cost nothing. ``read``: what backward reads.
    ``made``: of each call of forward that makes any, what it makes. ``held``: what is not made again.
    """

    def __init__(
        self, program: Program, share: Share, remat: Remat, twins: Collection[fx.Node], owners: Mapping[Value, Value]
    ) -> None:
        self.program, self.forward, self.owners, self.times = program, share.forward, owners, share.times
        own = [value for value, owner in self.owners.items() if value == owner]
        forward = set(share.forward)
        self.made: dict[fx.Node, list[Value]] = {}
        for node, index in own:
            if node in forward:
                self.made.setdefault(node, []).append((node, index))
        self.read = {value for node in share.backward for value in self._operands(node)}
        self.free = {self.owners[program.value(node)] for node in program.results if node in forward}
        self.place = {node: i for i, node in enumerate(share.forward)}
        self.lasting = {node for node in self.made if is_collective(node) and not remat.collectives} - set(twins)
        self.lasting |= {node for node in self.made if node in share.fixed}
        self.costs = {node: 0 if node in twins else self._cost(node) for node in self.made}
        self.held: Collection[Value] = ()

    def within(self, budget: int) -> set[Value]:
        """What is saved, at the least cost within the budget; as little as can be where that is more."""
        if self.bytes_of(self.read) <= budget:
            return self.read
        least = self.read
        for held in self.holdings():
            self.held = held
            least = min(least, self.saved(HIGH), key=self.bytes_of)
            if self.bytes_of(least) <= budget:
                return self.cheapest(budget)
        return least

    def bytes_of(self, values: Collection[Value]) -> int:
        """What values take on a rank; what the program returns is there anyway."""
        return sum(self._nbytes(value) for value in values)

    def holdings(self) -> Iterator[set[Value]]:
        """What crosses all narrow places, every 2nd, 4th, ..., none."""
        crossing, every = self._crossings(), 1
        while every <= len(crossing):
            yield set().union(*crossing[every - 1 :: every])
            every *= 2
        yield set()

    def cheapest(self, budget: int) -> set[Value]:
        """What is saved at the least price at which it meets the budget, and what of a lesser price still fits.

        A large value that all but fits is done without at the cost of little, so it is tried to hold it instead.
        """
        found, wished = self._met(budget)
        missing = wished - found
        for _ in range(LUMPS if missing else 0):
            self.held = {*self.held, max(missing, key=self._nbytes)}
            if self.bytes_of(self.saved(HIGH)) > budget:
                break
            other, wished = self._met(budget)
            found = min(found, other, key=self._work)
            missing = wished - other or missing
        return found

    def _met(self, budget: int) -> tuple[set[Value], set[Value]]:
        """What is saved within a budget, and what is at a price little less."""
        low, high, found, wished = LOW, HIGH, self.saved(HIGH), self.saved(LOW)
        for _ in range(HALVINGS):
            price = (low + high) / 2
            saved = self.saved(price)
            if self.bytes_of(saved) <= budget:
                high, found = price, saved
            else:
                low, wished = price, saved
        for value in sorted(wished - found, key=lambda value: -self.place[value[0]]):
            more = self._closed({*found, value})[0]
            found = more if self.bytes_of(more) <= budget else found
        return found, wished

    def _work(self, saved: Collection[Value]) -> int:
        return sum(map(self.costs.__getitem__, self._closed(saved)[1]))

    def _closed(self, saved: Collection[Value]) -> tuple[set[Value], set[fx.Node]]:
        """Those of ``saved`` that backward or what it makes again reads; and the calls that it makes again."""
        needed: set[Value] = set()
        again: set[fx.Node] = set()
        stack = list(self.read)
        while stack:
            value = stack.pop()
            if value in saved:
                needed.add(value)
            elif value[0] not in again:
                again.add(value[0])
                stack += self._operands(value[0])
        return needed, again

    def saved(self, price: float) -> set[Value]:
        """What is saved where a byte costs 2 to the power of ``price``."""
        graph = nx.DiGraph()
        graph.add_edges_from((("have", value), "sink") for value in self.read)
        for node, values in self.made.items():
            is_kept = node in self.lasting or any(value in self.held for value in values)
            graph.add_edge("source", ("make", node), **({} if is_kept else {"capacity": UNIT * self.costs[node]}))
            graph.add_edges_from((("have", value), ("make", node)) for value in self._operands(node))
            slant = 1 + SLANT * (1 - self.place[node] / len(self.place))
            for value in values:
                cost = round(UNIT * 2**price * slant * self._nbytes(value))
                graph.add_edge(("make", node), ("have", value), capacity=cost)
        _, (before, after) = nx.minimum_cut(graph, "source", "sink", flow_func=boykov_kolmogorov)
        pairs = ((node, value) for node, values in self.made.items() for value in values)
        return {value for node, value in pairs if ("make", node) in before and ("have", value) in after}

    def forgotten(self, saved: Collection[Value]) -> set[Value]:
        """All values, views too, that are made again where backward wants them."""
        again = self._closed(saved)[1]
        return {value for value, owner in self.owners.items() if owner[0] in again and owner not in saved}

    def _operands(self, node: fx.Node) -> set[Value]:
        """The values of forward that a call reads."""
        if is_getitem(node):
            return set()
        read = (self.program.value(operand) for operand in node.all_input_nodes)
        return {self.owners[value] for value in read if value in self.owners and self.owners[value][0] in self.made}

    def _nbytes(self, value: Value) -> int:
        type_ = self.program.local_type(*value)
        return 0 if type_ is None or value in self.free else type_.nbytes * self.times.get(value[0], 1)

    def _cost(self, node: fx.Node) -> int:
        """What it costs to make a call's results, in bytes moved."""
        moved = sum(map(self._size, (*self._operands(node), *self.made[node])))
        sent = bytes_sent(self.program, node) if is_collective(node) else 0
        return moved + flops_of_call(self.program, node) // FLOPS_PER_BYTE + WIRE * sent

    def _crossings(self) -> list[set[Value]]:
        """What crosses each narrow place of forward: made before, read after."""
        last = {value: self.place[node] for node in self.forward for value in self._operands(node)}
        alive = [0] * (len(self.forward) + 1)
        for value, end in last.items():
            alive[self.place[value[0]]] += self._size(value)
            alive[end] -= self._size(value)
        alive = list(accumulate(alive))
        narrow = [i for i, size in enumerate(alive) if size and size == min(alive[max(0, i - WINDOW) : i + WINDOW + 1])]
        found = [{value for value, end in last.items() if self.place[value[0]] <= i < end} for i in narrow]
        return [crossing for i, crossing in enumerate(found) if i == 0 or crossing != found[i - 1]]

    def _size(self, value: Value) -> int:
        type_ = self.program.local_type(*value)
        return 0 if type_ is None else type_.nbytes


TRIES = 4
CHANGE = {"F": 1, "B": -1, "W": -1}  # of how many microbatches a stage has begun and not ended
Choose = Callable[[Program, Parts, Collection[fx.Node]], set[Value]]  # of a program, what backward makes again


def within_budget_a_rank(program: Program, remat: Remat, remade: Callable[[Program, Choose], Program]) -> Program:
    """The program whose ranks save no more than the budget. ShardingError where one must save more.

    ``remade``: a copy of a program, in which backward makes again what is chosen.
    """
    assert remat.budget is not None
    most, whole = remat.budget, saved_bytes(_in_any_memory(program))
    if max(whole) <= most:
        return program
    budgets = [most] * len(whole)
    for left in reversed(range(TRIES)):
        found = remade(program, partial(_in_ranks, remat=remat, budgets=budgets))
        saved = saved_bytes(found)
        if max(saved) <= most:
            return found
        less = [max(0, budget - (each - most) if left > 1 else 0) for budget, each in zip(budgets, saved, strict=True)]
        budgets = [old if each <= most else new for old, new, each in zip(budgets, less, saved, strict=True)]
    raise too_little(remat, max(whole), max(saved))


def saved_bytes(program: Program) -> list[int]:
    """What each rank saves, as ``memory`` says it."""
    return [saved for saved, _ in rank_bytes(stages_of(program), schedule_of(program))]


def _in_any_memory(program: Program) -> Program:
    """The same graph, of which it is found out anew what schedule it has, were there memory enough."""
    options = program.options
    assert options.pipeline is not None
    return replace(program, options=replace(options, pipeline=replace(options.pipeline, max_memory=None)))


def _in_ranks(
    program: Program, parts: Parts, twins: Collection[fx.Node], remat: Remat, budgets: Sequence[int]
) -> set[Value]:
    program = _in_any_memory(program)  # what is found out here holds until the graph is changed
    owners, found = owners_of(program, (*parts.update, *parts.forward)), set[Value]()
    for share, budget in zip(_shares(program, parts, owners), budgets, strict=True):
        chooser = Chooser(program, share, remat, twins, owners)
        found |= chooser.forgotten(chooser.within(budget))
    return found


def _shares(program: Program, parts: Parts, owners: Mapping[Value, Value]) -> Iterator[Share]:
    """For each rank the calls of its stages, those that every stage makes for itself, and what its stages are sent.

    What is made once a step is there anyway.
    """
    kinds, schedule = Kinds(program), schedule_of(program)
    stage, flying = Places(kinds).stage, in_flight(schedule)
    ways = ((way.target, nodes) for way, nodes in stages_of(program).crossings.items() if way.part == "forward")
    sent = {(target, owners[program.value(node)][0]) for target, nodes in ways for node in nodes}
    fixed = {node for _, node in sent}
    for rank in range(schedule.num_ranks):
        here = {index for index, home in enumerate(schedule.place) if home == rank}
        taken, most = {node for target, node in sent if target in here}, max(flying[index] for index in here)

        def is_here(node: fx.Node, here: set[int] = here) -> bool:
            return node in kinds.timed and stage.get(node, min(here)) in here

        forward = [node for node in parts.forward if is_here(node) or node in taken]
        times = {node: flying[stage[node]] if stage.get(node) in here else most for node in forward}
        yield Share(forward, [node for node in parts.backward if is_here(node)], fixed, times)


def in_flight(schedule: Schedule) -> list[int]:
    """For each stage the most microbatches that it has begun and not ended."""
    return [
        max(accumulate((CHANGE.get(each.kind, 0) for each in schedule.actions[rank] if each.stage == stage), initial=0))
        for stage, rank in enumerate(schedule.place)
    ]
