"""Blocks of global tensors: those of all ranks cover a tensor, and are those that torch and shardc cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardc import Mesh
from shardc.language.mesh import AxisPart
from shardc.language.sharding import DimSharding, Sharding
from shardc.runtime.checkpoint.region import Block, Cut, Layout, choose_writers, is_covered
from shardc.runtime.checkpoint.state import block_of
from shardc.runtime.comm.dtensor import placements, shard


def layouts(grid: tuple[int, ...], cuts: tuple[Cut | None, ...]) -> list[Layout]:
    ranks = tuple(range(math.prod(grid)))
    return [Layout(ranks, grid, cuts, position) for position in ranks]


@st.composite
def cases(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Cut | None, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1) if shape else st.nothing()
    cut = st.one_of(st.none(), st.builds(Cut, dims, st.integers(1, 3))) if shape else st.none()
    return shape, grid, tuple(draw(cut) for _ in grid)


def torchs_part(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    for cut, count, index in zip(layout.cuts, layout.shape, layout.coordinates(layout.position), strict=True):
        if cut is not None:
            placement = Shard(cut.dim) if cut.stretches == 1 else _StridedShard(cut.dim, split_factor=cut.stretches)
            if cut.stretches > 1 and whole.shape[cut.dim] < cut.stretches:
                return whole.new_empty(0)  # torch cannot cut it
            whole = placement._split_tensor(whole, count, with_padding=False)[0][index]
    return whole


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@given(cases())
def test_the_blocks_of_a_rank_are_what_torch_gives_it(case: Any) -> None:
    shape, grid, cuts = case
    whole = numbered(shape)
    for layout in layouts(grid, cuts):
        part = torchs_part(whole, layout)
        blocks = [each for each in layout.blocks(shape) if each.block.numel]
        assert sum(each.block.numel for each in blocks) >= part.numel()
        for each in blocks if part.numel() else ():
            here = block_of(part, each.offsets, each.block.sizes)
            assert torch.equal(here, block_of(whole, each.block.offsets, each.block.sizes))


@given(cases())
def test_the_blocks_that_are_written_cover_the_tensor_once(case: Any) -> None:
    shape, grid, cuts = case
    written = [
        stored.block
        for layout in layouts(grid, cuts)
        if choose_writers({"x": (layout, 1)})
        for stored in layout.blocks(shape)
        if stored.block.numel
    ]
    assert is_covered(shape, written)


@given(cases(), cases())
def test_any_layout_is_read_from_any_other(one: Any, other: Any) -> None:
    (shape, grid, cuts), (_, other_grid, other_cuts) = one, other
    other_cuts = tuple(None if cut is None or cut.dim >= len(shape) else cut for cut in other_cuts)
    whole = numbered(shape)
    written = {
        stored.block: block_of(whole, stored.block.offsets, stored.block.sizes)
        for layout in layouts(grid, cuts)
        for stored in layout.blocks(shape)
    }
    for layout in layouts(other_grid, other_cuts):
        for stored in layout.blocks(shape):
            value = torch.full(stored.block.sizes, -1)
            for block, piece in written.items():
                if (common := stored.block.meet(block)) is not None:
                    source = block_of(piece, common.within(block), common.sizes)
                    block_of(value, common.within(stored.block), common.sizes).copy_(source)
            assert torch.equal(value, block_of(whole, stored.block.offsets, stored.block.sizes))


MESH = Mesh(a=2, b=3)
A, B = AxisPart("a", 1, 2), AxisPart("b", 1, 3)
SHARDINGS = {
    "even": ((12, 5), (DimSharding((A, B)), DimSharding())),
    "blocks": ((18, 5), (DimSharding((), ((6, (A,)),)), DimSharding())),
    "blocks in the second dim": ((4, 18), (DimSharding((B,)), DimSharding((), ((6, (A,)),)))),
    "uneven": ((7, 5), (DimSharding((A,)), DimSharding((B,)))),
    "minor axis first": ((12,), (DimSharding((B, A)),)),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_layout_made_of_placements_is_the_sharding(name: str) -> None:
    shape, dims = SHARDINGS[name]
    sharding, whole = Sharding(MESH, dims), numbered(shape)
    placed = placements(sharding, shape)
    cuts = tuple(Cut(each.dim, getattr(each, "split_factor", 1)) if hasattr(each, "dim") else None for each in placed)
    for layout in layouts(MESH.shape, cuts):
        part, count = shard(whole, sharding, layout.position), 0
        for each in layout.blocks(shape):
            count += each.block.numel
            here = block_of(part, each.offsets, each.block.sizes)
            assert torch.equal(here, block_of(whole, each.block.offsets, each.block.sizes))
        assert count == part.numel()


def test_replicas_share_the_bytes_evenly() -> None:
    whole, cut = (None, None), (None, Cut(0))
    sizes = {"big": (whole, 100), **{f"small{i}": (whole, 25) for i in range(4)}, "cut": (cut, 40), "cut2": (cut, 40)}
    written = []
    for position in range(4):
        own = choose_writers(
            {key: (Layout((0, 1, 2, 3), (2, 2), cuts, position), n) for key, (cuts, n) in sizes.items()}
        )
        written.append(sum(sizes[key][1] for key in own))
    assert sum(written) == 100 + 4 * 25 + 2 * 2 * 40 and max(written) <= 105, written


@pytest.mark.parametrize("blocks", [
    [Block((0, 0), (4, 5))],
    [Block((0, 0), (4, 6)), Block((0, 0), (0, 6))],
    [Block((0, 0), (2, 6)), Block((2, 0), (2, 3)), Block((2, 3), (2, 3))],
    [Block((0, 0), (2, 6)), Block((0, 0), (2, 6))],
    [Block((0, 0), (2, 6)), Block((1, 0), (2, 6))],
    [Block((0, 1), (4, 6))],
    [],
])  # fmt: skip
def test_gaps_and_overlaps_are_seen(blocks: list[Block]) -> None:
    seen = torch.zeros(5, 8)
    for block in blocks:
        block_of(seen, block.offsets, block.sizes).add_(1)
    is_right = bool((seen[:4, :6] == 1).all()) and int(seen.sum()) == 24
    assert is_covered((4, 6), blocks) == is_right


def test_blocks_of_too_many_cells_are_refused() -> None:
    blocks = [Block((i, i), (1, 1)) for i in range(3000)] + [Block((0, 0), (3000, 2999))]
    with pytest.raises(ValueError, match="more than 4194304 cells"):
        is_covered((3000, 3000), blocks)
