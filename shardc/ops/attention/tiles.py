"""Tiles: blocks of attention between some rows of a chunk of queries and some columns of a chunk of keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardc.language.sharding import ceil_div
from shardc.ops.zigzag import stretches


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive positions; a rank has the first of them at index ``at``."""

    positions: range
    at: int = 0


def runs_of(length: int, counts: Sequence[int], index: int, is_zigzag: bool) -> list[Run]:
    """The positions of a chunk. ``counts``: the number of chunks, the number in each of these, and so on."""
    count = math.prod(counts)
    if is_zigzag:
        return side_by_side(stretches(length, count, index))
    size, positions = length, range(length)
    for number in counts:
        count //= number
        size, at = ceil_div(size, number), index // count % number
        positions = positions[at * size : (at + 1) * size]
    return [Run(positions)]


def within(runs: Iterable[Run], rows: range) -> list[Run]:
    """The parts of runs that a rank has if it has only these rows of a chunk, in a tensor of their own."""
    found = list[Run]()
    for run in runs:
        start, stop = max(rows.start, run.at), min(rows.stop, run.at + len(run.positions))
        if start < stop:
            found.append(Run(run.positions[start - run.at : stop - run.at], start - rows.start))
    return found


def side_by_side(runs: Iterable[range]) -> list[Run]:
    """Runs of positions that are stored one after the other; runs of consecutive positions are merged."""
    found, at = list[Run](), 0
    for run in filter(None, runs):
        if found and found[-1].positions.stop == run.start:
            found[-1] = Run(range(found[-1].positions.start, run.stop), found[-1].at)
        else:
            found.append(Run(run, at))
        at += len(run)
    return found


def pieces(positions: range, size: int) -> list[range]:
    """Positions in pieces of a size; the last may be smaller."""
    return [positions[start : start + size] for start in range(0, len(positions), size)]


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of attention: some rows of a chunk of queries, and some columns of a chunk of keys.

    Each row sees all columns; row i sees columns 0 to i if ``is_causal``, and those that the mask shows if
    ``is_masked``. ``start``: the position of the first column.
    """

    rows: slice
    columns: slice
    start: int
    is_causal: bool
    is_masked: bool

    @property
    def num_scores(self) -> int:
        """The number of pairs of a row and a column that it sees."""
        rows, columns = (each.stop - each.start for each in (self.rows, self.columns))
        return rows * (rows + 1) // 2 if self.is_causal else rows * columns

    @property
    def num_columns(self) -> int:
        """The number of columns; their positions are consecutive unless tiles have been joined."""
        return self.columns.stop - self.columns.start


def tiles(
    run: Run, other: Run, rows: range, columns: range, is_causal: bool = False, is_masked: bool = False
) -> Iterator[Tile]:
    """The tile of these positions of two runs; none if it is empty."""
    if rows and columns:
        own, seen = place(run, rows), place(other, columns)
        yield Tile(own, seen, columns.start, is_causal, is_masked)


def place(run: Run, positions: range) -> slice:
    """The indices at which a rank has some positions of a run."""
    start = run.at + positions.start - run.positions.start
    return slice(start, start + len(positions))


def joined(apart: Iterable[Tile]) -> Iterator[Tile]:
    """The tiles, with neighbours merged if all their rows see all their columns."""
    last: Tile | None = None
    for tile in apart:
        both = last and _join(last, tile)
        if last and not both:
            yield last
        last = both or tile
    if last:
        yield last


def _join(one: Tile, other: Tile) -> Tile | None:
    if one.is_causal or one.is_masked or other.is_causal or other.is_masked:
        return None
    if one.columns == other.columns and one.rows.stop == other.rows.start:
        return replace(one, rows=slice(one.rows.start, other.rows.stop))
    if one.rows == other.rows and one.columns.stop == other.columns.start:
        return replace(one, columns=slice(one.columns.start, other.columns.stop))
    return None
