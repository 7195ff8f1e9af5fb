"""A chain of units cut into more stages than there are ranks: the heaviest rank is as light as can be.

With two stages a rank, the ranks in order and then in order again (looped) or backwards (a V), the cut is exact. The
ranks are gone through in turn, each with its two runs of units; a state is where the two runs of the next rank begin.
In a V these close in from both ends; looped they go up side by side, from the first unit and from one in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product, takewhile
from typing import Any

from shardc.chain import balance, chain, check_stages, exact_weights
from shardc.error import ShardingError
from shardc.split import Split, stages_between

MOST_LOOPED = 64  # units, in seconds
Runs = tuple[tuple[int, int], ...]  # the units of a rank: from, to before
State = tuple[int, int]
Step = tuple[int, State, Runs]  # what the rank weighs, the state after it, its units
Shared = Sequence[tuple[Any, Sequence[int]]]
Best = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # squares, bytes, the cuts of the first runs, of the second
Known = dict[tuple[int, State], Best | None]


def balance_ranks(
    weights: Sequence[Any],
    place: Sequence[int],
    *,
    shared: Shared = (),
    received: Callable[[Runs], int] = lambda runs: 0,
) -> Split:
    """The cut into ``len(place)`` stages, stage s on rank ``place[s]``, that has the least greatest weight of a rank.

    ``shared``: a weight that each rank with one of these units bears once, such as that of a tied embedding.
    ``received``: the bytes that a rank with these units is sent. Ties: most even, fewest bytes, first. Exact for one
    stage a rank and for two, in a V or, of at most ``MOST_LOOPED`` units, looped; else cuts are moved for as long as
    that helps, and ``bound`` is the mean or the heaviest unit. Raises a ShardingError as ``balance`` does, and where
    ranks have unlike many stages.
    """
    num_ranks = _num_ranks(place)
    check_stages(len(weights), len(place))
    every = exact_weights([*weights, *(weight for weight, _ in shared)])
    holders = [tuple(units) for _, units in shared]
    loads = Loads(every[: len(weights)], tuple(zip(every[len(weights) :], holders, strict=True)))
    cuts = _improved(loads, place, balance(weights, len(place)))
    found = _exact(loads, place, num_ranks, max(loads.all(cuts, place)), received)
    given = Loads(weights, shared)
    heaviest = max(given.all(found or cuts, place))
    bound = max(*weights, (sum(weights) + sum(weight for weight, _ in shared)) / num_ranks)
    return Split(stages_between(found or cuts, len(weights)), heaviest, heaviest if found else bound)


def _num_ranks(place: Sequence[int]) -> int:
    num_ranks = len(set(place))
    counts = {list(place).count(rank) for rank in place}
    if set(place) != set(range(num_ranks)) or len(counts) != 1:
        problem, remedy = "ranks count from 0 and have equally many stages", "say place=(0, 1, 1, 0) for two in a V"
        raise ShardingError("balance", f"place={tuple(place)}", problem, remedy)
    return num_ranks


def _exact(
    loads: Loads, place: Sequence[int], num_ranks: int, most: int, received: Callable[[Runs], int]
) -> tuple[int, ...] | None:
    """The best cuts, where they can be found; ``most``: a weight of the heaviest rank that is known to do."""
    ranks = tuple(range(num_ranks))
    if len(place) == num_ranks:
        return chain(
            loads.num_units, num_ranks, lambda _, a, b: loads.of(((a, b),)), lambda a, b: received(((a, b),))
        ).best()
    is_v = tuple(place) == ranks + ranks[::-1]
    if is_v or (tuple(place) == ranks + ranks and loads.num_units <= MOST_LOOPED):
        return _Pairs(loads, num_ranks, is_v, received).best(most)
    return None


@dataclass(frozen=True)
class Loads:
    """What ranks weigh."""

    weights: Sequence[Any]
    shared: Shared

    @property
    def num_units(self) -> int:
        """The number of units."""
        return len(self.weights)

    @cached_property
    def behind(self) -> tuple[Any, ...]:
        """What the units before each weigh together."""
        return tuple(accumulate(self.weights, initial=0))

    def of(self, runs: Runs) -> int:
        """Of a rank with these units."""
        weight = sum(self.behind[end] - self.behind[start] for start, end in runs)
        held = (
            extra for extra, units in self.shared if any(start <= unit < end for unit in units for start, end in runs)
        )
        return weight + sum(held)

    def all(self, cuts: Sequence[int], place: Sequence[int]) -> list[int]:
        """Of each rank."""
        runs: dict[int, list[tuple[int, int]]] = {}
        for rank, run in zip(place, pairwise([0, *cuts, self.num_units]), strict=True):
            runs.setdefault(rank, []).append(run)
        return [self.of(tuple(its)) for its in runs.values()]


def _improved(loads: Loads, place: Sequence[int], cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The cuts moved, one or two at a time, for as long as ranks become lighter or more even."""

    def cost(cuts: tuple[int, ...]) -> tuple[int, int]:
        each = loads.all(cuts, place)
        return max(each), sum(load * load for load in each)

    def moved() -> Iterator[tuple[int, ...]]:
        bounds = (0, *cuts, loads.num_units)
        for i in range(len(cuts)):
            yield from ((*cuts[:i], to, *cuts[i + 1 :]) for to in range(bounds[i] + 1, bounds[i + 2]))
        for i, j in combinations(range(len(cuts)), 2):
            for here, there in product((-1, 1), repeat=2):
                both = (*cuts[:i], cuts[i] + here, *cuts[i + 1 : j], cuts[j] + there, *cuts[j + 1 :])
                if all(a < b for a, b in pairwise((0, *both, loads.num_units))):
                    yield both

    while cost(best := min(moved(), key=cost, default=cuts)) < cost(cuts):
        cuts = best
    return cuts


@dataclass(frozen=True)
class _Pairs:
    """Two runs of units a rank. ``middle``: where the second runs begin if looped; in a V it says nothing."""

    loads: Loads
    num_ranks: int
    is_v: bool
    received: Callable[[Runs], int]

    def best(self, most: int) -> tuple[int, ...]:
        """The cuts; ``most``: a weight of the heaviest rank that is known to do."""
        size, num_ranks = self.loads.num_units, self.num_ranks
        middles = [0] if self.is_v else range(num_ranks, size - num_ranks + 1)
        for middle in middles:
            most = min(most, self._least(middle, most))
        found = (self._best(0, self._start(middle), middle, most, {}) for middle in middles)
        _, _, first, second = min(each for each in found if each is not None)
        return (*first, *second)

    def _start(self, middle: int) -> State:
        return 0, self.loads.num_units if self.is_v else middle

    def _least(self, middle: int, most: int) -> int:
        """The least greatest load, by what is least for each state, rank after rank; ``most`` where it is no less."""
        row = {self._start(middle): 0}
        for rank in range(self.num_ranks):
            new: dict[State, int] = {}
            for state, least in row.items():
                for load, end, _ in self._steps(rank, state, middle, most):
                    new[end] = min(new.get(end, most), max(least, load))
            row = new
        return min(row.values(), default=most)

    def _best(self, rank: int, state: State, middle: int, most: int, known: Known) -> Best | None:
        """From a state on, with no rank heavier than ``most``: most even, of fewest bytes, first."""
        if rank == self.num_ranks:
            return 0, 0, (), ()
        if (rank, state) not in known:
            best: Best | None = None
            for step in self._steps(rank, state, middle, most):
                rest = self._best(rank + 1, step[1], middle, most, known)
                joined = rest and self._joined(rank, step, rest)
                best = min((each for each in (best, joined) if each is not None), default=None)
            known[rank, state] = best
        return known[rank, state]

    def _joined(self, rank: int, step: Step, rest: Best) -> Best:
        load, end, runs = step
        squares, nbytes, first, second = rest
        further = () if rank == self.num_ranks - 1 else (end[1],)
        both = (*second, *further) if self.is_v else (*further, *second)
        return squares + load * load, nbytes + self.received(runs), (end[0], *first), both

    def _steps(self, rank: int, state: State, middle: int, most: int) -> Iterator[Step]:
        """What a rank may hold, and where the runs of the next one begin; all ranks after it can hold the rest."""
        left, behind = self.num_ranks - rank - 1, self.loads.behind
        for end in self._ends(left, state, middle, most):
            (a, b), (c, d) = state, end
            runs = ((a, c), (d, b) if self.is_v else (b, d))
            rest = behind[d] - behind[c] if self.is_v else behind[middle] - behind[c] + behind[-1] - behind[d]
            if rest <= left * most and (load := self.loads.of(runs)) <= most:
                yield load, end, runs

    def _ends(self, left: int, state: State, middle: int, most: int) -> Iterator[State]:
        """Where two runs may end, neither of them heavier than ``most``; ``left``: the number of ranks after it."""
        a, b = state
        size = self.loads.num_units
        if left == 0:
            yield (a + 1, a + 1) if self.is_v else (middle, size)
            return
        for c in self._while_light(range(a + 1, (b - 2 * left if self.is_v else middle - left + 1)), a, most):
            others = range(b - 1, c + 2 * left - 1, -1) if self.is_v else range(b + 1, size - left + 1)
            yield from ((c, d) for d in self._while_light(others, b, most))

    def _while_light(self, ends: range, start: int, most: int) -> Iterator[int]:
        behind = self.loads.behind
        return takewhile(lambda end: abs(behind[end] - behind[start]) <= most, ends)
