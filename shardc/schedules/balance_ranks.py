"""Cuts a chain of units into several stages a rank, so that the heaviest rank is as light as possible.

For two stages a rank, with ranks in order and then again in order (looped) or backwards (a V), the cut is exact. The
search assigns two ranges of units to one rank after the other; its state is where the two ranges of the next rank
begin. In a V they close in from both ends; looped they move up side by side from the first unit and a middle one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, combinations, pairwise, product, takewhile
from typing import Any

from shardc.language.errors import ShardingError
from shardc.schedules.balance import Split, balance, chain_path, check_stages, exact_weights

MOST_LOOPED = 64  # units for which the looped search takes seconds
Ranges = tuple[tuple[int, int], ...]  # the units of a rank: from, to before
State = tuple[int, int]
BestSuffix = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # squares, bytes, cuts of first ranges, of second ones
ReceivedBytes = Callable[[Ranges], int]
Shared = Sequence[tuple[Any, Sequence[int]]]


def balance_ranks(
    weights: Sequence[Any], place: Sequence[int], *, shared: Shared = (), received: ReceivedBytes = lambda ranges: 0
) -> Split:
    """Cut a chain into stages, stage ``s`` on rank ``place[s]``, so that the heaviest rank is as light as possible.

    ``shared``: weights that each rank with one of the given units bears once, such as a tied embedding. ``received``:
    the bytes that a rank with these units receives. Ties go to the most even cuts, then the fewest bytes, then the
    first. Exact for one stage a rank, for two in a V, and for two looped with at most ``MOST_LOOPED`` units. Otherwise
    cuts move as long as that helps, and ``bound`` is the mean or the heaviest unit. Raises a ShardingError as
    ``balance`` does, and if ranks have different numbers of stages.
    """
    num_ranks = len(set(place))
    if set(place) != set(range(num_ranks)) or len({list(place).count(rank) for rank in place}) != 1:
        problem, remedy = "ranks count from 0 and have equally many stages", "say place=(0, 1, 1, 0) for two in a V"
        raise ShardingError("balance", f"place={tuple(place)}", problem, remedy)
    check_stages(len(weights), len(place))
    exact = exact_weights([*weights, *(weight for weight, _ in shared)])
    shared_units = [tuple(units) for _, units in shared]
    loads = RankLoads(exact[: len(weights)], tuple(zip(exact[len(weights) :], shared_units, strict=True)))
    cuts = _improved(loads, place, balance(weights, len(place)))
    best = _best_cuts(loads, place, num_ranks, max(loads.all(cuts, place)), received)
    cuts = best or cuts
    heaviest = max(RankLoads(weights, shared).all(cuts, place))
    bound = max(*weights, (sum(weights) + sum(weight for weight, _ in shared)) / num_ranks)
    stages = tuple(sum(unit >= cut for cut in cuts) for unit in range(len(weights)))
    return Split(stages, heaviest, heaviest if best else bound)


@dataclass(frozen=True)
class RankLoads:
    """The weight of ranks, by their units."""

    weights: Sequence[Any]
    shared: Shared

    @cached_property
    def sums(self) -> tuple[Any, ...]:
        """The weight of all units before each, and at the end of all units."""
        return tuple(accumulate(self.weights, initial=0))

    def of(self, ranges: Ranges) -> int:
        """The weight of a rank with these units."""
        shared = (weight for weight, units in self.shared if any(a <= unit < b for unit in units for a, b in ranges))
        return sum(self.sums[end] - self.sums[start] for start, end in ranges) + sum(shared)

    def all(self, cuts: Sequence[int], place: Sequence[int]) -> list[int]:
        """The weight of each rank."""
        ranges: dict[int, Ranges] = {}
        for rank, stage in zip(place, pairwise([0, *cuts, len(self.weights)]), strict=True):
            ranges[rank] = (*ranges.get(rank, ()), stage)
        return [self.of(each) for each in ranges.values()]


def _improved(loads: RankLoads, place: Sequence[int], cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Move one cut anywhere, or two by one unit, as long as the heaviest rank becomes lighter or ranks more even."""

    def cost(cuts: tuple[int, ...]) -> tuple[int, int]:
        by_rank = loads.all(cuts, place)
        return max(by_rank), sum(load * load for load in by_rank)

    def moves() -> Iterator[tuple[int, ...]]:
        bounds = (0, *cuts, len(loads.weights))
        for i in range(len(cuts)):
            yield from ((*cuts[:i], to, *cuts[i + 1 :]) for to in range(bounds[i] + 1, bounds[i + 2]))
        for (i, j), (di, dj) in product(combinations(range(len(cuts)), 2), product((-1, 1), repeat=2)):
            both = (*cuts[:i], cuts[i] + di, *cuts[i + 1 : j], cuts[j] + dj, *cuts[j + 1 :])
            if all(a < b for a, b in pairwise((0, *both, len(loads.weights)))):
                yield both

    while cost(best := min(moves(), key=cost, default=cuts)) < cost(cuts):
        cuts = best
    return cuts


def _best_cuts(
    loads: RankLoads, place: Sequence[int], num_ranks: int, most: int, received: ReceivedBytes
) -> tuple[int, ...] | None:
    """The best cuts, or None where they cannot be found. ``most``: a weight of the heaviest rank that is possible."""
    size, ranks = len(loads.weights), tuple(range(num_ranks))
    if len(place) == num_ranks:
        return chain_path(size, num_ranks, lambda _, a, b: loads.of(((a, b),)), lambda a, b: received(((a, b),))).best()
    is_v = tuple(place) == ranks + ranks[::-1]
    if not is_v and (tuple(place) != ranks + ranks or size > MOST_LOOPED):
        return None
    middles: Iterable[int | None] = [None] if is_v else range(num_ranks, size - num_ranks + 1)
    for middle in middles:
        most = min(most, _TwoRanges(loads, num_ranks, middle, most).least())
    searches = (_TwoRanges(loads, num_ranks, middle, most) for middle in middles)
    _, _, first, second = min(best for search in searches if (best := search.best(received)) is not None)
    return (*first, *second)


@dataclass(frozen=True)
class _TwoRanges:
    """The search for two ranges of units a rank, none heavier than ``most``, by dynamic programming over ranks.

    ``middle``: where the second ranges begin if looped; None in a V.
    """

    loads: RankLoads
    num_ranks: int
    middle: int | None
    most: int

    @property
    def start(self) -> State:
        """Where the ranges of the first rank begin."""
        return 0, len(self.loads.weights) if self.middle is None else self.middle

    def least(self) -> int:
        """The least possible weight of the heaviest rank; ``most`` if none is less."""
        row = {self.start: 0}  # for each state the least greatest load of the ranks so far
        for rank in range(self.num_ranks):
            following: dict[State, int] = {}
            for state, least in row.items():
                for load, end, _ in self._assignments(rank, state):
                    following[end] = min(following.get(end, self.most), max(least, load))
            row = following
        return min(row.values(), default=self.most)

    def best(self, received: ReceivedBytes) -> BestSuffix | None:
        """The best cuts: the most even, then those of fewest bytes, then the first."""

        @cache
        def best_from(rank: int, state: State) -> BestSuffix | None:
            if rank == self.num_ranks:
                return 0, 0, (), ()
            suffixes = []
            for load, end, ranges in self._assignments(rank, state):
                rest = best_from(rank + 1, end)
                if rest is not None:
                    squares, nbytes, first, second = rest
                    cut = () if rank == self.num_ranks - 1 else (end[1],)
                    second = (*second, *cut) if self.middle is None else (*cut, *second)
                    suffixes.append((squares + load * load, nbytes + received(ranges), (end[0], *first), second))
            return min(suffixes, default=None)

        return best_from(0, self.start)

    def _assignments(self, rank: int, state: State) -> Iterator[tuple[int, State, Ranges]]:
        """The load of a rank, the next state and its ranges, if the ranks after it can bear the rest."""
        num_left, sums, middle = self.num_ranks - rank - 1, self.loads.sums, self.middle
        for end in self._ends(num_left, state):
            (a, b), (c, d) = state, end
            ranges = ((a, c), (d, b) if middle is None else (b, d))
            rest = sums[d] - sums[c] if middle is None else sums[middle] - sums[c] + sums[-1] - sums[d]
            if rest <= num_left * self.most and (load := self.loads.of(ranges)) <= self.most:
                yield load, end, ranges

    def _ends(self, num_left: int, state: State) -> Iterator[State]:
        """Where two ranges may end, neither of them too heavy; ``num_left``: the number of later ranks."""
        (a, b), middle = state, self.middle
        size, sums = len(self.loads.weights), self.loads.sums

        def while_light(ends: range, start: int) -> Iterator[int]:
            return takewhile(lambda end: abs(sums[end] - sums[start]) <= self.most, ends)

        if num_left == 0:
            yield (a + 1, a + 1) if middle is None else (middle, size)
            return
        for c in while_light(range(a + 1, b - 2 * num_left if middle is None else middle - num_left + 1), a):
            others = range(b - 1, c + 2 * num_left - 1, -1) if middle is None else range(b + 1, size - num_left + 1)
            yield from ((c, d) for d in while_light(others, b))
