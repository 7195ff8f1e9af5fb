"""Windows of a cut dim: the elements that each rank needs from its neighbours, and the ops that fetch and return them.

An op that reads a few elements around each position (a convolution, a shift) needs only the edges of the neighbours'
chunks. ``windows`` returns for each chunk of positions the run of elements that it reads, with all runs joined;
``overlap_add`` is its adjoint. Both mean the same on one device, where no axes cut the dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardc.language.sharding import ceil_div

FILLED, AROUND, EDGE, MIRRORED = range(4)  # beyond the dim: a fill, its other end, its last element, its mirror image


@dataclass(frozen=True, slots=True)
class Windows:
    """Runs of a dim of ``length`` elements, one for each of ``count`` chunks of ``total`` positions.

    Position ``t`` reads elements ``start + t * stride`` to ``start + t * stride + span``; the window of a chunk is
    the run that its positions read. ``beyond`` says what they read beyond the dim: ``FILLED``, ``AROUND``, ``EDGE`` or
    ``MIRRORED``. With a negative stride a window still runs upwards. The dim and the positions are cut as by
    ``torch.chunk``, unless ``fixed_shard_size`` is the number of elements in each chunk of the dim.
    """

    count: int
    length: int
    total: int
    start: int
    stride: int = 1
    span: int = 1
    beyond: int = FILLED
    fixed_shard_size: int = 0

    @property
    def values(self) -> tuple[int, ...]:
        """The fields as a node's argument."""
        values = (self.count, self.length, self.total, self.start, self.stride, self.span, self.beyond)
        return (*values, self.fixed_shard_size) if self.fixed_shard_size else values

    @property
    def chunk(self) -> int:
        """Positions of one chunk."""
        return ceil_div(self.total, self.count)

    @property
    def shard_size(self) -> int:
        """Elements of one chunk of the dim."""
        return self.fixed_shard_size or ceil_div(self.length, self.count)

    @property
    def size(self) -> int:
        """Elements of one window."""
        return max(0, (self.chunk - 1) * abs(self.stride) + self.span)

    @property
    def is_identity(self) -> bool:
        """Whether the windows are the dim itself."""
        return self == Windows(self.count, self.total, self.total, 0) and self.total % self.count == 0

    def first(self, index: Any) -> Any:
        """The first element of a window, possibly beyond the dim; ``index`` is an int or a tensor."""
        return self.start + index * (self.chunk * self.stride) + min(0, (self.chunk - 1) * self.stride)

    def used(self, index: int) -> tuple[int, int]:
        """Start and end of the part of a window that positions read: the last chunks have fewer positions, or none."""
        positions = min(self.chunk, self.total - index * self.chunk)
        if positions <= 0:
            return 0, 0
        size = (positions - 1) * abs(self.stride) + self.span
        return (0, size) if self.stride > 0 else (self.size - size, self.size)


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``start + length`` of the chunk ``source``, placed at ``at`` in a window."""

    source: int
    at: int
    start: int
    length: int


@lru_cache(maxsize=1024)
def segments(values: tuple[int, ...]) -> tuple[tuple[Segment, ...], ...]:
    """The segments of each window, in window order."""
    window = Windows(*values)
    return tuple(tuple(_segments_of(window, index)) for index in range(window.count))


def _segments_of(window: Windows, index: int) -> Iterator[Segment]:
    first, (at, end) = window.first(index), window.used(index)
    while at < end and window.length:
        position = first + at
        if window.beyond == FILLED and position < 0:
            at += min(-position, end - at)
            continue
        if window.beyond == FILLED and position >= window.length:
            return
        element = _element(position, window)
        source, start = divmod(element, window.shard_size)
        run = min((source + 1) * window.shard_size, window.length) - element
        length = min(run, end - at) if element == position or window.beyond == AROUND else 1
        yield Segment(source, at, start, length)
        at += length


def _element(position: Any, window: Windows) -> Any:
    """The element of the dim that is read at a position, possibly beyond the dim; positions are an int or a tensor."""
    last = window.length - 1
    if window.beyond == AROUND:
        return position % window.length
    if window.beyond == MIRRORED:
        return last - abs(last - abs(position))
    return max(0, min(position, last)) if isinstance(position, int) else position.clamp(0, last)


def moves_rows(values: tuple[int, ...]) -> bool:
    """Whether any rank sends elements to another."""
    return most_rows_sent(values)[0] != 0


@lru_cache(maxsize=1024)
def most_rows_sent(values: tuple[int, ...]) -> tuple[int, int]:
    """The most elements that any one rank gives to others, and the most that any one takes from others."""
    gives, takes = rows_sent(values)
    return max(gives), max(takes)


def rows_sent(values: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of the dim that each rank gives to others, and that each takes from others, to make windows."""
    gives, takes = [0] * values[0], [0] * values[0]
    for index, window in enumerate(segments(values)):
        for segment in window:
            if segment.source != index:
                gives[segment.source] += segment.length
                takes[index] += segment.length
    return tuple(gives), tuple(takes)


def windows(x: Any, axes: tuple[str, ...], dim: int, values: tuple[int, ...], fill: float) -> Any:
    """The windows of ``dim`` joined along it: ``count * size`` elements, ``fill`` where no position reads.

    ``values`` are those of a ``Windows``; ``axes`` cut the dim, so that each rank gets its own window.
    """
    import torch

    window = Windows(*values)
    if not window.length:
        return x.new_full(_with_size(x, dim, window.count * window.size), fill)
    elements, is_read = _elements(window, x, dim)
    return torch.where(is_read, x.index_select(dim, elements), torch.full((), fill, dtype=x.dtype, device=x.device))


def overlap_add(x: Any, axes: tuple[str, ...], dim: int, values: tuple[int, ...]) -> Any:
    """The adjoint of ``windows``: ``length`` elements, each the sum over the windows that hold it."""
    window = Windows(*values)
    result = x.new_zeros(_with_size(x, dim, window.length))
    if not window.length:
        return result
    elements, is_read = _elements(window, x, dim)
    return result.index_add(dim, elements, x.masked_fill(~is_read, 0))


def _with_size(x: Any, dim: int, size: int) -> list[int]:
    return [size if i == dim % x.dim() else other for i, other in enumerate(x.shape)]


def _elements(window: Windows, x: Any, dim: int) -> tuple[Any, Any]:
    """The element at each place of the joined windows, and whether a position reads it, shaped to broadcast to x."""
    import torch

    place = torch.arange(window.count * window.size, device=x.device)
    index, at = place // max(1, window.size), place % max(1, window.size)
    positions = (window.total - index * window.chunk).clamp(0, window.chunk)
    used = (positions - 1) * abs(window.stride) + window.span
    is_read = (at < used) if window.stride > 0 else (at >= window.size - used)
    is_read &= positions > 0
    elements = window.first(index) + at
    if window.beyond == FILLED:
        is_read &= (elements >= 0) & (elements < window.length)
    return _element(elements, window).clamp(0, window.length - 1), is_read.view(
        [-1 if i == dim % x.dim() else 1 for i in range(x.dim())]
    )
