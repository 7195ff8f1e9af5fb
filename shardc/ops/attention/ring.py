"""Ring attention over cut positions: the tiles of each rank, the keys that are sent, and the work of each rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Any

import torch
from torch import Tensor

from shardc.language.partition import ZIGZAG
from shardc.language.sharding import TensorType, ceil_div
from shardc.language.size import at_most, plain
from shardc.ops.random import stream
from shardc.ops.reduction import wide_dtype
from shardc.ops.zigzag import in_zigzag

from .kernels import TILED_FAMILY, Family
from .mask import LARGEST, Mask, has_rows, mask_of
from .products import Dropout, Scores
from .score import ScoreMod, score_mod_of
from .tiles import Run, Tile, joined, pieces, place, runs_of, side_by_side, tiles, within

POSITIONS = 2  # the dim of queries, keys and values, of results and of the logsumexp
TILE = 1024  # queries, and keys, for which a part of a mask is made at a time
TILE_ON_CUDA = 4096  # the same for scores without a mask
MOST_COUNTED = 64  # the most chunks for which the travel of keys and the work of each rank are computed


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of keys and values to the next rank, or to the one before.

    ``distance``: each rank meets the chunk that is ``distance`` indices before its own, or behind it if negative.
    ``rows``: the rows of the chunk that are sent, since ranks see them in this step or a later one in this direction.
    ``seen``: the rows that any step in this direction sends; their gradients travel in every step.
    """

    distance: int
    rows: range
    seen: range

    @property
    def way(self) -> int:
        """1 if keys go to the next rank, -1 if they go to the one before."""
        return 1 if self.distance > 0 else -1

    @property
    def is_first(self) -> bool:
        """Whether ranks send rows of their own chunks in this step, not of chunks that they have met."""
        return abs(self.distance) == 1


@dataclass(frozen=True, slots=True)
class Ring:
    """One attention over cut positions: ``queries`` and ``keys``, each cut in ``count`` chunks as torch.chunk does.

    ``nested``: if several axes do not divide them evenly, the number of chunks that the first axis makes, the number
    that the next makes of each of these, and so on.
    ``family``: the family of kernels. ``is_causal``: query i sees keys up to i. ``scale``: of the scores, by default
    1 / sqrt(head size). ``travels``: chunks of keys and values go round; else they are whole on every rank.
    ``made_by``: the fields of a ``Mask``, if there is one; its leaves have rows for the queries of a chunk and columns
    for all keys in order. ``in_zigzag``: whether queries, and keys, are in zigzag and not in order. ``dropout``: the
    chance that a probability becomes 0. ``draw``: the number of this draw in the step. ``of_mask``: for each dim of the
    mask whether it has more than one element, if backward returns the gradient of the mask too. ``score_text``: the
    text of a ``ScoreMod``, if there is one.
    """

    family: Family
    count: int
    queries: int
    keys: int
    is_causal: bool
    scale: float | None
    travels: bool = True
    made_by: tuple[Any, ...] | None = None
    in_zigzag: tuple[bool, bool] = (False, False)
    dropout: float = 0.0
    draw: int = 0
    of_mask: tuple[bool, ...] | None = None
    score_text: str = ""
    nested: tuple[int, ...] = ()

    def __str__(self) -> str:
        chunks = f"{self.count} chunk{'s' * (self.count != 1)} of {self.queries} queries and {self.keys} keys"
        words = [chunks, "causal" if self.is_causal else "", ZIGZAG if any(self.in_zigzag) else ""]
        adds = self.mask is not None and self.mask.may_lower and not self._is_shifted
        words.append("" if self.travels else "all keys on each rank" + " since the mask adds numbers" * adds)
        words.append("with the gradient of the mask" if self.of_mask else "")
        words.append(f"scores {self.score_mod}" if self.score_mod else "")
        words.append(f"dropout {self.dropout:g}" if self.dropout else "")
        words.append(f"the busiest rank does {self.imbalance:.2f} of the mean" if self.imbalance > 1.05 else "")
        return ", ".join([*filter(None, words), *([f"mask {self.mask}"] if self.mask else [])])

    @property
    def values(self) -> tuple[Any, ...]:
        """The fields as a node's argument."""
        return astuple(self)

    @property
    def mask(self) -> Mask | None:
        """The steps that make the mask; None without a mask."""
        return None if self.made_by is None else mask_of(self.made_by)

    @property
    def score_mod(self) -> ScoreMod | None:
        """The function that changes scores before the mask is added; None if there is none."""
        return score_mod_of(self.score_text) if self.score_text else None

    @property
    def steps(self) -> int:
        """The number of times that keys go to a next rank: in each direction up to the last rank that sees any."""
        if not self.travels:
            return 0
        return self.count - 1 if self.sent is None else len(self.sent)

    @property
    def sent(self) -> tuple[Hop, ...] | None:
        """The steps, if a mask may hide rows; None if all rows go all the way round."""
        if not self.travels or self.mask is None or (not isinstance(self.count, int) and not self._hides_ends):
            return None
        return _sent(self._undrawn) if self.count <= MOST_COUNTED else None

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The chunks that a rank meets: its own, then that of each step."""
        chunk = range(ceil_div(self.keys, self.count))
        sent = self.sent
        if sent is None:
            sent = tuple(Hop(distance, chunk, chunk) for distance in range(1, self.steps + 1))
        return Hop(0, chunk, chunk), *sent

    @property
    def _hides_ends(self) -> bool:
        """Whether the mask is known to hide the last key from the first query, or the first key from the last."""
        assert self.mask is not None
        queries, keys = ((range(1), range(length - 1, length)) for length in (self.queries, self.keys))
        return any(self.mask.shows(*each) is False for each in zip(queries, reversed(keys), strict=True))

    def source(self, index: int, hop: Hop) -> int:
        """The index of the chunk that a rank meets; if keys go both ways it may be out of range, which is no chunk."""
        goes_both_ways = self.sent is not None and any(each.way < 0 for each in self.sent)
        return index - hop.distance if goes_both_ways else (index - hop.distance) % self.count

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank relative to the mean; 1 if not causal, and for masks or chunks with many tiles."""
        if not isinstance(self.count, int) or self.count > MOST_COUNTED or not self.is_causal or self.mask is not None:
            return 1.0
        return _imbalance(self._undrawn)

    @property
    def _undrawn(self) -> Ring:
        """This ring without dropout, whose draw differs between layers, so that all layers share cached results."""
        if self.family != TILED_FAMILY:
            return self
        return replace(self, family="flash_attention", dropout=0.0, draw=0)

    def tiles(self, index: int, source: int | None, rows: range | None = None, on_cuda: bool = False) -> Iterator[Tile]:
        """The tiles of a chunk of queries and a chunk of keys, or all if ``source`` is None; causal tiles are square.

        ``rows``: the keys of the chunk that are present, by default all. ``on_cuda``: tiles without a mask may be
        larger.
        """
        runs, others = self._queries(index), self._keys(source)
        others = others if rows is None else within(others, rows)
        if self.family == TILED_FAMILY:
            yield from self._apart(runs, others, TILE_ON_CUDA if on_cuda else TILE)
        elif self.is_causal and self.mask is None and len(runs) > 1 and runs == others:
            whole = slice(0, sum(len(each.positions) for each in runs))  # in a rank too, later ones see all before them
            yield Tile(whole, whole, runs[0].positions.start, is_causal=True, is_masked=False)
        else:
            yield from joined(self._apart(runs, others, TILE))

    def scores(self, tile: Tile, leaves: Sequence[Tensor], of_mask: Tensor | None = None) -> Scores:
        """The operations on the scores of a tile.

        ``leaves``: the tensors that ``prepared`` returns. ``of_mask``: the gradient of the mask, if it is requested.
        """
        mask, dropout, shift = None, None, None
        if self.dropout:
            *leaves, state, first = leaves
            dropout = Dropout(state, first[:, :, tile.rows], tile.start, self.dropout)
        if self._is_shifted:
            *leaves, shift = leaves
            shift = shift[..., tile.rows, :] if has_rows(shift.shape) else shift
        if tile.is_masked:
            assert self.mask is not None
            mask = self.mask.make([_of_tile(leaf, tile) for leaf in leaves])
        of_mask = None if of_mask is None else _of_tile(of_mask, tile)
        return Scores(mask, tile.is_causal, self.scale, dropout, shift, of_mask, self.score_mod)

    def prepared(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The operands after queries, keys and values, with the state of a stream in place of seed and step.

        They are the leaves of the mask and, with dropout, the program's seed and step, and for each query the index of
        its first score among all, ``[batch, heads, queries]``. The result of ``_shift``, if any, follows the leaves.
        """
        of_mask = leaves[:-2] if self.dropout else leaves
        shift = (self._shift(of_mask),) if self._is_shifted else ()
        if not self.dropout:
            return *of_mask, *shift
        random, first = leaves[-2:]
        return *of_mask, *shift, stream(random, self.draw), first

    @property
    def _is_shifted(self) -> bool:
        """Whether numbers that hide keys are subtracted from the scores of a query again, so that their sum is kept."""
        return self.family == TILED_FAMILY and self.mask is not None and self.mask.may_lower

    def _shift(self, leaves: Sequence[Tensor]) -> Tensor:
        """The largest number that the mask adds to scores of a query, 0 for most: ``[..., queries, 1]``.

        A number far from 0, such as ``finfo.min`` on all keys, leaves a logsumexp no digits for the number of keys. It
        is added to scores before it is subtracted, since the addition removes the scores that it hides.
        """
        assert self.mask is not None
        if not self.keys:
            return leaves[0].new_zeros(())
        columns = [slice(each.start, each.stop) for each in pieces(range(self.keys), TILE)]
        everything = (Tile(slice(None), each, each.start, is_causal=False, is_masked=True) for each in columns)
        made = (self.mask.make([_of_tile(leaf, tile) for leaf in leaves]) for tile in everything)
        largest = torch.stack([each.amax(-1, keepdim=True) for each in made]).amax(0)
        return largest.masked_fill((largest.abs() <= LARGEST) | largest.isinf(), 0.0)

    def zeros_of_mask(self, q: Tensor) -> Tensor | None:
        """Zeros for the gradient of the mask from queries ``[batch, heads, queries, size]``, in the dtype of sums."""
        if self.of_mask is None:
            return None
        shape = (*q.shape[:3], self.keys)[-len(self.of_mask) :]
        sizes = [size if is_wide else 1 for size, is_wide in zip(shape, self.of_mask, strict=True)]
        return q.new_zeros(sizes, dtype=wide_dtype(q.dtype))

    def reorder(
        self, op: Callable[..., Tensor], of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
    ) -> list[Tensor]:
        """Apply ``op``, into zigzag or back in order, to whole tensors of queries, then of keys, if these are in it."""
        pairs = [(x, own) for own, xs in zip(self.in_zigzag, (of_queries, of_keys), strict=True) for x in xs]
        return [op(x, POSITIONS, 1, 1, self.count) if own else x for x, own in pairs]

    def _queries(self, index: int) -> list[Run]:
        return runs_of(self.queries, self.nested or (self.count,), index, self.in_zigzag[0])

    def _keys(self, source: int | None) -> list[Run]:
        if source is not None:
            is_chunk = 0 <= source < self.count
            return runs_of(self.keys, self.nested or (self.count,), source, self.in_zigzag[1]) if is_chunk else []
        return side_by_side(in_zigzag(self.keys, self.count) if self.in_zigzag[1] else [range(self.keys)])

    def _apart(self, runs: Sequence[Run], others: Sequence[Run], unmasked: int) -> Iterator[Tile]:
        """The tiles of runs of queries and runs of keys, small enough for the tensors that are made of their scores."""
        for run, other in product(runs, others):
            queries, keys = run.positions, other.positions
            height = width = unmasked if self.mask is None else TILE
            if self.mask is None and self.family != TILED_FAMILY:
                height, width = max(1, len(queries)), max(1, len(keys))
            elif self.mask is not None and self.mask.may_lower and not self._is_shifted:
                width = max(1, len(keys))
            for rows, columns in product(pieces(queries, height), pieces(keys, width)):
                yield from self._seen(run, other, rows, columns)

    def _seen(self, run: Run, other: Run, queries: range, keys: range) -> Iterator[Tile]:
        """The tiles of some queries and some keys."""
        if self.mask is not None:
            if (shows := self.mask.shows(queries, keys)) is not False:
                yield from tiles(run, other, queries, keys, is_masked=not shows)
        elif not self.is_causal:
            yield from tiles(run, other, queries, keys)
        else:
            first = max(queries.start, keys.start)  # the first query that sees any of them
            last = min(queries.stop, keys.stop)
            yield from tiles(run, other, range(first, queries.stop), range(keys.start, min(first, keys.stop)))
            yield from tiles(run, other, range(first, last), range(first, last), is_causal=True)
            yield from tiles(run, other, range(last, queries.stop), range(first, last))


def wide_dims(mask: Sequence[int]) -> tuple[bool, ...]:
    """For each dim of a mask of this shape, whether it has more than one element."""
    return tuple(size != 1 for size in mask)


def _of_tile(x: Tensor, tile: Tile) -> Tensor:
    """The part that a tile reads of a tensor with rows for queries and columns for all keys, or with one of either."""
    rows = x[..., tile.rows, :] if has_rows(x.shape) else x
    return rows.narrow(-1, tile.start, tile.num_columns) if x.ndim and x.shape[-1] > 1 else rows


@lru_cache(maxsize=256)
def _sent(ring: Ring) -> tuple[Hop, ...]:
    """The steps if all keys go to the next rank, or if they go both ways, whichever sends fewer rows."""
    distances = range(1, ring.count)
    before, behind = ([_rows_seen(ring, way * distance) for distance in distances] for way in (1, -1))
    around = list(map(_hull, before, reversed(behind)))
    both = _hops(1, before) + _hops(-1, behind)
    return min(_hops(1, around), both, key=_num_sent)


def _num_sent(hops: Iterable[Hop]) -> int:
    """The number of rows that a rank sends in forward and backward together."""
    return sum(2 * len(hop.rows) + len(hop.seen) for hop in hops)


def _hops(way: int, seen: Sequence[range]) -> tuple[Hop, ...]:
    """The steps in one direction, if ranks see the rows ``seen`` at distances of 1, 2 and so on."""
    sent = [*accumulate(reversed(seen), _hull)][::-1]
    return tuple(Hop(way * distance, rows, sent[0]) for distance, rows in enumerate(sent, 1) if rows)


def _hull(one: range, other: range) -> range:
    """The range from the first to the last row of both."""
    if not one or not other:
        return one or other
    return range(min(one.start, other.start), max(one.stop, other.stop))


def _rows_seen(ring: Ring, distance: int) -> range:
    """The range from the first to the last row that any rank sees of the chunk ``distance`` indices before its own."""
    seen = range(0)
    for index in range(max(0, distance), min(ring.count, ring.count + distance)):
        for run, other in product(ring._queries(index), ring._keys(index - distance)):
            rows = place(other, _columns_seen(ring, run.positions, other.positions))
            seen = _hull(seen, range(rows.start, rows.stop))
        if len(seen) == ceil_div(ring.keys, ring.count):
            break
    return seen


def _columns_seen(ring: Ring, rows: range, columns: range) -> range:
    """The range from the first to the last column that any of the rows may see."""
    mask = ring.mask
    assert mask is not None
    if not rows or not columns or (shows := mask.shows(rows, columns)) is False:
        return columns[:0]
    if shows:
        return columns
    first, last = len(columns), 0
    for some in pieces(rows, TILE):
        first = min(first, _num_hidden(mask, some, columns))
        last = max(last, len(columns) - _num_hidden(mask, some, columns, from_end=True))
    return columns[first : max(first, last)]


def _num_hidden(mask: Mask, rows: range, columns: range, from_end: bool = False) -> int:
    """The number of columns, from the first or the last on, that no row sees."""

    def is_seen(count: int) -> bool:
        return mask.shows(rows, columns[-count:] if from_end else columns[:count]) is not False

    return 0 if is_seen(1) else bisect_left(range(1, len(columns) + 1), True, key=is_seen)


@lru_cache(maxsize=256)
def _imbalance(ring: Ring) -> float:
    ranks = range(ring.count)
    work = [sum(tile.num_scores for source in ranks for tile in ring.tiles(index, source)) for index in ranks]
    return max(work) * ring.count / max(1, sum(work))


def ring_bytes(ring: Ring, keys: TensorType, values: TensorType, *, is_backward: bool) -> int:
    """Bytes that one rank with these chunks of keys and values sends; in backward their gradients go with them.

    In every step the gradients have all rows that any step in its direction sends.
    """
    chunk = keys.nbytes + values.nbytes
    if ring.sent is None:
        return ring.steps * chunk * (2 if is_backward else 1)
    rows = sum(len(hop.rows) + (len(hop.seen) if is_backward else 0) for hop in ring.sent)
    return rows * (chunk // max(1, keys.shape[POSITIONS]))


def ring_workspace(ring: Ring, keys: TensorType, values: TensorType, *, is_backward: bool) -> int:
    """Bytes of keys and values, and of their gradients, that a rank holds while a ring runs, besides its own.

    These are the rows that it meets and the next ones, on their way, and a copy of the rows that it sends if they are a
    part of a chunk. Backward adds the gradients of its own chunk, those of a step, and those sent and received.
    """
    chunk, foreign = keys.nbytes + values.nbytes, at_most(2, ring.steps)
    if ring.sent:
        chunk, foreign = chunk // max(1, keys.shape[POSITIONS]), _rows_held(ring)
    if not is_backward:
        return foreign * chunk
    sums = 2 * (keys.nbytes + values.nbytes) * wide_dtype(keys.dtype).itemsize // keys.dtype.itemsize
    return 2 * foreign * chunk + sums


def _rows_held(ring: Ring) -> int:
    """The most rows that a rank holds at a time: those that it meets, those that arrive, and copies that it sends."""
    most, own = 0, ring.hops[0]
    for hop, following in pairwise(ring.hops):
        is_copied = following.rows != (own if following.is_first else hop).rows
        most = max(most, len(hop.rows) * (hop is not own) + len(following.rows) * (1 + is_copied))
    return most


def tile_workspace(ring: Ring, leaves: Sequence[TensorType]) -> int:
    """Bytes that a rank holds while it makes the largest tile of the mask, of leaves with the rows of its queries."""
    if ring.mask is None or not ring.keys:
        return 0
    height = min(TILE, plain(ceil_div(ring.queries, ring.count)))
    width = min(TILE, plain(ceil_div(ring.keys, ring.count) if ring.travels else ring.keys))
    of_tile = (
        [min(size, height if dim == 2 else width) if dim >= 2 else size for dim, size in enumerate(map(plain, shape))]
        for shape in (leaf.shape for leaf in leaves)
    )
    pairs = zip(of_tile, leaves, strict=True)
    return ring.mask.workspace([torch.empty(shape, dtype=leaf.dtype, device="meta") for shape, leaf in pairs])


def mask_workspace(of_mask: TensorType, nbytes: int) -> int:
    """Bytes held besides results; ``nbytes`` are those without the gradient of a mask.

    If its dtype has 2 bytes, its sums are wider. It is made of them at the end, when nothing else is held.
    """
    wide = wide_dtype(of_mask.dtype).itemsize
    return nbytes if wide == of_mask.dtype.itemsize else of_mask.numel * wide + max(0, nbytes - of_mask.nbytes)
