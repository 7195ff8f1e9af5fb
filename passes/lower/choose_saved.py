"""Choose the values of forward to save for backward within a budget of bytes, by minimum cuts at a price of a byte.

A value that backward reads is saved, or computed again from saved ones. At a given price of a byte, the cheapest choice
is a minimum cut between the inputs and the values that backward reads. A search finds the price at which the choice
meets the budget. In a pipeline every rank has the budget, for all its microbatches under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain

from torch import fx

from shardc.costs.count import flops_of_call
from shardc.costs.ledger import bytes_of
from shardc.costs.replay import ledgers_of
from shardc.costs.stages.schedule import schedule_of
from shardc.language.errors import OptionError
from shardc.options import Remat
from shardc.program.communication import bytes_sent, gathered_again, is_collective
from shardc.program.lifetime import Parts, owners_of
from shardc.program.node import is_getitem
from shardc.program.program import Program, Value
from shardc.program.stages import StageAssignment, ValueKinds, stages_of

from .cut_saved import cut_saved, pieces_of
from .minimum_cut import Call, Cuts, Form, cuts_of

FLOPS_PER_BYTE = 64  # between a CPU's, about 10, and a GPU's, about 150: products and attention are saved first
WIRE = 16  # bytes of memory that are moved in the time of one on the wire
SLANT = 0.1  # extra price of the first byte saved over the last: it is held longest, and equal blocks then differ
WINDOW = 8  # calls on each side of a narrow place that are no narrower
LOW, HIGH = -10.0, 24.0  # prices of a saved byte, in bytes moved, as powers of 2
HALVINGS = 12
LUMPS = 3  # large values to try to hold
TRIES = 4  # rounds of budgets for the ranks of a pipeline
IN_FLIGHT = {"F": 1, "B": -1, "W": -1}  # the change, by each action, in a stage's microbatches under way

Choose = Callable[[Program, Parts, Collection[fx.Node]], set[Value]]  # the values not saved; the nodes are twins
Unsaved = set[tuple[str, int]]  # the same by names, which a copy of a program keeps
Recompute = Callable[[Program, Choose], Program]  # a copy in which backward computes unsaved values again


def within_budget(program: Program, remat: Remat, recompute: Recompute) -> Program:
    """The program that saves no more than the budget on any rank. Raises an OptionError if more must be saved.

    In a pipeline each rank chooses for itself. One that still saves too much tries again with a lower budget.
    """
    if program.options.pipeline is None:
        return recompute(program, partial(_unsaved, remat=remat))
    assert remat.budget is not None
    most, whole = remat.budget, _saved_bytes(_without_max_memory(program))
    if max(whole) <= most:
        return program
    budgets, known = [most] * len(whole), dict[tuple[int, int], Unsaved]()
    for tries_left in reversed(range(TRIES)):
        recomputing = recompute(program, partial(_unsaved_in_ranks, remat=remat, budgets=budgets, known=known))
        saved = _saved_bytes(recomputing)
        if max(saved) <= most:
            return recomputing
        for rank, nbytes in enumerate(saved):
            if nbytes > most:
                budgets[rank] = max(0, budgets[rank] - (nbytes - most)) if tries_left > 1 else 0
    raise _too_little(remat, max(whole), max(saved))


def _unsaved(program: Program, parts: Parts, twins: Collection[fx.Node], remat: Remat) -> set[Value]:
    """The values that are not saved, without a pipeline."""
    assert remat.budget is not None
    owners = owners_of(program, (*parts.update, *parts.forward))
    chooser = Chooser(program, Share(parts.forward, parts.backward), remat, twins, owners)
    whole = chooser.bytes_of(chooser.read)
    if whole <= remat.budget:
        return set()
    saved = chooser.within(remat.budget)
    if (least := chooser.bytes_of(saved)) > remat.budget:
        raise _too_little(remat, whole, least)
    return chooser.unsaved(saved)


def _too_little(remat: Remat, whole: int, least: int) -> OptionError:
    """The error of a budget below the ``least`` bytes that can be saved; ``whole``: those without it."""
    return OptionError(
        f"Remat(budget={remat.budget})",
        f"bytes that a rank may save; {whole} are saved without it",
        f"at least {least} must be saved" + ("" if remat.collectives else ": results of collectives are"),
        f"say budget={least} or more" + ("" if remat.collectives else ", or collectives=True"),
    )


def _saved_bytes(program: Program) -> list[int]:
    """Bytes that each rank saves, as ``memory`` counts them."""
    return [bytes_of(ledger.saved) for ledger in ledgers_of(cut_saved(program))]


def _without_max_memory(program: Program) -> Program:
    """The same graph without a limit on memory, so that its schedule is found anew."""
    options = program.options
    assert options.pipeline is not None
    return replace(program, options=replace(options, pipeline=replace(options.pipeline, max_memory=None)))


def _unsaved_in_ranks(
    program: Program, parts: Parts, twins: Collection[fx.Node], remat: Remat, budgets: Sequence[int],
    known: dict[tuple[int, int], Unsaved],
) -> set[Value]:  # fmt: skip
    """The values that are not saved; ``known``: of a rank and its budget, for this program or an equal one."""
    program = _without_max_memory(program)  # facts cached here hold until the graph changes
    owners = owners_of(program, (*parts.update, *parts.forward))
    for each, share in zip(enumerate(budgets), _shares(program, parts, owners), strict=True):
        if each not in known:
            chooser = Chooser(program, share, remat, twins, owners)
            known[each] = {(node.name, index) for node, index in chooser.unsaved(chooser.within(each[1]))}
    nodes = {node.name: node for node in program.graph.nodes}
    return {(nodes[name], index) for each in enumerate(budgets) for name, index in known[each]}


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a program whose saved values are chosen together: all of it, or the stages of one rank.

    ``forward``: the calls whose results may be saved there; ``fixed``: those of them that cannot be repeated there.
    ``times``: the number of microbatches of a call's results that are saved at a time, if it is not one.
    """

    forward: Sequence[fx.Node]
    backward: Sequence[fx.Node]
    fixed: Collection[fx.Node] = ()
    times: Mapping[fx.Node, int] = field(default_factory=dict)


def _shares(program: Program, parts: Parts, owners: Mapping[Value, Value]) -> Iterator[Share]:
    """For each rank the calls of its stages, those that every stage repeats, and those whose results it receives.

    Calls that run once a step are left out, since their results stay anyway.
    """
    kinds, schedule = ValueKinds(program), schedule_of(program)
    stage = StageAssignment(kinds).stage
    under_way = [  # for each stage the most microbatches that it has begun and not ended
        max(accumulate((IN_FLIGHT.get(act.kind, 0) for act in schedule.actions[rank] if act.stage == index), initial=0))
        for index, rank in enumerate(schedule.place)
    ]
    crossings = ((way.target, nodes) for way, nodes in stages_of(program).crossings.items() if way.part == "forward")
    received = {(target, owners[program.value(node)][0]) for target, nodes in crossings for node in nodes}
    fixed = {node for _, node in received}
    for rank in range(schedule.num_ranks):
        here = {index for index, home in enumerate(schedule.place) if home == rank}
        taken, most = {node for target, node in received if target in here}, max(under_way[index] for index in here)
        local = {node for node in kinds.timed if stage.get(node, min(here)) in here}
        forward = [node for node in parts.forward if node in local or node in taken]
        times = {node: under_way[stage[node]] if stage.get(node) in here else most for node in forward}
        yield Share(forward, [node for node in parts.backward if node in local], fixed, times)


# The minimum cut.


class Chooser:
    """The values of one share of a program that are saved, for any price of a byte.

    Values are those that own their bytes (``owners``); their views cost nothing. ``read``: those that backward reads.
    ``results``: the values of each call of forward that own their bytes; ``numbers``: the numbers of these in order.
    ``held``: values that are saved at any price. ``pieces``: for values of which a rank saves only a piece, or a copy
    in the tier below, the bytes on the device.
    """

    def __init__(
        self, program: Program, share: Share, remat: Remat, twins: Collection[fx.Node], owners: Mapping[Value, Value]
    ) -> None:
        self.program, self.forward, self.owners, self.times = program, share.forward, owners, share.times
        forward = set(share.forward)
        self.results: dict[fx.Node, list[Value]] = {}
        for value, owner in owners.items():
            if value == owner and value[0] in forward:
                self.results.setdefault(value[0], []).append(value)
        self.numbers = {value: i for i, value in enumerate(chain.from_iterable(self.results.values()))}
        self.read = {value for node in share.backward for value in self._operands(node)}
        self.free = {owners[program.value(node)] for node in program.results if node in forward}
        self.order = {node: i for i, node in enumerate(share.forward)}
        sent = {node for node in self.results if is_collective(node) and node not in twins}
        self.fixed = {node for node in sent if not remat.collectives or gathered_again(node)}
        self.fixed |= {node for node in self.results if node in share.fixed}
        self.costs = {node: 0 if node in twins else self._cost(node) for node in self.results}
        self.held: Collection[Value] = ()
        self.pieces = pieces_of(program, share.forward)

    def within(self, budget: int) -> set[Value]:
        """The values to save at the least cost within the budget; those of the fewest bytes if none are within it."""
        if self.bytes_of(self.read) <= budget:
            return self.read
        least, crossings = self.read, self._crossings()
        # Hold the values that cross all narrow places, every 2nd, every 4th, ..., none.
        holdings = [set().union(*crossings[2**i - 1 :: 2**i]) for i in range(len(crossings).bit_length())]
        for held in (*holdings, set()):
            self.held = held
            least = min(least, self.saved(HIGH), key=self.bytes_of)
            if self.bytes_of(least) <= budget:
                return self._cheapest(budget)
        return least

    def bytes_of(self, values: Collection[Value]) -> int:
        """Bytes of values on a rank, without those that the program returns, which stay anyway."""
        return sum(map(self._nbytes, values))

    def unsaved(self, saved: Collection[Value]) -> set[Value]:
        """All values, views too, that backward computes again if it needs them."""
        again = self._closed(saved)[1]
        return {value for value, owner in self.owners.items() if owner[0] in again and owner not in saved}

    def _crossings(self) -> list[set[Value]]:
        """The values that cross each narrow place of forward: made before, read after."""
        last = {value: self.order[node] for node in self.forward for value in self._operands(node)}
        changes = [0] * (len(self.forward) + 1)
        for value, end in last.items():
            changes[self.order[value[0]]] += self._size(value)
            changes[end] -= self._size(value)
        alive = list(accumulate(changes))
        narrow = [i for i, size in enumerate(alive) if size and size == min(alive[max(0, i - WINDOW) : i + WINDOW + 1])]
        crossings = [{value for value, end in last.items() if self.order[value[0]] <= i < end} for i in narrow]
        return [crossing for i, crossing in enumerate(crossings) if i == 0 or crossing != crossings[i - 1]]

    def _cheapest(self, budget: int) -> set[Value]:
        """The values saved at the least price that meets the budget, and those of a lower price that still fit.

        A large value that almost fits may be worth saving in place of others, so the largest ones are tried as held.
        """
        best, wanted = self._at_least_price(budget)
        missing = wanted - best
        for _ in range(LUMPS if missing else 0):
            self.held = {*self.held, max(missing, key=self._nbytes)}
            if self.bytes_of(self.saved(HIGH)) > budget:
                break
            other, wanted = self._at_least_price(budget)
            best = min(best, other, key=lambda saved: sum(map(self.costs.__getitem__, self._closed(saved)[1])))
            missing = wanted - other or missing
        return best

    def _at_least_price(self, budget: int) -> tuple[set[Value], set[Value]]:
        """The values saved within a budget, and those saved at a slightly lower price."""
        low, high, best, wanted = LOW, HIGH, self.saved(HIGH), self.saved(LOW)
        for _ in range(HALVINGS):
            if len(wanted - best) <= 1:  # no choice lies between them
                break
            price = (low + high) / 2
            saved = self.saved(price)
            if self.bytes_of(saved) <= budget:
                high, best = price, saved
            else:
                low, wanted = price, saved
        for value in sorted(wanted - best, key=lambda value: -self.order[value[0]]):
            more = self._closed({*best, value})[0]
            best = more if self.bytes_of(more) <= budget else best
        return best, wanted

    def _closed(self, saved: Collection[Value]) -> tuple[set[Value], set[fx.Node]]:
        """The values of ``saved`` that backward or a repeated call reads, and the calls that backward repeats."""
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
        """The values saved if a byte of one microbatch costs 2 to the power of ``price``."""
        saved = self._cuts.saved(price, frozenset(self.numbers[value] for value in self.held))
        return {value for value, number in self.numbers.items() if number in saved}

    @cached_property
    def _cuts(self) -> Cuts:
        most = max(self.times.values(), default=1)
        calls = []
        for node, values in self.results.items():
            slant = 1 + SLANT * (1 - self.order[node] / len(self.order))
            operands = sorted(self.numbers[value] for value in self._operands(node))
            nbytes = tuple(slant * (self._nbytes(value) / most) for value in values)  # the same in equal stages
            calls.append(Call(self.costs[node], node in self.fixed, tuple(operands), nbytes))
        return cuts_of(Form(tuple(calls), tuple(sorted(self.numbers[value] for value in self.read))))

    def _operands(self, node: fx.Node) -> set[Value]:
        """The values of forward that a call reads."""
        if is_getitem(node):
            return set()
        values = (self.program.value(operand) for operand in node.all_input_nodes)
        return {owner for value in values if (owner := self.owners.get(value)) and owner[0] in self.results}

    def _cost(self, node: fx.Node) -> int:
        """The cost to compute a call's results, in bytes moved."""
        moved = sum(map(self._size, (*self._operands(node), *self.results[node])))
        sent = bytes_sent(self.program, node) if is_collective(node) else 0
        return moved + flops_of_call(self.program, node) // FLOPS_PER_BYTE + WIRE * sent

    def _nbytes(self, value: Value) -> int:
        """Bytes to save a value for all microbatches under way; 0 if the program returns it."""
        size = self.pieces[value] if value in self.pieces else self._size(value)
        return 0 if value in self.free else size * self.times.get(value[0], 1)

    def _size(self, value: Value) -> int:
        type_ = self.program.local_type(*value)
        return 0 if type_ is None else type_.nbytes
