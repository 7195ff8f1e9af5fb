"""Cuts units into pipeline stages so that the heaviest stage is as light as possible, exactly, by dynamic programming.

``balance`` cuts a chain. ``ideal_path`` cuts a graph of units: its states are *ideals*, sets of units that contain
all that their units read, so that a stage is the difference of two ideals.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, combinations, pairwise, product, takewhile
from math import lcm
from typing import Any

from shardc.language.errors import ShardingError

MOST_IDEALS = 1000
Load = Callable[[int, int, int], int | None]  # of a stage, by its number, its first state and its last one
ReceivedBytes = Callable[[int, int], int]  # of a stage, by its first state and its last one


def balance(
    weights: Sequence[Any], num_stages: int, *, received: ReceivedBytes | Sequence[int] | None = None,
    forced: Sequence[int] = (),
) -> tuple[int, ...]:  # fmt: skip
    """The indices at which a new stage starts: ``num_stages - 1``, increasing, no stage empty.

    The greatest sum of a stage's weights is minimal. Ties go to the most even cuts (least sum of squares), then to
    those of fewest bytes, then to the first. Exact for integers and floats of any size.

    Args:
        weights: of the units in order, finite numbers of 0 or more.
        num_stages: at most as many as there are units.
        received: the bytes that a stage ``[start, end)`` receives, or a number for a cut before each unit.
        forced: indices that must be among the cuts.

    Returns:
        The cuts.

    Raises:
        ShardingError: for fewer units than stages, for more forced cuts than stages have, and for other weights.

    Examples:
        >>> import shardc
        >>> shardc.balance([3, 1, 1, 1, 2, 4], 3)
        (2, 5)
    """
    exact, forced = exact_weights(weights), tuple(sorted(set(forced)))
    check_stages(len(exact), num_stages, forced)
    sums = list(accumulate(exact, initial=0))

    def received_bytes(start: int, end: int) -> int:
        if received is None or callable(received):
            return received(start, end) if received else 0
        return received[start] if start else 0

    path = chain_path(len(exact), num_stages, lambda _, start, end: sums[end] - sums[start], received_bytes, forced)
    cuts = path.best()
    assert cuts is not None, (len(exact), num_stages, forced)
    return cuts


def exact_weights(weights: Sequence[Any]) -> tuple[int, ...]:
    """The weights times one common factor that makes all of them integers, so that no sum is rounded."""
    try:
        fractions = [Fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):
        raise _bad_weights(weights, "they are not all finite numbers") from None
    if any(fraction < 0 for fraction in fractions):
        raise _bad_weights(weights, "one is negative")
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * scale) for fraction in fractions)


def _bad_weights(weights: Any, problem: str) -> ShardingError:
    if not isinstance(weights, Sequence):
        what, problem, remedy = f"weights={weights!r}", "there is no list of weights", "write balance([3, 1], 2)"
        return ShardingError("balance", what, problem, remedy)
    shown = ", ".join(map(repr, list(weights)[:8])) + (", ..." if len(weights) > 8 else "")
    return ShardingError("balance", f"weights=[{shown}]", problem, "give every unit a weight of 0 or more")


def check_stages(num_units: int, num_stages: int, forced: Sequence[int] = ()) -> None:
    """Raise a ShardingError if the units cannot be cut into ``num_stages`` stages, with cuts at ``forced`` indices."""
    who, what = "balance", f"{num_units} units, num_stages={num_stages!r}"
    if not isinstance(num_stages, int) or num_stages < 1:
        raise ShardingError(who, what, "there is at least one stage", "say num_stages=1 or more")
    if num_units < num_stages:
        problem = "every stage holds at least one unit"
        raise ShardingError(who, what, problem, f"say num_stages={num_units} or less" if num_units else "give weights")
    if len(forced) >= num_stages or any(not 0 < cut < num_units for cut in forced):
        problem = f"forced={tuple(forced)}: {num_stages} stages have {num_stages - 1} cuts, from 1 to {num_units - 1}"
        raise ShardingError(who, what, problem, "force fewer cuts, or say more stages")


def chain_path(
    num_units: int, num_stages: int, load: Load, received_bytes: ReceivedBytes, forced: Sequence[int] = ()
) -> MinMaxPath:
    """The path along a chain, whose states are the numbers of units in the stages so far."""

    def following(start: int) -> range:
        """No stage goes on beyond a forced cut."""
        at = bisect_left(forced, start + 1)
        return range(start + 1, (forced[at] if at < len(forced) else num_units) + 1)

    return MinMaxPath(num_stages, num_units, following, load, received_bytes)


def ideal_path(
    masks: Sequence[int], num_stages: int, load: Load, weights: Sequence[int], received_bytes: ReceivedBytes,
    is_monotone: bool,
) -> MinMaxPath:  # fmt: skip
    """The path through the ideals ``masks``, by index.

    ``weights``: the weight of each ideal; lighter following ideals are tried first. ``is_monotone``: loads rise with
    these weights.
    """
    order = sorted(range(1, len(masks)), key=lambda i: (weights[i], i))
    following = [[i for i in order if masks[i] != mask and masks[i] & mask == mask] for mask in masks]
    return MinMaxPath(num_stages, len(masks) - 1, following.__getitem__, load, received_bytes, is_monotone)


def ideals(num_units: int, edges: Iterable[tuple[int, int]], most: int = MOST_IDEALS) -> list[int] | None:
    """Every ideal as a bit mask of units, smaller ones first; None if there are more than ``most``.

    ``edges``: pairs of a unit and a later one that reads from it.
    """
    needs = [0] * num_units
    for source, reader in edges:
        needs[reader] |= 1 << source
    latest, masks = {0}, [0]
    for _ in range(num_units):
        latest = {
            mask | 1 << unit
            for mask in latest
            for unit in range(num_units)
            if not mask >> unit & 1 and needs[unit] & ~mask == 0
        }
        masks += sorted(latest)
        if len(masks) > most:
            return None
    return masks


BestSuffix = dict[int, tuple[int, int, int]]  # by state: the sum of squares, the bytes, the next state


@dataclass(frozen=True, slots=True)
class MinMaxPath:
    """Paths from state 0 to state ``last``, one step for each stage; the best path has the least greatest load.

    ``following``: the states that may follow a state, in order of preference. ``load``: of a step; None if the step is
    not allowed. ``received_bytes``: of a step. ``is_monotone``: loads do not fall along ``following``, so that all
    states after one that is too heavy can be skipped.
    """

    num_stages: int
    last: int
    following: Callable[[int], Sequence[int]]
    load: Load
    received_bytes: ReceivedBytes
    is_monotone: bool = True

    def least(self) -> int | None:
        """The least possible greatest load; None if no path is allowed.

        State: ``row`` has for each state the least greatest load of the remaining steps.
        """
        row = {self.last: 0}
        for stage in reversed(range(self.num_stages)):
            least: dict[int, int] = {}
            for state in self._starts(stage):
                for end in self.following(state):
                    if end not in row or (load := self.load(stage, state, end)) is None:
                        continue
                    if self.is_monotone and state in least and load >= least[state]:
                        break
                    least[state] = min(max(load, row[end]), least.get(state, max(load, row[end])))
            row = least
        return row.get(0)

    def best(self) -> tuple[int, ...] | None:
        """The states between the steps of the best path; None if no path is allowed.

        The greatest load is minimal; ties go to the least sum of squares, then the fewest bytes, then the first path.
        """
        bound = self.least()
        if bound is None:
            return None
        rows: list[BestSuffix] = [{self.last: (0, 0, 0)}]
        for stage in reversed(range(self.num_stages)):
            suffixes = ((state, self._best_from(stage, state, rows[-1], bound)) for state in self._starts(stage))
            rows.append({state: suffix for state, suffix in suffixes if suffix is not None})
        states = [0]
        for row in rows[:0:-1]:
            states.append(row[states[-1]][2])
        return tuple(states[1:-1])

    def _starts(self, stage: int) -> range:
        return range(self.last) if stage else range(1)

    def _best_from(self, stage: int, state: int, row: BestSuffix, bound: int) -> tuple[int, int, int] | None:
        best: tuple[int, int, int] | None = None
        for end in self.following(state):
            if end not in row or (load := self.load(stage, state, end)) is None:
                continue
            if load > bound and self.is_monotone:
                break
            if load > bound:
                continue
            squares, nbytes = load * load + row[end][0], self.received_bytes(state, end) + row[end][1]
            if best is None or (squares, nbytes) < best[:2]:
                best = squares, nbytes, end
        return best


@dataclass(frozen=True, slots=True)
class Split:
    """The stage of each unit. ``heaviest``: the weight of the heaviest stage, or of the heaviest rank.

    ``bound``: no split is lighter than this, among those that were searched.
    """

    stages: tuple[int, ...]
    heaviest: Any
    bound: Any

    @property
    def is_exact(self) -> bool:
        """Whether the split meets its bound."""
        return bool(self.heaviest == self.bound)


def stages_after(masks: Sequence[int], num_units: int) -> tuple[int, ...]:
    """The stage of each unit, given the ideal before each stage but the first."""
    return tuple(sum(not mask >> unit & 1 for mask in masks) for unit in range(num_units))


MOST_LOOPED = 64  # units for which the looped search takes seconds
Ranges = tuple[tuple[int, int], ...]  # the units of a rank: start, end (exclusive)
State = tuple[int, int]
BestOfRanges = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # squares, bytes, cuts of first ranges, of second ones
RangesBytes = Callable[[Ranges], int]
Shared = Sequence[tuple[Any, Sequence[int]]]


def balance_ranks(
    weights: Sequence[Any], place: Sequence[int], *, shared: Shared = (), received: RangesBytes = lambda ranges: 0
) -> Split:
    """Cut a chain into stages, stage ``s`` on rank ``place[s]``, so that the heaviest rank is as light as possible.

    ``shared``: weights that each rank with one of the given units bears once, such as a tied embedding. ``received``:
    the bytes that a rank with these units receives. Ties go to the most even cuts, then the fewest bytes, then the
    first. Exact for one stage a rank, for two in a V, and for two looped with at most ``MOST_LOOPED`` units. Otherwise
    cuts move as long as that helps, and ``bound`` is the larger of the mean and the heaviest unit. Raises a
    ShardingError as ``balance`` does, and if ranks have different numbers of stages.
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
    """The weights of ranks from those of their units."""

    weights: Sequence[Any]
    shared: Shared

    @cached_property
    def sums(self) -> tuple[Any, ...]:
        """Prefix sums: the weight of all units before each one, and of all units."""
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
    loads: RankLoads, place: Sequence[int], num_ranks: int, most: int, received: RangesBytes
) -> tuple[int, ...] | None:
    """The best cuts, or None if no exact search applies. ``most``: a weight that the heaviest rank can attain."""
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

    ``middle``: the start of the second ranges if looped; None in a V.
    """

    loads: RankLoads
    num_ranks: int
    middle: int | None
    most: int

    @property
    def start(self) -> State:
        """Start positions of the first rank's ranges; in a V, the end of the second one."""
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

    def best(self, received: RangesBytes) -> BestOfRanges | None:
        """The best cuts: the most even, then those of fewest bytes, then the first."""

        @cache
        def best_from(rank: int, state: State) -> BestOfRanges | None:
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
        """Possible loads of a rank, with the next state and the ranges, such that later ranks can bear the rest."""
        num_left, sums, middle = self.num_ranks - rank - 1, self.loads.sums, self.middle
        for end in self._ends(num_left, state):
            (a, b), (c, d) = state, end
            ranges = ((a, c), (d, b) if middle is None else (b, d))
            rest = sums[d] - sums[c] if middle is None else sums[middle] - sums[c] + sums[-1] - sums[d]
            if rest <= num_left * self.most and (load := self.loads.of(ranges)) <= self.most:
                yield load, end, ranges

    def _ends(self, num_left: int, state: State) -> Iterator[State]:
        """Possible ends of the two ranges, neither of them too heavy; ``num_left``: the number of later ranks."""
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
