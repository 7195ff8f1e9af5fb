"""Numbers that follow from sizes: what is computed with them is, at other sizes, what plain numbers give there."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc.capture.values.region import Region
from shardc.capture.values.symbols import value_at
from shardc.language.sharding import TensorType, ceil_div
from shardc.language.size import Ratio, Size, common_divisor, plain, slice_bounds

HERE, SIZES = (12, 40), st.tuples(st.integers(2, 90), st.integers(2, 90))


def two_sizes() -> tuple[Region, list[Any]]:
    region = Region({("x", 0): "s0", ("x", 1): "s1"})
    return region, list(region.type("x", TensorType((*HERE, 3), torch.float32)).shape[:2])


def values(region: Region, sizes: tuple[int, int]) -> Any:
    return region.values({"x": TensorType((*sizes, 3), torch.float32)})


EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sums and products": lambda a, b: 3 * a + b * a - 2,
    "reflected": lambda a, b: 7 - a + 3 * b + (100 - b) * 2,
    "floors": lambda a, b: (a * b) // 8 + b // a + 100 // a,
    "ceilings": lambda a, b: ceil_div(a, 4) + ceil_div(b + 1, 2),
    "remainders": lambda a, b: a % 4 + -b % 8 + 91 % a,
    "ratios": lambda a, b: 1 / a + a / b + b * 0.5 + (a / b) / 3.0 + 2.0 * (a / b),
    "powers": lambda a, b: a**2 + b**0.5,
    "all of many": lambda a, b: math.prod([2, a, b]) + sum([1, a, b]),
    "differences": lambda a, b: abs(a - b) - (-a),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@given(sizes=SIZES)
def test_arithmetic(name: str, sizes: tuple[int, int]) -> None:
    region, symbols = two_sizes()
    found = EXPRESSIONS[name](*symbols)
    assert isinstance(found, (Size, Ratio))
    for here in (HERE, sizes):
        at = values(region, here)
        if at is not None:  # torch guards what it simplifies
            assert value_at(found, at) == pytest.approx(EXPRESSIONS[name](*here), rel=1e-12)
            assert type(value_at(found, at)) is (int if isinstance(found, Size) else float)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
@given(sizes=SIZES, number=st.integers(0, 60))
def test_what_is_compared_comes_out_the_same_in_the_region(compare: Any, sizes: tuple[int, int], number: int) -> None:
    region, (a, b) = two_sizes()
    found = compare(a * 2, number), compare(number, b), compare(a + b, b * 2), max(a, number) > b, bool(a - b)
    if values(region, sizes) is not None:
        a, b = sizes
        assert found == (compare(a * 2, number), compare(number, b), compare(a + b, b * 2), max(a, number) > b, a != b)
    assert values(region, HERE) is not None


@given(
    start=st.none() | st.integers(-50, 50), end=st.none() | st.integers(-50, 50) | st.just(2**63 - 1),
    step=st.none() | st.integers(1, 5), sizes=SIZES,
)  # fmt: skip
def test_bounds_of_a_slice(start: int | None, end: int | None, step: int | None, sizes: tuple[int, int]) -> None:
    assert slice_bounds(start, end, step, sizes[0]) == slice(start, end, step).indices(sizes[0])
    region, (size, _) = two_sizes()
    found, at = slice_bounds(start, end, step, size), values(region, sizes)
    if at is not None:
        assert tuple(value_at(each, at) for each in found) == slice(start, end, step).indices(sizes[0])


@given(sizes=SIZES, factors=st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_a_common_divisor_divides_wherever_it_is_used(sizes: tuple[int, int], factors: tuple[int, int]) -> None:
    region, (a, b) = two_sizes()
    one, other = factors[0] * a * b, factors[1] * b
    found, at = common_divisor(one, other), values(region, sizes)
    assert at is not None and value_at(found, at) == math.gcd(*factors) * sizes[1]
    assert common_divisor(*sizes) == math.gcd(*sizes)


def test_sizes_are_told_from_numbers_and_from_sizes_of_another_region() -> None:
    (_, (a, _)), (_, (other, _)) = two_sizes(), two_sizes()
    table = {a: "a", HERE[0]: "a number"}
    assert table[a] == "a" and table[HERE[0]] == "a number" and other not in table and a != other
    assert plain(a) == HERE[0] and type(plain(a)) is int and str(a + 1) != str(HERE[0] + 1)


def test_other_dims_and_sizes_below_two_are_in_no_region() -> None:
    region, _ = two_sizes()
    types = {sizes: TensorType(sizes, torch.float32) for sizes in ((5, 7, 3), (5, 7, 4), (1, 7, 3), (5, 0, 3))}
    assert [region.values({"x": each}) is not None for each in types.values()] == [True, False, False, False]
