"""Windows of a cut dim: which elements each rank needs of its neighbours, and the two functions that fetch and return.

An op that looks at a few elements around each position (a convolution, a shift) needs of a dim cut in chunks only the
edges of the neighbours' chunks. ``windows`` gives each chunk of positions the run of elements that it looks at, all
runs joined; ``overlap_add`` is its adjoint. Both mean the same on one device, where no axes cut the dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardc.language.sharding import ceil_div


@dataclass(frozen=True, slots=True)
class Link:
    """Elements ``start`` to ``start + length`` of the chunk ``source`` stand at ``at`` in a window."""

    source: int
    at: int
    start: int
    length: int


FILLED, AROUND, EDGE, MIRRORED = range(4)  # beyond the dim: nothing, its other end, its last element, it backwards


@dataclass(frozen=True, slots=True)
class Windows:
    """Runs of a dim of ``length`` elements, one for each of ``count`` chunks of ``total`` positions.

    Position ``t`` looks at elements ``start + t * stride`` to ``start + t * stride + span``; the window of a chunk is
    what its positions look at. What lies beyond the dim is filled in, or an element of the dim: see ``FILLED`` and its
    like. With a negative stride a window still runs upwards. Chunks, of the dim and of the positions, are those of
    ``torch.chunk``, save where those of the dim have ``of`` elements each.
    """

    count: int
    length: int
    total: int
    start: int
    stride: int = 1
    span: int = 1
    beyond: int = FILLED
    of: int = 0

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers, as a node's argument."""
        found = (self.count, self.length, self.total, self.start, self.stride, self.span, self.beyond)
        return (*found, self.of) if self.of else found

    @property
    def chunk(self) -> int:
        """Positions of one chunk."""
        return ceil_div(self.total, self.count)

    @property
    def held(self) -> int:
        """Elements of one chunk of the dim."""
        return self.of or ceil_div(self.length, self.count)

    @property
    def size(self) -> int:
        """Elements of one window."""
        return max(0, (self.chunk - 1) * abs(self.stride) + self.span)

    @property
    def is_identity(self) -> bool:
        """Whether the windows are the dim itself."""
        return self == Windows(self.count, self.total, self.total, 0) and self.total % self.count == 0

    def first(self, index: int) -> int:
        """The element where a window starts, which may lie beyond the dim."""
        return self.start + index * self.chunk * self.stride + min(0, (self.chunk - 1) * self.stride)

    def used(self, index: int) -> tuple[int, int]:
        """The part of a window that positions look at: the last chunks have fewer, or none."""
        positions = min(self.chunk, self.total - index * self.chunk)
        if positions <= 0:
            return 0, 0
        size = (positions - 1) * abs(self.stride) + self.span
        return (0, size) if self.stride > 0 else (self.size - size, self.size)


@lru_cache(maxsize=1024)
def links(values: tuple[int, ...]) -> tuple[tuple[Link, ...], ...]:
    """For each window where its elements come from, in the order of the window."""
    window = Windows(*values)
    return tuple(tuple(_links_of(window, index)) for index in range(window.count))


def _links_of(window: Windows, index: int) -> Iterator[Link]:
    first, (at, high) = window.first(index), window.used(index)
    while at < high and window.length:
        element = first + at
        if window.beyond == FILLED and element < 0:
            at += min(-element, high - at)
            continue
        if window.beyond == FILLED and element >= window.length:
            return
        found = _element(element, window)
        source, start = divmod(found, window.held)
        run = min((source + 1) * window.held, window.length) - found
        length = min(run, high - at) if found == element or window.beyond == AROUND else 1
        yield Link(source, at, start, length)
        at += length


def _element(element: Any, window: Windows) -> Any:
    """The element of the dim that stands for one beyond it; of a number, or of each of a tensor."""
    if window.beyond == AROUND:
        return element % window.length
    if window.beyond == MIRRORED:
        element = abs(element)
        last = window.length - 1
        return last - abs(last - element)
    return max(0, min(element, window.length - 1)) if isinstance(element, int) else element.clamp(0, window.length - 1)


def moves_rows(values: tuple[int, ...]) -> bool:
    """Whether any rank sends elements to another."""
    return most_rows_sent(values)[0] != 0


@lru_cache(maxsize=1024)
def most_rows_sent(values: tuple[int, ...]) -> tuple[int, int]:
    """The most elements that any one rank gives to others, and the most that any one takes from others."""
    gives, takes = rows_sent(values)
    return max(gives), max(takes)


def rows_sent(values: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of the dim that each rank gives to others and that it takes from others, to make windows."""
    gives: Counter[int] = Counter()
    takes: Counter[int] = Counter()
    for index, found in enumerate(links(values)):
        for link in found:
            if link.source != index:
                gives[link.source] += link.length
                takes[index] += link.length
    return tuple(gives[i] for i in range(values[0])), tuple(takes[i] for i in range(values[0]))


def windows(x: Any, axes: tuple[str, ...], dim: int, values: tuple[int, ...], fill: float) -> Any:
    """The windows of ``dim`` joined along it: ``count * size`` elements, those that no position looks at ``fill``.

    ``values`` are a ``Windows``'; ``axes`` cut the dim, and give each rank its own window.
    """
    import torch

    window = Windows(*values)
    if not window.length:
        return x.new_full(
            [window.count * window.size if i == dim % x.dim() else n for i, n in enumerate(x.shape)], fill
        )
    elements, there = _elements(window, x.device)
    taken = x.index_select(dim, elements)
    there = there.view([-1 if i == dim % x.dim() else 1 for i in range(x.dim())])
    return torch.where(there, taken, torch.full((), fill, dtype=x.dtype, device=x.device))


def overlap_add(x: Any, axes: tuple[str, ...], dim: int, values: tuple[int, ...]) -> Any:
    """The adjoint of ``windows``: ``length`` elements, each the sum of what the windows have for it."""
    window = Windows(*values)
    shape = [window.length if i == dim % x.dim() else size for i, size in enumerate(x.shape)]
    if not window.length:
        return x.new_zeros(shape)
    elements, there = _elements(window, x.device)
    there = there.view([-1 if i == dim % x.dim() else 1 for i in range(x.dim())])
    return x.new_zeros(shape).index_add(dim, elements, x.masked_fill(~there, 0))


def _elements(window: Windows, device: Any) -> tuple[Any, Any]:
    """For each place in the joined windows the element that stands there, and whether there is one."""
    import torch

    place = torch.arange(window.count * window.size, device=device)
    index, at = place // max(1, window.size), place % max(1, window.size)
    first = window.start + index * (window.chunk * window.stride) + min(0, (window.chunk - 1) * window.stride)
    positions = (window.total - index * window.chunk).clamp(0, window.chunk)
    used = (positions - 1) * abs(window.stride) + window.span
    there = (at < used) if window.stride > 0 else (at >= window.size - used)
    there &= positions > 0
    elements = first + at
    there &= window.length > 0
    if window.beyond == FILLED:
        there &= (elements >= 0) & (elements < window.length)
    return _element(elements, window).clamp(0, max(0, window.length - 1)), there
