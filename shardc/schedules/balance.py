"""A chain of units cut into more stages than there are ranks: the heaviest rank is as light as can be.

With two stages a rank, the ranks in order and then in order again (looped) or backwards (a V), the cut is exact. The
ranks are gone through in turn, each with its two runs of units; a state is where the two runs of the next rank begin.
In a V these close in from both ends; looped they go up side by side, from the first unit and from one in the middle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product, takewhile
from math import lcm
from typing import Any

from shardc.language.errors import ShardingError

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


Received = Callable[[int, int], int]


def balance(
    weights: Sequence[Any], num_stages: int, *, received: Received | Sequence[int] | None = None,
    forced: Sequence[int] = (),
) -> tuple[int, ...]:  # fmt: skip
    """The indices at which a new stage starts: ``num_stages - 1``, increasing, none of the stages empty.

    The greatest sum of a stage's weights is least; of the cuts with that sum the most even ones (least sum of
    squares), of those the ones of fewest bytes, of those the first. Exact for whole numbers and floats of any size.
    ``received``: the bytes that a stage ``[start, end)`` is sent, or a number for the cut before each unit.
    ``forced``: indices that must be among the cuts. Raises a ShardingError where there are fewer units than stages,
    more forced cuts than stages have, or a weight that is no number of 0 or more.
    """
    exact, forced = exact_weights(weights), tuple(sorted(set(forced)))
    check_stages(len(exact), num_stages, forced)
    behind = list(accumulate(exact, initial=0))

    def load(stage: int, start: int, end: int) -> int:
        return behind[end] - behind[start]

    found = chain(len(exact), num_stages, load, received, forced).best()
    assert found is not None, (len(exact), num_stages, forced)
    return found


def chain(
    num_units: int,
    num_stages: int,
    load: Callable[[int, int, int], int | None],
    received: Received | Sequence[int] | None = None,
    forced: Sequence[int] = (),
) -> Walk:
    """The walk along a chain; ``load`` of a stage by its number, its first unit and the one after its last."""

    def after(start: int) -> range:
        """No stage goes on beyond a forced cut."""
        place = bisect_left(forced, start + 1)
        return range(start + 1, (forced[place] if place < len(forced) else num_units) + 1)

    return Walk(num_stages, num_units, after, load, _received(received))


def _received(given: Received | Sequence[int] | None) -> Received:
    if given is None:
        return lambda start, end: 0
    if callable(given):
        return given
    by_cut = tuple(given)
    return lambda start, end: by_cut[start] if start else 0


def exact_weights(weights: Sequence[Any]) -> tuple[int, ...]:
    """The weights as whole numbers that compare and add as they do, without rounding."""
    try:
        fractions = [Fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):
        raise _no_weight(weights, "they are not all finite numbers") from None
    if any(fraction < 0 for fraction in fractions):
        raise _no_weight(weights, "one is negative")
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * scale) for fraction in fractions)


def check_stages(num_units: int, num_stages: int, forced: Sequence[int] = ()) -> None:
    """A ShardingError where so many units cannot be cut so."""
    who, what = "balance", f"{num_units} units, num_stages={num_stages!r}"
    if not isinstance(num_stages, int) or num_stages < 1:
        raise ShardingError(who, what, "there is at least one stage", "say num_stages=1 or more")
    if num_units < num_stages:
        problem = "every stage holds at least one unit"
        raise ShardingError(who, what, problem, f"say num_stages={num_units} or less" if num_units else "give weights")
    if len(forced) >= num_stages or any(not 0 < cut < num_units for cut in forced):
        problem = f"forced={tuple(forced)}: {num_stages} stages have {num_stages - 1} cuts, from 1 to {num_units - 1}"
        raise ShardingError(who, what, problem, "force fewer cuts, or say more stages")


def _no_weight(weights: Any, problem: str) -> ShardingError:
    if not isinstance(weights, Sequence):
        return ShardingError(
            "balance", f"weights={weights!r}", "there is no list of weights", "write balance([3, 1], 2)"
        )
    shown = ", ".join(map(repr, list(weights)[:8])) + (", ..." if len(weights) > 8 else "")
    return ShardingError("balance", f"weights=[{shown}]", problem, "give every unit a weight of 0 or more")


BestSuffix = dict[int, tuple[int, int, int]]  # for a state: the sum of squares, the bytes, the state after


@dataclass(frozen=True, slots=True)
class Walk:
    """From state 0 to ``last`` in ``num_steps`` steps.

    ``after``: the states that a step from a state may lead to. ``load``: of a step, by its number and its two states;
    None where the step is not allowed. ``received``: bytes that come into a step. ``rises``: loads do not fall along
    ``after``, so that what follows a step that is too heavy need not be looked at.
    """

    num_steps: int
    last: int
    after: Callable[[int], Sequence[int]]
    load: Callable[[int, int, int], int | None]
    received: Callable[[int, int], int] = lambda start, end: 0
    rises: bool = True

    def least(self) -> int | None:
        """The least greatest load of a step; None where no walk is allowed.

        ``row``: for each state the least greatest load of the steps that are still to go.
        """
        row = {self.last: 0}
        for step in reversed(range(self.num_steps)):
            row = {state: found for state in self._starts(step) if (found := self._least_from(step, state, row)) >= 0}
        return row.get(0)

    def best(self) -> tuple[int, ...] | None:
        """The states between the steps of the walk of least load, then most even, then of fewest bytes, then first.

        Most even is the least sum of squares of loads. First is by the order of ``after``.
        """
        bound = self.least()
        if bound is None:
            return None
        rows: list[BestSuffix] = [{self.last: (0, 0, 0)}]
        for step in reversed(range(self.num_steps)):
            found = ((state, self._best_from(step, state, rows[-1], bound)) for state in self._starts(step))
            rows.append({state: best for state, best in found if best is not None})
        states = [0]
        for row in rows[:0:-1]:
            states.append(row[states[-1]][2])
        return tuple(states[1:-1])

    def _starts(self, step: int) -> range:
        return range(self.last) if step else range(1)

    def _least_from(self, step: int, state: int, row: dict[int, int]) -> int:
        """Minus one where no walk is allowed."""
        best = -1
        for end in self.after(state):
            rest = row.get(end)
            load = None if rest is None else self.load(step, state, end)
            if rest is None or load is None:
                continue
            if self.rises and 0 <= best <= load:
                break
            best = max(load, rest) if best < 0 else min(best, max(load, rest))
        return best

    def _best_from(self, step: int, state: int, row: BestSuffix, bound: int) -> tuple[int, int, int] | None:
        best: tuple[int, int, int] | None = None
        for end in self.after(state):
            rest = row.get(end)
            load = None if rest is None else self.load(step, state, end)
            if rest is None or load is None:
                continue
            if load > bound:
                if self.rises:
                    break
                continue
            squares, nbytes = load * load + rest[0], self.received(state, end) + rest[1]
            if best is None or (squares, nbytes) < best[:2]:
                best = squares, nbytes, end
        return best


MOST_IDEALS = 1000
Edge = tuple[int, int]


def ideals(num_units: int, edges: Iterable[Edge], most: int = MOST_IDEALS) -> list[int] | None:
    """Every ideal as a mask of units, the smaller before the larger; None where there are more than ``most``.

    ``edges``: pairs of a unit and one that reads from it, which comes after it.
    """
    needs = [0] * num_units
    for source, reader in edges:
        needs[reader] |= 1 << source
    latest, found = {0}, [0]
    for _ in range(num_units):
        latest = {
            mask | 1 << unit
            for mask in latest
            for unit in range(num_units)
            if not mask >> unit & 1 and needs[unit] & ~mask == 0
        }
        found += sorted(latest)
        if len(found) > most:
            return None
    return found


def walk(
    masks: Sequence[int],
    num_stages: int,
    load: Callable[[int, int, int], int | None],
    behind: Sequence[int],
    received: Callable[[int, int], int] = lambda start, end: 0,
    rises: bool = True,
) -> Walk:
    """The walk through ideals; ``behind`` is what each weighs, and ``rises`` says that loads go with it."""
    order = sorted(range(1, len(masks)), key=lambda i: (behind[i], i))
    after = [[i for i in order if masks[i] != mask and masks[i] & mask == mask] for mask in masks]
    return Walk(num_stages, len(masks) - 1, after.__getitem__, load, received, rises)


def stages_after(masks: Sequence[int], num_units: int) -> tuple[int, ...]:
    """The stage of each unit, given what is done after each stage but the last."""
    return tuple(sum(not mask >> unit & 1 for mask in masks) for unit in range(num_units))


@dataclass(frozen=True, slots=True)
class Split:
    """The stage of each unit, and what the heaviest stage, or rank with several, weighs: ``heaviest``.

    No split that was looked for is lighter than ``bound``; ``is_exact``: none is lighter than this one.
    """

    stages: tuple[int, ...]
    heaviest: Any
    bound: Any

    @property
    def is_exact(self) -> bool:
        """Whether the bound is met."""
        return bool(self.heaviest == self.bound)


def stages_between(cuts: Sequence[int], num_units: int) -> tuple[int, ...]:
    """The stage of each unit of a chain, cut at these indices."""
    return tuple(sum(unit >= cut for cut in cuts) for unit in range(num_units))
