"""Fused attention: the rules of torch's ops, and attention whose positions are cut, block of keys by block of keys.

A rank that has a chunk of the queries needs every key once. ``ring_attention`` takes the chunks of keys and values one
after the other, as they come round, and joins what each gives by its logsumexp (Milakov and Gimelshein 2018)::

    lse = logaddexp(lse_a, lse_b);  out = out_a + (out_b - out_a) * sigmoid(lse_b - lse_a)

Backward runs torch's own kernel on each block with the final result and logsumexp, so that nothing is computed again
but what that kernel does (Ring Attention, Liu et al. 2023). On whole values both are attention as torch has it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from shardc.language.partition import ZIGZAG
from shardc.language.rule import OpCall, Rule, make_rule, rule
from shardc.language.sharding import TensorType, ceil_div
from shardc.ops.mask import Mask, has_rows, mask_of
from shardc.ops.reduction import wide_dtype
from shardc.ops.zigzag import in_order, in_zigzag, stretches, zigzag

aten = torch.ops.aten

Family = Literal["flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"]
FAMILIES: tuple[Family, ...] = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
FORWARD = {getattr(aten, f"_scaled_dot_product_{family}").default: family for family in FAMILIES}
BACKWARD = {getattr(aten, f"_scaled_dot_product_{family}_backward").default: family for family in FAMILIES}


# The rules.


def _in_chunks(call: OpCall, first: int = 0, count: int = 1, travels: bool = True) -> Rule:
    """Queries, keys, values, their gradients and masks are ``[batch, heads, positions, 1]``, the logsumexp has 3 dims.

    ``first``: the position of the queries among the operands. Where keys have fewer heads than queries, those of the
    queries are ``(h r)``, and the keys' gradients are sums over ``r``. A mask may lack leading dims. Positions are
    whole until ``decompose`` takes the op apart in a ``count`` of chunks: a chunk of the queries needs all keys. A
    single position is never cut. ``travels``: keys are cut as queries are. Seeds and lengths have no constraint.
    """
    q, k = call.operands[first : first + 2]
    assert q is not None and k is not None
    heads, lengths = sorted({q.shape[1], k.shape[1]}), (q.shape[2], k.shape[2])
    names = {heads[0]: "h", heads[-1]: "(h r)" if len(heads) == 2 else "h"}

    has_whole_keys = {first + 1, first + 2, *({-2, -1} if first else ())} if not travels else set[int]()

    def spec(place: int, tensor: TensorType | None) -> str:
        ndim = 0 if tensor is None else len(tensor.shape)
        if tensor is None or ndim not in (2, 3, 4):
            return "_"
        row = tensor.shape[2 if ndim > 2 else 0]
        is_cut = row in lengths and 1 not in (row, *lengths) and place not in has_whole_keys
        along, head = "t" if is_cut else "1", names.get(tensor.shape[1], "1")
        return f"{along} 1" if ndim == 2 else " ".join(["b", head, along, *["1"] * (ndim - 3)])

    left, right = list(enumerate(call.operands)), list(enumerate(call.results, -len(call.results)))
    text = " -> ".join(", ".join(spec(*each) for each in side) for side in (left, right))
    return make_rule(text, call, chunks={"t": count})


rule(tuple(FORWARD), _in_chunks, is_dense=True)  # torch 2.13 silently computes wrong values for other layouts
rule(tuple(BACKWARD), partial(_in_chunks, first=1), is_dense=True)


def is_attention(target: Any) -> bool:
    """Whether an op is fused attention, or its backward."""
    return target in FORWARD or target in BACKWARD


# Attention in chunks.


POSITIONS = 2  # the dim of queries, keys and values, of results and of the logsumexp
TILE = 1024  # queries, and keys, for which a part of a mask is made at a time
MOST_COUNTED = 64  # chunks of which it is found out how far their keys travel, and which has most to do


@dataclass(frozen=True, slots=True)
class Ring:
    """One attention over cut positions: ``queries`` and ``keys``, each cut in ``count`` chunks as torch.chunk does.

    ``family``: whose kernels run. ``is_causal``: query i sees keys up to i. ``scale``: of the scores, by default
    1 / sqrt(head size). ``travels``: chunks of keys and values go round; else they are whole on every rank.
    ``made_by``: the fields of a ``Mask``, where there is one; its leaves have rows for the queries of a chunk and
    columns for all keys in order. ``in_zigzag``: whether queries, and keys, are in zigzag and not in order.
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

    def __str__(self) -> str:
        chunks = f"{self.count} chunks of {self.queries} queries and {self.keys} keys"
        words = [chunks, "causal" if self.is_causal else "", ZIGZAG if any(self.in_zigzag) else ""]
        words.append("" if self.travels else "all keys on each rank")
        words.append(f"the busiest rank does {self.imbalance:.2f} of the mean" if self.imbalance > 1.05 else "")
        return ", ".join([*filter(None, words), *([f"mask {self.mask}"] if self.mask else [])])

    @property
    def values(self) -> tuple[Any, ...]:
        """The fields as a node's argument."""
        return astuple(self)

    @property
    def mask(self) -> Mask | None:
        """How the mask is made."""
        return None if self.made_by is None else mask_of(self.made_by)

    @property
    def steps(self) -> int:
        """How far each chunk of keys travels: to the last rank that sees any of them."""
        if not self.travels:
            return 0
        return self.count - 1 if self.sent is None else len(self.sent)

    @property
    def sent(self) -> tuple[range, ...] | None:
        """For each step the rows of a chunk of keys that are sent: those that ranks further on see. None for all."""
        is_known = self.travels and self.mask is not None and self.count <= MOST_COUNTED
        return _sent(self) if is_known else None

    def rows(self, step: int) -> range:
        """The rows of a chunk of keys that are met in a step."""
        chunk = range(ceil_div(self.keys, self.count))
        return chunk if step == 0 or self.sent is None else self.sent[step - 1]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank beside the mean of all; 1 for masks, whose tiles may be many."""
        is_known = isinstance(self.count, int) and self.count <= MOST_COUNTED
        return _imbalance(self) if is_known and self.is_causal and self.mask is None else 1.0

    def tiles(self, index: int, source: int | None) -> Iterator[Tile]:
        """What the queries of a chunk see of the keys of another chunk, or of all, in tiles; causal ones are square."""
        runs, others = self._queries(index), self._keys(source)
        if source is not None and self.sent is not None:
            step = (index - source) % self.count
            others = _within(others, self.rows(step)) if step <= len(self.sent) else []
        if self.is_causal and self.mask is None and len(runs) > 1 and runs == others:
            whole = slice(0, sum(len(each.positions) for each in runs))  # in a rank too, later ones see all before them
            yield Tile(whole, whole, runs[0].positions.start, is_causal=True, is_masked=False)
        else:
            yield from _joined(tile for run, other in product(runs, others) for tile in self._tiles_of(run, other))

    def reorder(
        self, op: Callable[..., Tensor], of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
    ) -> list[Tensor]:
        """Whole tensors of queries, then those of keys, brought into zigzag, or back in order, where they are."""
        pairs = [(x, own) for own, xs in zip(self.in_zigzag, (of_queries, of_keys), strict=True) for x in xs]
        return [op(x, POSITIONS, 1, 1, self.count) if own else x for x, own in pairs]

    def _queries(self, index: int) -> list[_Run]:
        return _runs(self.queries, self.count, index, self.in_zigzag[0])

    def _keys(self, source: int | None) -> list[_Run]:
        if source is not None:
            return _runs(self.keys, self.count, source, self.in_zigzag[1])
        return _side_by_side(in_zigzag(self.keys, self.count) if self.in_zigzag[1] else [range(self.keys)])

    def _tiles_of(self, run: _Run, other: _Run) -> Iterator[Tile]:
        """The tiles of a run of queries and a run of keys."""
        queries, keys = run.positions, other.positions
        if self.mask is not None:
            length = len(keys) if self.mask.may_lower else TILE
            for rows, columns in product(_pieces(queries, TILE), _pieces(keys, max(1, length))):
                if (shows := self.mask.shows(rows, columns)) is not False:
                    yield from _tiles(run, other, rows, columns, is_masked=not shows)
        elif not self.is_causal:
            yield from _tiles(run, other, queries, keys)
        else:
            first = max(queries.start, keys.start)  # the first query that sees any of them
            last = min(queries.stop, keys.stop)
            yield from _tiles(run, other, range(first, queries.stop), range(keys.start, min(first, keys.stop)))
            yield from _tiles(run, other, range(first, last), range(first, last), is_causal=True)
            yield from _tiles(run, other, range(last, queries.stop), range(first, last))


@lru_cache(maxsize=256)
def _sent(ring: Ring) -> tuple[range, ...]:
    sent, later = list[range](), range(0)
    for step in range(ring.count - 1, 0, -1):
        later = _all_seen(ring, step, later)
        sent.append(later)
    return tuple(each for each in reversed(sent) if each)


def _all_seen(ring: Ring, step: int, seen: range) -> range:
    """From the first to the last row of a chunk that is among ``seen``, or that any rank sees in a step."""
    for index in range(ring.count):
        chunk = ring._keys((index - step) % ring.count)
        for run, other in product(ring._queries(index), chunk):
            rows = _place(other, _columns_seen(ring, run.positions, other.positions))
            ends = [(each.start, each.stop) for each in (seen, rows) if each.start < each.stop]
            seen = range(min((start for start, _ in ends), default=0), max((stop for _, stop in ends), default=0))
        if len(seen) == ceil_div(ring.keys, ring.count):
            break
    return seen


def _columns_seen(ring: Ring, rows: range, columns: range) -> range:
    """From the first to the last column that any of the rows may see."""
    mask = ring.mask
    assert mask is not None
    if not rows or not columns or (shows := mask.shows(rows, columns)) is False:
        return columns[:0]
    if shows:
        return columns
    first, last = len(columns), 0
    for some in _pieces(rows, TILE):
        first = min(first, _num_hidden(mask, some, columns))
        last = max(last, len(columns) - _num_hidden(mask, some, columns, from_end=True))
    return columns[first : max(first, last)]


def _num_hidden(mask: Mask, rows: range, columns: range, from_end: bool = False) -> int:
    """How many columns, from the first or the last on, no row sees."""

    def is_seen(count: int) -> bool:
        return mask.shows(rows, columns[-count:] if from_end else columns[:count]) is not False

    return 0 if is_seen(1) else bisect_left(range(1, len(columns) + 1), True, key=is_seen)


@lru_cache(maxsize=256)
def _imbalance(ring: Ring) -> float:
    ranks = range(ring.count)
    work = [sum(tile.num_scores for source in ranks for tile in ring.tiles(index, source)) for index in ranks]
    return max(work) * ring.count / max(1, sum(work))


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions that follow one another, of which a rank's first stands at ``at``."""

    positions: range
    at: int = 0


def _runs(length: int, count: int, index: int, is_zigzag: bool) -> list[_Run]:
    """The positions of a chunk."""
    if is_zigzag:
        return _side_by_side(stretches(length, count, index))
    size = ceil_div(length, count)
    return [_Run(range(min(index * size, length), min((index + 1) * size, length)))]


def _within(runs: Iterable[_Run], rows: range) -> list[_Run]:
    """What is left of runs where a rank has only some rows of a chunk, in a tensor of their own."""
    found = list[_Run]()
    for run in runs:
        start, stop = max(rows.start, run.at), min(rows.stop, run.at + len(run.positions))
        if start < stop:
            found.append(_Run(run.positions[start - run.at : stop - run.at], start - rows.start))
    return found


def _side_by_side(runs: Iterable[range]) -> list[_Run]:
    """Runs that stand one after the other; those that follow one another are one."""
    found, at = list[_Run](), 0
    for run in filter(None, runs):
        if found and found[-1].positions.stop == run.start:
            found[-1] = _Run(range(found[-1].positions.start, run.stop), found[-1].at)
        else:
            found.append(_Run(run, at))
        at += len(run)
    return found


def _pieces(positions: range, size: int) -> list[range]:
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
        """Pairs of a row and a column that it sees."""
        rows, columns = (each.stop - each.start for each in (self.rows, self.columns))
        return rows * (rows + 1) // 2 if self.is_causal else rows * columns

    def scores(self, ring: Ring, leaves: Sequence[Tensor]) -> Scores:
        """What becomes of scores in the tile. ``leaves``: those of the ring's mask."""
        mask, length = None, self.columns.stop - self.columns.start
        if self.is_masked:
            assert ring.mask is not None
            rows = [leaf[..., self.rows, :] if has_rows(leaf.shape) else leaf for leaf in leaves]
            pieces = [x.narrow(-1, self.start, length) if x.ndim and x.shape[-1] > 1 else x for x in rows]
            mask = ring.mask.make(pieces)
        return Scores(mask, self.is_causal, ring.scale)


def _tiles(
    run: _Run, other: _Run, rows: range, columns: range, is_causal: bool = False, is_masked: bool = False
) -> Iterator[Tile]:
    """The tile of these positions of two runs, if there is any."""
    if rows and columns:
        own, seen = _place(run, rows), _place(other, columns)
        yield Tile(own, seen, columns.start, is_causal, is_masked)


def _place(run: _Run, positions: range) -> slice:
    start = run.at + positions.start - run.positions.start
    return slice(start, start + len(positions))


def _joined(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """The tiles; those beside one another of which rows see all columns are one."""
    last: Tile | None = None
    for tile in tiles:
        joined = last and _join(last, tile)
        if last and not joined:
            yield last
        last = joined or tile
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


def ring_attention(
    q: Tensor, axes: tuple[str, ...], dim: int, values: tuple[Any, ...], k: Tensor, v: Tensor, *leaves: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention and its logsumexp. ``axes`` cut the positions, dim 2; ``values`` are those of a ``Ring``.

    ``leaves``: those of its mask.
    """
    ring = Ring(*values)
    q, k, v = ring.reorder(in_order, [q], [k, v])
    scores = _whole_scores(ring, leaves)
    out, lse = ring.reorder(zigzag, kernels(ring.family, scores.mask).forward(q, k, v, scores), [])
    return out, lse


def ring_attention_backward(
    grad: Tensor, axes: tuple[str, ...], dim: int, values: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *leaves: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values, from that of the result ``out`` with logsumexp ``lse``."""
    ring = Ring(*values)
    grad, q, out, lse, k, v = ring.reorder(in_order, [grad, q, out, lse], [k, v])
    scores = _whole_scores(ring, leaves)
    dq, dk, dv = kernels(ring.family, scores.mask).backward(grad, q, k, v, out, lse, scores)
    dq, dk, dv = ring.reorder(zigzag, [dq], [dk, dv])
    return dq, dk, dv


def _whole_scores(ring: Ring, leaves: Sequence[Tensor]) -> Scores:
    if ring.in_zigzag[0]:
        leaves = [in_order(x, x.ndim - 2, 1, 1, ring.count) if has_rows(x.shape) else x for x in leaves]
    return Scores(None if ring.mask is None else ring.mask.make(leaves), ring.is_causal, ring.scale)


RINGS = (ring_attention, ring_attention_backward)


def _ring_rule(call: OpCall, first: int) -> Rule:
    ring = Ring(*call.args[3])
    return _in_chunks(call, first, ring.count, ring.travels)


rule(ring_attention, partial(_ring_rule, first=0))
rule(ring_attention_backward, partial(_ring_rule, first=1))


def ring_flops(target: Any, args: tuple[Any, ...]) -> int:
    """Operations of a call of ``RINGS``, from its arguments with shapes for tensors: every query meets all keys."""
    first, _, _, values, *others = args
    (q, k, v) = (first, *others[:2]) if target is ring_attention else others[:3]
    k, v = ((*shape[:2], Ring(*values).keys, shape[3]) for shape in (k, v))
    count: int = sdpa_flop_count(q, k, v) if target is ring_attention else sdpa_backward_flop_count(first, q, k, v)
    return count


def ring_bytes(target: Any, ring: Ring, keys: TensorType, values: TensorType) -> int:
    """Bytes that one rank sends, whose chunks of keys and values these are: in backward their gradients go with them.

    The gradients have all rows that any other rank sees, in each step.
    """
    chunk, is_forward = keys.nbytes + values.nbytes, target is ring_attention
    if ring.sent is None:
        return ring.steps * chunk * (1 if is_forward else 2)
    rows = sum(map(len, ring.sent)) + (0 if is_forward else ring.steps * len(ring.rows(min(1, ring.steps))))
    return rows * (chunk // max(1, keys.shape[POSITIONS]))


def ring_workspace(target: Any, ring: Ring, keys: TensorType, values: TensorType) -> int:
    """Bytes of keys and values, and of their gradients, that a rank holds while a ring runs, besides its own.

    The rows that are met and the next ones, on their way, with a copy of what is sent where that is a part of a chunk.
    In backward the gradients of its own chunk, those of a step, and those that are sent and received.
    """
    chunk, foreign = keys.nbytes + values.nbytes, min(2, ring.steps)
    if ring.sent:
        rows = [*map(len, ring.sent[:2])]
        rows += rows[:1] if rows[0] < keys.shape[POSITIONS] else []
        chunk, foreign = chunk // max(1, keys.shape[POSITIONS]), sum(rows)
    if target is ring_attention:
        return foreign * chunk
    sums = 2 * (keys.nbytes + values.nbytes) * wide_dtype(keys.dtype).itemsize // keys.dtype.itemsize
    return 2 * foreign * chunk + sums


# On one rank: the attention of its chunk of queries to one chunk of keys after the other.


class Joined:
    """The attention of a chunk of queries to all keys that it has met.

    State: ``out``, in the dtype that sums are made in, and ``lse``, minus infinity where a query has seen no key yet.
    """

    def __init__(self, ring: Ring, index: int, q: Tensor, v: Tensor, *leaves: Tensor) -> None:
        self.ring, self.index, self.q, self.leaves = ring, index, q, leaves
        self.out = v.new_zeros([*q.shape[:3], v.shape[3]], dtype=wide_dtype(v.dtype))
        self.lse = v.new_full(q.shape[:3], -torch.inf, dtype=self.out.dtype)

    def meet(self, source: int | None, k: Tensor, v: Tensor) -> None:
        """Let the queries attend to a chunk of keys and values, or to all of them if ``source`` is None."""
        for tile in self.ring.tiles(self.index, source):
            q, out, lse = (x[:, :, tile.rows] for x in (self.q, self.out, self.lse))
            scores = tile.scores(self.ring, self.leaves)
            run = kernels(self.ring.family, scores.mask).forward
            more, further = run(q, k[:, :, tile.columns], v[:, :, tile.columns], scores)
            if scores.mask is not None:
                more = more.masked_fill(scores.hidden.unsqueeze(-1), 0.0)
                further = further.masked_fill(scores.hidden, -torch.inf)
            weight = (further - lse).nan_to_num(nan=-torch.inf).sigmoid()  # 0 where no key has been seen at all
            out.lerp_(more.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
            lse.copy_(torch.logaddexp(lse, further))

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """The result in the dtype of the operands, and its logsumexp, 0 where a query sees no key."""
        return self.out.to(self.q.dtype), self.lse.masked_fill(self.lse == -torch.inf, 0.0)


class Gradients:
    """The gradients that a chunk of queries gives. State: ``of_queries``, a sum over the keys that it has met."""

    def __init__(
        self, ring: Ring, index: int, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, *leaves: Tensor
    ) -> None:
        self.ring, self.index, self.rows, self.leaves = ring, index, (grad, q, out, lse), leaves
        self.of_queries = torch.zeros_like(q, dtype=wide_dtype(q.dtype))

    def meet(self, source: int | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the queries add to the gradients of a chunk of keys and values, or of all if ``source`` is None."""
        dk, dv = (torch.zeros_like(x, dtype=wide_dtype(x.dtype)) for x in (k, v))
        for tile in self.ring.tiles(self.index, source):
            grad, q, out, lse = (x[:, :, tile.rows] for x in self.rows)
            scores = tile.scores(self.ring, self.leaves)
            run = kernels(self.ring.family, scores.mask).backward
            parts = run(grad, q, k[:, :, tile.columns], v[:, :, tile.columns], out, lse, scores)
            for total, part in zip(
                (self.of_queries[:, :, tile.rows], dk[:, :, tile.columns], dv[:, :, tile.columns]), parts, strict=True
            ):
                total += part
        return dk, dv


# Torch's kernels, of all families with the same arguments and without dropout.


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of scores: they are multiplied by ``scale``, and a ``mask`` is added."""

    mask: Tensor | None
    is_causal: bool
    scale: float | None

    @property
    def hidden(self) -> Tensor:
        """The queries that the mask lets see no key, shaped to broadcast to a logsumexp."""
        assert self.mask is not None
        return (self.mask == -torch.inf).all(-1)


class Kernels(Protocol):
    """The forward kernel of a family and its backward. They are never given empty tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Attention, and its logsumexp ``[batch, heads, queries]``."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""


def kernels(family: Family, mask: Tensor | None) -> Kernels:
    """The kernels of a family; cuDNN's give way to others, and so do those that take no mask where there is one."""
    if family == "flash_attention_for_cpu":
        return _OfCpu()
    return _Flash() if mask is None and family != "efficient_attention" else _Efficient()


class _OfCpu:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        run, tensors = aten._scaled_dot_product_flash_attention_for_cpu.default, map(_dense, (q, k, v))
        out, lse = run(*tensors, 0.0, scores.is_causal, attn_mask=scores.mask, scale=scores.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, tensors = (
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            map(_dense, (grad, q, k, v, out)),
        )
        dq, dk, dv = run(*tensors, lse, 0.0, scores.is_causal, attn_mask=scores.mask, scale=scores.scale)
        return dq, dk, dv


class _Flash:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        run = aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = run(*map(_dense, (q, k, v)), 0.0, scores.is_causal, scale=scores.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, tensors, seed = (
            aten._scaled_dot_product_flash_attention_backward.default,
            map(_dense, (grad, q, k, v, out)),
            _seed(q),
        )
        lengths = None, None, q.shape[2], k.shape[2]
        dq, dk, dv = run(*tensors, lse.contiguous(), *lengths, 0.0, scores.is_causal, seed, seed, scale=scores.scale)
        return dq, dk, dv


class _Efficient:
    """Its logsumexp has a multiple of 32 queries, and its mask rows of a multiple of 16 elements in memory."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        run, bias = aten._scaled_dot_product_efficient_attention.default, self._bias(q, k, scores.mask)
        out, lse, *_ = run(*map(_dense, (q, k, v)), bias, True, 0.0, scores.is_causal, scale=scores.scale)
        return out, lse[:, :, : q.shape[2]]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, bias, seed = (
            aten._scaled_dot_product_efficient_attention_backward.default,
            self._bias(q, k, scores.mask),
            _seed(q),
        )
        lse = pad(lse, [0, -lse.shape[2] % 32], value=torch.inf)
        dq, dk, dv, _ = run(
            *map(_dense, (grad, q, k, v)), bias, _dense(out), lse, seed, seed, 0.0, [True, True, True, False],
            scores.is_causal, scale=scores.scale,
        )  # fmt: skip
        return dq, dk, dv

    def _bias(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        return pad(mask, [0, -mask.shape[-1] % 16])[..., : mask.shape[-1]].expand(*q.shape[:3], k.shape[2])


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _seed(x: Tensor) -> Tensor:
    """What kernels read where there is dropout."""
    return torch.empty([], dtype=torch.long, device=x.device)
