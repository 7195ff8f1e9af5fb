"""Balancing stages: cuts of a chain are optimal, also with several stages a rank, memory caps and graphs of units."""

import json
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest

from shardc import ShardingError, balance
from shardc.costs.stages.choose import SplitOptions, side_by_side, split_units
from shardc.costs.stages.units import StageLoads
from shardc.schedules.balance import RankLoads, Split, balance_ranks

CASES = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "stage_split_cases.json").read_text())["cases"]
}
Cuts = tuple[int, ...]


def cases(kind: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(c, id=name) for name, c in CASES.items() if c["kind"] == kind])


def sums(weights: Sequence[Any], cuts: Sequence[int]) -> list[Any]:
    ends = [0, *cuts, len(weights)]
    return [sum(weights[start:end]) for start, end in pairwise(ends)]


def every_cut(num_units: int, num_stages: int) -> Iterator[Cuts]:
    return combinations(range(1, num_units), num_stages - 1)


def brute_force(weights: Sequence[Any], num_stages: int, nbytes: Sequence[int] | None = None) -> Cuts:
    """The best of all cuts, in the order of the first."""

    def cost(cuts: Cuts) -> tuple[Any, ...]:
        loads = sums(weights, cuts)
        return max(loads), sum(load * load for load in loads), sum(nbytes[cut] for cut in cuts) if nbytes else 0, cuts

    return min(every_cut(len(weights), num_stages), key=cost)


@cases("contiguous_min_max_params")
def test_the_heaviest_stage_of_a_known_model_is_the_lightest_there_is(case: dict[str, Any]) -> None:
    cuts = balance(case["unit_params"], case["stages"])
    assert max(sums(case["unit_params"], cuts)) == case["optimal_max"]
    assert cuts == tuple(case["optimal_cuts_example"])


def test_random_lists_are_cut_as_trying_every_cut_would() -> None:
    generator = random.Random(5)
    for number in range(2000):
        num_units = generator.randint(1, 11)
        num_stages = generator.randint(1, min(num_units, 6))
        largest = generator.choice((1, 3, 10, 10**6, 10**13))
        weights = [generator.randint(0, largest) for _ in range(num_units)]
        nbytes = [generator.randint(0, 3) for _ in range(num_units)]
        received = nbytes if number % 2 else None
        assert balance(weights, num_stages, received=received) == brute_force(weights, num_stages, received), weights


def test_forced_cuts_are_kept_and_the_others_are_the_best() -> None:
    generator = random.Random(6)
    for _ in range(300):
        num_units = generator.randint(2, 10)
        num_stages = generator.randint(2, num_units)
        weights = [generator.randint(0, 9) for _ in range(num_units)]
        forced = generator.sample(range(1, num_units), generator.randint(0, num_stages - 1))
        allowed = [cuts for cuts in every_cut(num_units, num_stages) if set(forced) <= set(cuts)]
        best = min(allowed, key=lambda cuts: (max(sums(weights, cuts)), sum(s * s for s in sums(weights, cuts)), cuts))
        assert balance(weights, num_stages, forced=forced) == best


def test_floats_are_compared_without_rounding() -> None:
    assert balance([0.1] * 12, 5) == balance([1] * 12, 5)
    weights = [2.0**60, 1.0, 1.0, 2.0**60]  # in floats 2**60 + 1 is 2**60
    assert balance(weights, 2) == (2,) and balance([Fraction(1, 3)] * 3, 3) == (1, 2)
    assert balance([2.0**60, 1.0, 2.0**60], 2) == balance([2**60, 1, 2**60], 2)


def test_a_value_read_by_several_stages_is_counted_once_a_stage() -> None:
    sent = {2: 5, 3: 1}  # bytes of a cut before units 2 and 3, both equally even
    assert balance([1, 1, 0, 1, 1], 2, received=lambda start, end: sent.get(start, 9)) == (3,)


@pytest.mark.parametrize(
    ("weights", "num_stages", "said"),
    [
        ([1, 2], 3, "every stage holds at least one unit"),
        ([1, 2], 0, "at least one stage"),
        ([1, -2], 2, "one is negative"),
        ([1, float("nan")], 2, "not all finite"),
        ([1, float("inf")], 2, "not all finite"),
        ([1, "x"], 2, "not all finite"),
        ([], 1, "every stage holds at least one unit"),
    ],
)
def test_impossible_requests_for_a_cut_are_refused(weights: list[Any], num_stages: int, said: str) -> None:
    with pytest.raises(ShardingError, match=said):
        balance(weights, num_stages)


def test_more_forced_cuts_than_stages_have_are_refused() -> None:
    with pytest.raises(ShardingError, match="2 stages have 1 cuts"):
        balance([1, 2, 3], 2, forced=(1, 2))
    with pytest.raises(ShardingError, match="from 1 to 2"):
        balance([1, 2, 3], 2, forced=(3,))


# More than a chain on as many ranks as stages.


class Given(StageLoads):
    """Units of which all that is asked is given: their time, and what they hold and save."""

    def __init__(
        self,
        times: Sequence[int],
        edges: Sequence[tuple[int, int]],
        parameters: Sequence[int] = (),
        activations: Sequence[int] = (),
        microbatches: int = 1,
    ) -> None:
        super().__init__(None, (None,) * len(times), microbatches)  # type: ignore[arg-type]
        self.__dict__ |= {"times": times, "edges": set(edges), "held_by": parameters, "saved_by": activations}

    def unit_weights(self, balance: str) -> list[int]:
        return list(self.times)

    def received_bytes(self, stage: int) -> int:
        return 0

    def memory(self, stage: int, in_flight: int) -> int:
        assert self.microbatches is not None
        units = [i for i in range(len(self.units)) if stage >> i & 1]
        held, saved = (sum(its[i] for i in units) for its in (self.held_by, self.saved_by))
        return 16 * held + min(self.microbatches, in_flight) * saved


def cuts_of(split: Split) -> tuple[int, ...]:
    """Of units in their order."""
    return tuple(i for i, (a, b) in enumerate(pairwise(split.stages), 1) if a != b)


# Several stages a rank.


def placement(kind: str, num_ranks: int) -> tuple[int, ...]:
    ranks = tuple(range(num_ranks))
    return {"one": ranks, "V": ranks + ranks[::-1], "loop": ranks + ranks, "thrice": ranks * 3}[kind]


@cases("two_stages_per_rank_min_max_rank_params")
def test_a_tied_embedding_counts_once_on_the_rank_that_holds_both_ends(case: dict[str, Any]) -> None:
    weights, tied, ranks = list(case["unit_params"]), case["tied_copy"], case["ranks"]
    weights[0] -= tied
    shared = [(tied, (0, len(weights) - 1))]
    found = balance_ranks(weights, placement("V", ranks), shared=shared)
    assert found.is_exact and found.heaviest == case["optimal_max"]
    assert cuts_of(found) == tuple(case["optimal_cuts_example"])
    looped = balance_ranks(weights, placement("loop", ranks), shared=shared)
    assert looped.is_exact and looped.heaviest == {2: 81_911_040, 4: 46_471_680}[ranks]


@pytest.mark.parametrize(("kind", "num_ranks"), [("one", 3), ("V", 1), ("V", 2), ("V", 3), ("loop", 2), ("loop", 3)])
def test_random_lists_on_ranks_are_cut_as_trying_every_cut_would(kind: str, num_ranks: int) -> None:
    generator, place = random.Random(num_ranks), placement(kind, num_ranks)
    for _ in range(60):
        num_units = generator.randint(len(place), len(place) + 4)
        weights = [generator.randint(0, generator.choice((3, 100))) for _ in range(num_units)]
        shared = [
            (generator.randint(0, 50), generator.sample(range(num_units), 2)) for _ in range(generator.randint(0, 2))
        ]
        loads = RankLoads(weights, shared)

        def cost(cuts: Sequence[int], loads: RankLoads = loads) -> tuple[Any, ...]:
            each = loads.all(cuts, place)
            return max(each), sum(load * load for load in each)

        found = balance_ranks(weights, place, shared=shared)
        best = min(every_cut(num_units, len(place)), key=cost)
        assert found.is_exact and found.heaviest == cost(best)[0] and cost(cuts_of(found)) == cost(best)


def test_a_cut_that_is_not_proven_best_reports_how_far_from_the_best_it_can_be() -> None:
    weights, place = [5, 1, 1, 1, 4, 2, 2, 3], placement("thrice", 2)
    found, loads = balance_ranks(weights, place), RankLoads(weights, ())
    least = min(max(loads.all(cuts, place)) for cuts in every_cut(8, 6))
    assert found.bound == 9.5 <= least <= found.heaviest == max(loads.all(cuts_of(found), place)) <= 1.1 * least
    assert not found.is_exact


def test_ranks_with_different_numbers_of_stages_are_refused() -> None:
    with pytest.raises(ShardingError, match="equally many stages"):
        balance_ranks([1] * 8, (0, 1, 1))
    with pytest.raises(ShardingError, match="count from 0"):
        balance_ranks([1] * 8, (1, 2))


# Memory.


def memory(parameters: Sequence[int], activations: Sequence[int], cuts: Sequence[int], microbatches: int) -> int:
    held, saved = sums(parameters, cuts), sums(activations, cuts)
    each = (16 * p + min(microbatches, len(held) - s) * a for s, (p, a) in enumerate(zip(held, saved, strict=True)))
    return max(each)


def fitting_cuts(
    times: Sequence[int], parameters: Sequence[int], activations: Sequence[int], stages: int, microbatches: int,
    cap: int,
) -> tuple[int, ...]:  # fmt: skip
    given = Given(times, list(pairwise(range(len(times)))), parameters, activations, microbatches)
    _, found = split_units(given, given, SplitOptions(stages, "time", microbatches=microbatches, max_memory=cap))
    return cuts_of(found)


@cases("1f1b_min_max_time_under_memory_cap")
def test_the_slowest_stage_that_fits_is_the_fastest_there_is(case: dict[str, Any]) -> None:
    given = case["unit_time"], case["unit_params"], case["unit_activation_bytes"]
    cuts = fitting_cuts(*given, case["stages"], case["microbatches"], case["memory_cap_bytes"])
    assert max(sums(case["unit_time"], cuts)) == case["optimal"]["max_time"] and list(cuts) == case["optimal"]["cuts"]
    assert memory(*given[1:], cuts, case["microbatches"]) <= case["memory_cap_bytes"]


def test_random_memory_caps_are_met_like_brute_force_or_refused_with_the_missing_bytes() -> None:
    generator = random.Random(7)
    outcomes = set()
    for _ in range(400):
        num_units = generator.randint(2, 9)
        num_stages = generator.randint(1, min(num_units, 5))
        times, parameters, activations = ([generator.randint(0, 20) for _ in range(num_units)] for _ in range(3))
        microbatches, cap = generator.randint(1, 6), generator.randint(200, 1500)
        every = {cuts: memory(parameters, activations, cuts, microbatches) for cuts in every_cut(num_units, num_stages)}
        fitting = [cuts for cuts, most in every.items() if most <= cap]
        call = (times, parameters, activations, num_stages, microbatches, cap)
        outcomes.add(bool(fitting))
        if fitting:
            found = fitting_cuts(*call)
            best = min(fitting, key=lambda cuts: (max(sums(times, cuts)), sum(t * t for t in sums(times, cuts)), cuts))
            assert found == best
        else:
            with pytest.raises(ShardingError, match=f"{min(every.values()) - cap} more"):
                fitting_cuts(*call)
    assert outcomes == {True, False}


# Graphs.


@cases("dag_monotone_min_max_params")
def test_two_towers_are_cut_across_each_other(case: dict[str, Any]) -> None:
    given = Given(case["unit_params"], [(a, b) for a, b in case["edges"]])
    _, found = split_units(given, given, SplitOptions(case["stages"], "time"))
    assert found.is_exact and found.heaviest == case["optimal_max"] < case["contiguous_in_listed_order_max"]
    assert all(found.stages[source] <= found.stages[reader] for source, reader in case["edges"])


def test_random_graphs_are_cut_as_trying_every_assignment_would() -> None:
    generator = random.Random(8)
    for _ in range(150):
        num_units, num_stages = generator.randint(3, 7), generator.randint(1, 3)
        edges = [edge for edge in combinations(range(num_units), 2) if generator.random() < 0.3]
        weights = [generator.randint(0, 20) for _ in range(num_units)]

        def loads(stages: Sequence[int], weights: Sequence[int] = weights, count: int = num_stages) -> list[int]:
            return [sum(w for w, its in zip(weights, stages, strict=True) if its == s) for s in range(count)]

        every = [
            stages
            for stages in product(range(num_stages), repeat=num_units)
            if len(set(stages)) == num_stages and all(stages[a] <= stages[b] for a, b in edges)
        ]
        search = side_by_side(Given(weights, edges), SplitOptions(num_stages, "time"))
        found = search and search.best()
        best = min((max(loads(stages)), sum(load * load for load in loads(stages))) for stages in every)
        assert found and found.stages in every and found.is_exact
        assert (found.heaviest, sum(load * load for load in loads(found.stages))) == best


def test_a_graph_of_too_many_ideals_is_cut_in_order_with_a_bound() -> None:
    towers = [range(tower * 20, tower * 20 + 20) for tower in range(4)]
    edges = [edge for tower in towers for edge in pairwise(tower)] + [(tower[-1], 80) for tower in towers]
    weights = [7, *[3] * 39, *[5] * 40, 1]
    given, options = Given(weights, edges), SplitOptions(4, "time")
    assert side_by_side(given, options) is None
    _, found = split_units(given, given, options)
    assert all(found.stages[source] <= found.stages[reader] for source, reader in edges)
    assert found.bound == sum(weights) / 4 <= found.heaviest <= 1.05 * found.bound
    assert cuts_of(found) == balance(weights, 4)


@cases("min_max_params_then_cut_bytes")
def test_among_equally_even_cuts_the_one_that_sends_fewest_bytes_wins(case: dict[str, Any]) -> None:
    readers: dict[tuple[int, int], list[int]] = {}
    for source, reader, nbytes in case["edges"]:
        readers.setdefault((source, nbytes), []).append(reader)

    def received(start: int, end: int) -> int:
        comes = ((source < start and any(start <= r < end for r in its), n) for (source, n), its in readers.items())
        return sum(nbytes for is_sent, nbytes in comes if is_sent)

    cuts = balance(case["unit_params"], case["stages"], received=received)
    ends = [0, *cuts, len(case["unit_params"])]
    optimal = case["optimal"]
    assert max(sums(case["unit_params"], cuts)) == optimal["max_params"] and list(cuts) == optimal["cuts"]
    assert sum(received(*run) for run in pairwise(ends)) == optimal["cut_bytes"]
