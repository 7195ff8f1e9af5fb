"""Masks that are made tile by tile: what is inferred of a tile is what its elements say."""

from __future__ import annotations

from dataclasses import astuple
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardc.ops.attention.mask import CONSTANTS, INTERVALS, REFERENCE, Leaf, Mask, Step
from shardc.ops.attention.ring import Ring
from shardc.ops.zigzag import in_zigzag

LEAVES = (Leaf("row", 0), Leaf("column", 0), Leaf("row", -3), Leaf("column", None, is_bool=True))
CAUSAL, WINDOW, KEPT = ("ge.Tensor", 0, 1), ("gt.Tensor", 1, 2), 3
INF = float("inf")


def refer(index: int) -> tuple[str, int]:
    return REFERENCE, index


def made(*calls: tuple[Any, ...], leaves: tuple[Leaf, ...] = LEAVES) -> Mask:
    """A mask of calls, whose arguments are indices of values before, numbers if they are floats, or a dtype."""

    def step(op: str, *args: Any) -> Step:
        kwargs = tuple(("dtype", arg) for arg in args if isinstance(arg, torch.dtype))
        given = (arg for arg in args if not isinstance(arg, torch.dtype))
        return Step(op, tuple(refer(arg) if isinstance(arg, int) else arg for arg in given), kwargs)

    return Mask(leaves, tuple(step(*call) for call in calls))


def scores(seen: int) -> tuple[Any, ...]:
    """The calls that make scores of what is seen, the value at an index, once that is the last one."""
    return (("scalar_tensor.default", 0.0), ("scalar_tensor.default", -INF), ("where.self", seen, seen + 1, seen + 2))


MASKS = {
    "causal": made(CAUSAL, *scores(4)),
    "swapped": made(("le.Tensor", 1, 0), *scores(4)),
    "window": made(CAUSAL, WINDOW, ("bitwise_and.Tensor", 4, 5), *scores(6)),
    "padded": made(CAUSAL, ("logical_and.default", 4, KEPT), *scores(5)),
    "either": made(CAUSAL, ("logical_or.default", 4, KEPT), *scores(5)),
    "not": made(("lt.Tensor", 0, 1), ("bitwise_not.default", 4), *scores(5)),
    "same": made(("eq.Tensor", 0, 1), *scores(4)),
    "other": made(CAUSAL, ("ne.Tensor", 0, 1), ("bitwise_or.Tensor", 4, 5), ("logical_not.default", 6), *scores(7)),
    "documents": made(CAUSAL, ("eq.Tensor", 1, KEPT), ("bitwise_and.Tensor", 4, 5), *scores(6)),
    "near": made(("sub.Tensor", 0, 1), ("abs.default", 4), ("lt.Scalar", 5, 3.0), *scores(6)),
    "cast": made(CAUSAL, ("_to_copy.default", 4, torch.float32), ("_to_copy.default", 5, torch.bool), *scores(6)),
    "distance": made(("sub.Tensor", 0, 1), ("lt.Scalar", 4, 3.0), ("ge.Scalar", 4, 0.0), ("bitwise_and.Tensor", 5, 6),
                     *scores(7)),
    "filled": made(("lt.Tensor", 0, 1), ("scalar_tensor.default", 0.0), ("masked_fill.Scalar", 5, 4, -INF)),
}  # fmt: skip


def leaves_of(rows: range, columns: range, kept: torch.Tensor) -> list[torch.Tensor]:
    row, column = torch.arange(rows.start, rows.stop), torch.arange(columns.start, columns.stop)
    return [row.view(-1, 1), column.view(1, -1), row.view(-1, 1) - 3, kept[columns.start : columns.stop].view(1, -1)]


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=60)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(0, 9), st.integers(1, 5), st.integers(0, 2**15))
def test_what_is_inferred_of_a_tile_holds(
    name: str, first: int, num_rows: int, start: int, num_columns: int, bits: int
) -> None:
    rows, columns = range(first, first + num_rows), range(start, start + num_columns)
    kept = torch.tensor([bool(bits >> i & 1) for i in range(15)])
    mask = MASKS[name]
    tile = mask.make(leaves_of(rows, columns, kept)).expand(num_rows, num_columns)
    shows = mask.shows(rows, columns)
    assert shows is None or torch.equal(tile, torch.full_like(tile, 0.0 if shows else -INF))
    is_one = num_rows == num_columns == 1 and name not in ("padded", "either", "documents")
    assert shows is not None or not is_one  # of a single pair of positions all is known


def test_every_op_of_which_something_is_inferred_is_tried() -> None:
    tried = {step.op.partition(".")[0] for mask in MASKS.values() for step in mask.steps}
    assert set(INTERVALS) - tried == {"add", "full"}
    assert all(name.partition(".")[0] in INTERVALS for name in CONSTANTS)


@pytest.mark.parametrize(("window", "steps"), [(1, 0), (2, 1), (5, 1), (6, 2), (13, 3), (64, 3)])
def test_keys_travel_as_far_as_a_window_reaches(window: int, steps: int) -> None:
    leaves = (Leaf("row", 0), Leaf("column", 0), Leaf("row", -window), Leaf("column", None, is_bool=True))
    mask = made(CAUSAL, WINDOW, ("bitwise_and.Tensor", 4, 5), *scores(6), leaves=leaves)
    assert Ring("flash_attention_for_cpu", 4, 16, 16, False, None, made_by=astuple(mask)).steps == steps


@pytest.mark.parametrize(
    ("window", "distances"),
    [(1, []), (2, [1, -1]), (9, [1, -1]), (10, [1, 2, -1, -2]), (11, [1, 2, 3]), (64, [1, 2, 3])],
)
def test_keys_go_both_ways_where_that_sends_fewer_rows(window: int, distances: list[int]) -> None:
    """Of chunks of 8 rows; with windows of more than 10 positions all rows of the three others."""
    near = made(("sub.Tensor", 0, 1), ("abs.default", 4), ("lt.Scalar", 5, float(window)), *scores(6))
    ring = Ring("flash_attention_for_cpu", 4, 32, 32, False, None, made_by=astuple(near))
    assert [hop.distance for hop in ring.hops] == [0, *distances]
    assert sum(len(hop.rows) for hop in ring.hops[1:]) == (2 * (window - 1) if window < 11 else 24)


@settings(max_examples=200)
@given(
    st.integers(2, 5), st.integers(1, 24), st.integers(-2, 8), st.integers(-2, 8), st.integers(0, 2), st.booleans()
)  # fmt: skip
@example(4, 24, -1, 7, 2, False)
def test_steps_both_ways_show_each_query_what_it_sees_once(
    count: int, length: int, before: int, behind: int, first: int, is_zigzag: bool
) -> None:
    """A band of positions, and the first few of all."""
    band = ("sub.Tensor", 0, 1), ("le.Scalar", 4, float(before)), ("ge.Scalar", 4, float(-behind))
    both = ("bitwise_and.Tensor", 5, 6), ("lt.Scalar", 1, float(first)), ("bitwise_or.Tensor", 7, 8)
    mask = made(*band, *both, *scores(9))
    ring = Ring("tiled", count, length, length, False, None, made_by=astuple(mask), in_zigzag=(is_zigzag, is_zigzag))
    stretches = in_zigzag(length, count) if is_zigzag else [range(length)]
    positions = torch.tensor([i for stretch in stretches for i in stretch]).split(-(-length // count))
    far = torch.arange(length).view(-1, 1) - torch.arange(length)
    wanted = ((far <= before) & (far >= -behind)) | (torch.arange(length) < first)
    seen = torch.zeros(length, length)
    for (index, own), hop in product(enumerate(positions), ring.hops):
        source = ring.source(index, hop)
        for tile in ring.tiles(index, source, hop.rows):
            rows, columns = own[tile.rows].unsqueeze(1), positions[source][hop.rows.start : hop.rows.stop][tile.columns]
            seen[rows, columns] += wanted[rows, columns] if tile.is_masked else 1.0
    assert torch.equal(seen, wanted.float())
