"""Blocks of a global tensor: those that a rank stores, the rank that writes one, and the overlap of two."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product

from shardc.language.sharding import ceil_div

from .file import FormatError

Run = tuple[int, int]  # consecutive indices of a dim: the first index, and their number
Shape = tuple[int, ...]
MOST_CELLS = 2**22  # of the grid that the edges of a tensor's blocks make, when the blocks are checked


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a dim by one axis of a mesh: each of ``stretches`` parts of the dim is cut into chunks."""

    dim: int
    stretches: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor on a grid of ranks: for each axis of the grid the cut, or None if it replicates.

    ``ranks``: numbers in the job, row-major over the axes. ``shape``: that of the grid. ``position``: this rank's.
    """

    ranks: tuple[int, ...]
    shape: Shape
    cuts: tuple[Cut | None, ...]
    position: int

    def coordinates(self, position: int) -> Shape:
        """The coordinates of a position of the grid."""
        strides = list(accumulate(reversed(self.shape[1:]), int.__mul__, initial=1))[::-1]
        return tuple(position // stride % size for stride, size in zip(strides, self.shape, strict=True))

    def groups(self) -> list[list[int]]:
        """For every part of the tensor, the positions that hold it."""
        return _groups(self.shape, tuple(cut is None for cut in self.cuts))

    def blocks(self, shape: Shape) -> tuple[StoredBlock, ...]:
        """The blocks that this rank stores of a tensor of global ``shape``; empty ones are left out."""
        return _stored_blocks(shape, self.shape, self.cuts, self.coordinates(self.position))


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a global tensor: for each dim its first index and its size."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def meet(self, other: Block) -> Block | None:
        """The block that both have in common; None if there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Block(starts, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> Shape:
        """For each dim the index after the last one."""
        return tuple(map(int.__add__, self.offsets, self.sizes))

    def within(self, outer: Block) -> Shape:
        """The offsets of this block in a block around it."""
        return tuple(map(int.__sub__, self.offsets, outer.offsets))

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offsets, self.ends, strict=True))}]"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a global tensor that begins at ``offsets`` in the tensor that a rank stores."""

    block: Block
    offsets: Shape


@lru_cache(maxsize=4096)
def _stored_blocks(
    shape: Shape, grid: Shape, cuts: tuple[Cut | None, ...], coordinates: Shape
) -> tuple[StoredBlock, ...]:
    rows: list[list[Run]] = [[(0, size)] for size in shape]
    for cut, count, index in zip(cuts, grid, coordinates, strict=True):
        if cut is not None:
            stretches = (chunk(rows[cut.dim], cut.stretches, i) for i in range(cut.stretches))
            rows[cut.dim] = _joined(run for stretch in stretches for run in chunk(stretch, count, index))
    places = [list(accumulate((length for _, length in row), initial=0))[:-1] for row in rows]
    pairs = product(*(list(zip(row, place, strict=True)) for row, place in zip(rows, places, strict=True)))
    blocks = []
    for each in pairs:
        block = Block(tuple(start for (start, _), _ in each), tuple(length for (_, length), _ in each))
        blocks.append(StoredBlock(block, tuple(place for _, place in each)))
    return tuple(blocks)


def chunk(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """Chunk ``index`` of the ``count`` chunks into which ``torch.chunk`` cuts these runs; the last may be empty."""
    size = ceil_div(sum(length for _, length in runs), count)
    first, last = size * index, size * (index + 1)
    found: list[Run] = []
    for start, length in runs:
        begin, end = max(first, 0), min(last, length)
        if begin < end:
            found.append((start + begin, end - begin))
        first, last = first - length, last - length
    return found


def _joined(runs: Iterator[Run]) -> list[Run]:
    """The runs, with adjacent ones joined."""
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((start, length))
    return joined


@lru_cache(maxsize=256)
def _groups(grid: Shape, is_replica_axis: tuple[bool, ...]) -> list[list[int]]:
    groups: dict[Shape, list[int]] = {}
    for position, coordinates in enumerate(product(*map(range, grid))):
        pairs = zip(coordinates, is_replica_axis, strict=True)
        groups.setdefault(tuple(index for index, is_replica in pairs if not is_replica), []).append(position)
    return list(groups.values())


def choose_writers(sizes: Mapping[str, tuple[Layout, int]]) -> set[str]:
    """The tensors whose part this rank writes. One of the ranks that hold a part writes it; bytes are balanced.

    ``sizes``: for each tensor of one grid its layout, and the bytes of its largest part. All ranks of the grid make
    the same choice, without a message.
    """
    own: set[str] = set()
    loads: dict[int, int] = {}
    for name, (layout, num_bytes) in sorted(sizes.items(), key=lambda each: (-each[1][1], each[0])):
        for group in layout.groups():
            writer = min(group, key=lambda position: loads.get(position, 0))
            loads[writer] = loads.get(writer, 0) + num_bytes
            if writer == layout.position:
                own.add(name)
    return own


def is_covered(shape: Shape, blocks: Collection[Block]) -> bool:
    """Whether blocks have every element of a tensor exactly once. Raises a FormatError if the check is too large."""
    if sum(block.numel for block in blocks) != math.prod(shape):
        return False
    if any(start < 0 or end > size for block in blocks for start, end, size in _edges(block, shape)):
        return False
    ends = [sorted({0, size, *(x for b in blocks for x in (b.offsets[i], b.ends[i]))}) for i, size in enumerate(shape)]
    numbers = [{start: i for i, (start, _) in enumerate(pairwise(places))} | {places[-1]: len(places) - 1}
               for places in ends]  # fmt: skip
    if math.prod(len(places) - 1 for places in ends) > MOST_CELLS:
        raise FormatError(f"more than {MOST_CELLS} cells")
    seen: set[Shape] = set()
    for block in blocks:
        starts, stops = zip(block.offsets, numbers, strict=True), zip(block.ends, numbers, strict=True)
        ranges = [range(a, b) for a, b in zip((n[x] for x, n in starts), (n[x] for x, n in stops), strict=True)]
        for cell in product(*ranges):
            if cell in seen:
                return False
            seen.add(cell)
    return True


def _edges(block: Block, shape: Shape) -> Iterator[tuple[int, int, int]]:
    return zip(block.offsets, block.ends, shape, strict=True)
