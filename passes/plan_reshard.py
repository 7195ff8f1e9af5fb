"""From one sharding to another: the cheapest sequence of collectives, as pure values.

Both shardings are first seen alike: dims with cuts in blocks as one dim for each block level, axes split where parts
of both begin or end. What both share at the major end of a dim stays; the rest is searched (plain_steps.py). Where
two sides cannot be seen alike, neighbours give each other the edges of their chunks where that is enough, else those
dims are gathered and sliced again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from shardc.collective import Step
from shardc.cut import split_dim, without_idle
from shardc.mesh import merge_parts, part_ends, split_parts
from shardc.sharding import WHOLE, DimSharding, Sharding, TensorType, ceil_div, num_shards
from shardc.window import Windows

from .plain_steps import plain_steps


@lru_cache(maxsize=4096)
def plan_reshard(src: Sharding, dst: Sharding, type: TensorType) -> tuple[Step, ...]:
    """The steps from ``src`` to ``dst``; the last step's sharding is ``dst``. ``dst`` is partial only where ``src`` is.

    Local values on the way are never larger than at both ends, save where cuts do not line up.
    """
    assert src.mesh == dst.mesh and is_open(src, dst), (src, dst)
    sizes = [common_subdims(*cuts) for cuts in zip(src.dims, dst.dims, type.shape, strict=True)]
    fine = [_refined(sharding, type.shape, sizes) for sharding in (src, dst)]
    split = _split_uneven(src, dst, type.shape, fine)
    if split:
        filled = replace(dst, dims=tuple(without_idle(*cut)[0] for cut in zip(dst.dims, type.shape, strict=True)))
        if filled not in (src, dst):
            return (*plan_reshard(src, filled, type), *_idle_slices(filled, dst, type))
        stops = [_whole_at(src, split), _whole_at(dst, split)]
        ways = pairwise([src, *(stop for stop in stops if stop != src), dst])
        return tuple(step for one, two in ways for step in plan_reshard(one, two, type))
    apart = _apart(src, dst, sizes, fine)
    moved = [i for i in sorted(apart) if has_chunks_in_a_row(src.dims[i], dst.dims[i], type.shape[i])]
    if moved:
        return _rechunked(src, dst, type, moved[0])
    if apart:
        via = _whole_at(dst, apart)
        return plan_reshard(src, via, type) + plan_reshard(via, dst, type)
    shape = tuple(size for sub in sizes for size in sub or ())
    steps = list(plain_steps(fine[0], fine[1], shape))
    if shape != type.shape and steps:
        view = Step("view", (list(shape),), fine[0], shape)
        steps = [view, *steps, Step("view", (list(type.shape),), dst, type.shape)]
    return (*steps[:-1], replace(steps[-1], sharding=dst)) if steps else ()


def is_open(src: Sharding, dst: Sharding) -> bool:
    """Whether every reduction that is open in ``dst`` is open in ``src``."""
    ends = part_ends(src.partial_axes + dst.partial_axes)
    fine = [{(piece, op) for part, op in at.partial for piece in split_parts((part,), ends)} for at in (src, dst)]
    return fine[1] <= fine[0]


# Where the same axes cut both sides in a row, in chunks of different sizes, neighbours give each other their edges.


def has_chunks_in_a_row(src: DimSharding, dst: DimSharding, size: int) -> bool:
    """Whether each rank holds one run of the dim on both sides, in the order of the same axes."""

    def is_in_a_row(cut: DimSharding) -> bool:
        (lead, axes), *minor = cut.subdims(size)
        first, *rest = axes or (None,)
        return (
            first is not None
            and ceil_div(lead, first.size) % num_shards(tuple(rest)) == 0
            and not any(cuts for _, cuts in minor)
        )

    return src.axes == dst.axes and size > 0 and is_in_a_row(src) and is_in_a_row(dst)


def _rechunked(src: Sharding, dst: Sharding, type: TensorType, dim: int) -> tuple[Step, ...]:
    """The dim's chunks as on the other side, first of all where that makes them smaller, else last."""
    size, cut = type.shape[dim], dst.dims[dim]
    held, chunk = src.dims[dim].local_size(size), cut.local_size(size)
    count, inner = num_shards(cut.axes), math.prod(sub for sub, _ in cut.minor)
    total = size if ceil_div(size, count) == chunk else count * chunk
    window = Windows(count, size, total, 0, of=held)
    args = (tuple(map(src.mesh.print_part, cut.axes)), dim, window.values, inner)
    if chunk <= held:
        via = src.with_dim(dim, cut)
        return (Step("rechunk", args, via, type.shape), *plan_reshard(via, dst, type))
    return (*plan_reshard(src, dst.with_dim(dim, src.dims[dim]), type), Step("rechunk", args, dst, type.shape))


# Seeing both sides alike.


def common_subdims(src: DimSharding, dst: DimSharding, size: int) -> tuple[int, ...] | None:
    """The dim as separate dims on which both cuts are plain; None if there are none."""
    if src == dst or not (src.minor or dst.minor):
        return (size,)
    if WHOLE in (src, dst):
        return tuple(sub for sub, _ in (dst if src == WHOLE else src).subdims(size))
    marks: Counter[int] = Counter()  # how many elements lie behind each border between two dims
    for cut in (src, dst):
        marks |= Counter([size, 1, *(math.prod(sub for sub, _ in cut.minor[i:]) for i in range(len(cut.minor)))])
    borders = sorted(marks.elements(), reverse=True)
    if any(major % minor for major, minor in pairwise(borders)):
        return None
    sizes = tuple(major // minor for major, minor in pairwise(borders))
    for cut in (src, dst):
        subs = _seen_as(cut, size, sizes)
        taken = merge_parts(part for sub in subs for part in sub.axes)
        if taken != merge_parts(cut.all_axes) or any(sub.minor for sub in subs):
            return None
    return sizes


def _refined(sharding: Sharding, shape: tuple[int, ...], sizes: list[tuple[int, ...] | None]) -> Sharding:
    """The sharding on the separate dims; a dim that is not split keeps its cuts as they are."""
    dims: list[DimSharding] = []
    for dim, size, subs in zip(sharding.dims, shape, sizes, strict=True):
        dims += [dim] if subs is None or len(subs) == 1 else _seen_as(dim, size, subs)
    return replace(sharding, dims=tuple(dims))


def _seen_as(cut: DimSharding, size: int, sizes: tuple[int, ...]) -> tuple[DimSharding, ...]:
    """The cut on separate dims of these sizes."""
    subdims = cut.subdims(size)
    if tuple(sub for sub, _ in subdims) == sizes:
        return tuple(DimSharding(axes) for _, axes in subdims)
    return split_dim(cut, size, sizes)


def _apart(src: Sharding, dst: Sharding, sizes: list[tuple[int, ...] | None], fine: list[Sharding]) -> set[int]:
    """The dims that cannot be seen alike: blocks that do not line up, or an axis in parts that do not."""
    ends = part_ends(part for sharding in fine for part in sharding.used_parts)
    broken = {name for name, found in ends.items() if any(end % start for start, end in pairwise(found))}
    names = [{part.name for part in a.all_axes + b.all_axes} for a, b in zip(src.dims, dst.dims, strict=True)]
    return {i for i, used in enumerate(names) if sizes[i] is None or used & broken}


def _whole_at(sharding: Sharding, dims: set[int]) -> Sharding:
    return replace(sharding, dims=tuple(WHOLE if i in dims else dim for i, dim in enumerate(sharding.dims)))


def _split_uneven(src: Sharding, dst: Sharding, shape: tuple[int, ...], fine: list[Sharding]) -> set[int]:
    """The dims that change, and are cut unevenly by an axis of which the other side knows parts.

    Chunks of the ceiling by an axis are not those by its parts, one after the other, unless it divides what it cuts.
    """
    ends = part_ends(part for sharding in fine for part in sharding.used_parts)
    return {
        i
        for i, (*cuts, size) in enumerate(zip(src.dims, dst.dims, shape, strict=True))
        if cuts[0] != cuts[1] and any(not cut.is_even(size) and _is_split_unevenly(cut, size, ends) for cut in cuts)
    }


def _idle_slices(filled: Sharding, dst: Sharding, type: TensorType) -> Iterator[Step]:
    """Local slices along which all but the first ranks are left with nothing."""
    for dim, size in enumerate(type.shape):
        filled = filled.with_dim(dim, dst.dims[dim])
        if idle := without_idle(dst.dims[dim], size)[1]:
            yield Step("shard_slice", (tuple(map(dst.mesh.print_part, idle)), dim), filled, type.shape)


def _is_split_unevenly(cut: DimSharding, size: int, ends: dict[str, list[int]]) -> bool:
    """Whether an axis is in parts on the other side that does not divide what it cuts here."""
    for room, axes in cut.subdims(size):
        for part in axes:
            if room % part.size and len(split_parts((part,), ends)) > 1:
                return True
            room = ceil_div(room, part.size)
    return False
