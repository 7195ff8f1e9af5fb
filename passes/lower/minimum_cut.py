"""The values to save at a price of a byte: a minimum cut, found once for all programs of one form."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

UNIT = 1024  # capacities are whole numbers of 1/1024 byte
NUM_FORMS = 64  # forms whose cuts are kept


class Call(NamedTuple):
    """A call of forward. Values have numbers, in the order in which calls make them.

    ``cost``: the cost to repeat the call, in bytes moved. ``is_fixed``: it may not be repeated.
    ``operands``: the numbers of the values that it reads. ``results``: for each value that it makes, the bytes to save.
    """

    cost: int
    is_fixed: bool
    operands: tuple[int, ...]
    results: tuple[float, ...]


class Form(NamedTuple):
    """The input of a choice: the calls of forward in order, and the values that backward reads."""

    calls: tuple[Call, ...]
    read: tuple[int, ...]


@dataclass(eq=False)
class Cuts:
    """The cuts of one form.

    State: ``_known``, for each set of values that must be saved, the prices tried so far, each with the values saved.
    """

    form: Form
    _known: dict[frozenset[int], list[tuple[float, frozenset[int]]]] = field(default_factory=dict)

    def saved(self, price: float, held: frozenset[int]) -> frozenset[int]:
        """The values saved if a byte costs 2 to the power of ``price``.

        A choice that is best at two prices is best between them: the least cost is a concave function of the price.
        """
        known = self._known.setdefault(held, [])
        i = bisect_left(known, price, key=itemgetter(0))
        if i < len(known) and (known[i][0] == price or (i > 0 and known[i - 1][1] == known[i][1])):
            return known[i][1]
        saved = self._minimum_cut(price, held)
        insort(known, (price, saved), key=itemgetter(0))
        return saved

    def _minimum_cut(self, price: float, held: frozenset[int]) -> frozenset[int]:
        """The cut between the source and the values that backward reads. Calls are nodes below 0, values from 0 on."""
        import networkx as nx  # here, since few programs need it
        from networkx.algorithms.flow import boykov_kolmogorov

        graph = nx.DiGraph()
        graph.add_edges_from((number, "sink") for number in self.form.read)
        made: dict[int, int] = {}
        for call, each in enumerate(self.form.calls):
            node, first = -1 - call, len(made)
            results = range(first, first + len(each.results))
            is_kept = each.is_fixed or not held.isdisjoint(results)
            graph.add_edge("source", node, **({} if is_kept else {"capacity": UNIT * each.cost}))
            graph.add_edges_from((number, node) for number in each.operands)
            for number, nbytes in zip(results, each.results, strict=True):
                graph.add_edge(node, number, capacity=round(UNIT * 2**price * nbytes))
                made[number] = node
        _, (before, after) = nx.minimum_cut(graph, "source", "sink", flow_func=boykov_kolmogorov)
        return frozenset(number for number, node in made.items() if node in before and number in after)


@lru_cache(NUM_FORMS)
def cuts_of(form: Form) -> Cuts:
    """The cuts of a form. Ranks of a pipeline with equal stages share them, and so do programs with other budgets."""
    return Cuts(form)
