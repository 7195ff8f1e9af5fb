"""The cut of a chain into stages: exact, most even, fewest bytes, first; with weights of any kind."""

import json
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from shardc import ShardingError, balance

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


def test_what_is_sent_is_counted_for_each_stage_that_it_comes_to() -> None:
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
def test_what_cannot_be_cut_is_refused(weights: list[Any], num_stages: int, said: str) -> None:
    with pytest.raises(ShardingError, match=said):
        balance(weights, num_stages)


def test_more_forced_cuts_than_stages_have_are_refused() -> None:
    with pytest.raises(ShardingError, match="2 stages have 1 cuts"):
        balance([1, 2, 3], 2, forced=(1, 2))
    with pytest.raises(ShardingError, match="from 1 to 2"):
        balance([1, 2, 3], 2, forced=(3,))
