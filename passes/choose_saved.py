"""What backward makes again so that at most so many bytes are saved, at the least cost: a minimum cut.

A value that backward reads is saved or made again; then what its call reads is saved or made again in turn. With a
price for every byte that is saved this is a minimum cut: of ``make`` and ``have``, the two nodes of a value, what costs
to make stands between the source and ``make``, what it costs to save between ``make`` and ``have``. The price is the
least that meets the budget. Sources: torch's min-cut partitioner; Picard 1976 for closures.

What is made again lives until its last reader, so that a chain through the whole of forward would be as long alive as
what is saved. So values that cross narrow places of forward (the residual stream between blocks) are saved, at every
narrow place if the budget allows, else at every 2nd, 4th, ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from shardc.announcement import bytes_sent, is_collective
from shardc.cost import flops_of_call
from shardc.error import OptionError
from shardc.lifetime import Parts, owners_of
from shardc.node import is_getitem
from shardc.options import Remat
from shardc.program import Program, Value

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
