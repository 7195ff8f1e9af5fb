"""The steps between two shardings that are plain on every dim on which they differ: the search, with axes as atoms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from shardc.collective import Kind, Step, steps_sharding
from shardc.mesh import Axes, AxisPart, merge_parts, part_ends, split_parts, unused_parts
from shardc.payload import wire_numel
from shardc.sharding import WHOLE, Sharding, ceil_div, num_shards

from .move_axes import LATENCY, Atoms, Move, Space, State
from .search_moves import cheapest_way, may_be_shared

Args = tuple[object, ...]
MAX_SPLIT = 4  # axes are split for the sake of a permute only into so many parts in all
MAX_SPARE = 3  # a dim that does not change is used on the way only with so few parts in play


def plain_steps(src: Sharding, dst: Sharding, shape: tuple[int, ...], reorders: bool = False) -> Sequence[Step]:
    """The steps between two shardings that are plain on every dim on which they differ.

    ``reorders``: a permute is among them, to be one of devices too, if only one of them.
    """
    space, atoms, active, ends = search_space(src, dst, shape)
    space = replace(space, reorders=reorders)
    way = cheapest_way(space) or cheapest_way(replace(space, permutes=True))
    if way is None:
        via = replace(dst, dims=tuple(a if a == b else WHOLE for a, b in zip(src.dims, dst.dims, strict=True)))
        return (*plain_steps(src, via, shape), *plain_steps(via, dst, shape))
    steps = list(steps_of(way.moves, space, atoms, active, src, shape))
    spare = _unused_part(src, dst) if may_be_shared(space, way) else ()
    if spare:
        space = replace(
            _space(src, dst, shape, ends, atoms + spare, active), reorders=reorders, spare=frozenset({len(atoms)})
        )
        shared = cheapest_way(space)
        others = list(steps_of(shared.moves, space, atoms + spare, active, src, shape)) if shared else steps
        steps = min(steps, others, key=lambda steps: _sent(src, steps, shape))
    return steps


def search_space(
    src: Sharding, dst: Sharding, shape: tuple[int, ...], is_wide: bool = False
) -> tuple[Space, Axes, list[int], dict[str, list[int]]]:
    """Where a search goes: the space, its atoms as axis parts, the dims in play and where axes are split.

    ``is_wide``: a dim that does not change is in play too, and an axis may cut it on the way.
    """
    ends = _ends_in_play(src, dst, shape)
    start, target = _rest(src, dst, ends)
    in_play = {part for axes in (*start, *target, _closing(src, dst, ends)) for part in axes}
    atoms = tuple(sorted(in_play, key=lambda part: (src.mesh.axis_names.index(part.name), part.pre)))
    active = [i for i in range(len(shape)) if start[i] or target[i]]
    if len(atoms) <= MAX_SPARE:
        active = sorted(active + _spare_dim(src, dst, shape, active, atoms if is_wide else sum(target, ())))
    return _space(src, dst, shape, ends, atoms, active), atoms, active, ends


def steps_of(
    moves: tuple[Move, ...], space: Space, atoms: Axes, active: list[int], src: Sharding, shape: tuple[int, ...]
) -> Iterator[Step]:
    """The moves of a search as steps."""
    sharding = src
    for kind, args in _calls(_joined_slices(moves, space.loose), atoms, active, src):
        sharding = steps_sharding(sharding, kind, args)
        yield Step(kind, args, sharding, shape)


def _sent(src: Sharding, steps: Sequence[Step], shape: tuple[int, ...]) -> int:
    """Elements that one rank sends, padding included, and for each collective some part of the larger end."""
    held = [src.local_shape(shape), *(step.sharding.local_shape(step.shape) for step in steps)]
    latency = max(map(math.prod, (held[0], held[-1]))) // LATENCY
    return sum(sent + latency for taken, step in zip(held, steps, strict=False) if (sent := wire_numel(step, taken)))


def _space(
    src: Sharding, dst: Sharding, shape: tuple[int, ...], ends: dict[str, list[int]], atoms: Axes, active: list[int]
) -> Space:
    number = {part: i for i, part in enumerate(atoms)}
    start, target = ([tuple(number[part] for part in side[i]) for i in active] for side in _rest(src, dst, ends))
    kept = [num_shards(split_parts(src.dims[i].axes, ends)) // num_shards(_rest(src, dst, ends)[0][i]) for i in active]
    loose = _uneven_dims(src, dst, shape)
    joins = ((a, b) for a, b in permutations(atoms, 2) if len(merge_parts((a, b))) == 1)
    closing = tuple(sorted(number[part] for part in _closing(src, dst, ends)))
    return Space(
        tuple(part.size for part in atoms),
        tuple(ceil_div(shape[i], pieces) for i, pieces in zip(active, kept, strict=True)),
        State(tuple(start), closing),
        State(tuple(target), ()),
        frozenset(at for at, dim in enumerate(active) if dim in loose),
        frozenset((number[a], number[b]) for a, b in joins),
    )


def _ends_in_play(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> dict[str, list[int]]:
    """Where axes are split: at the ends of both sides' parts, and so that axes that trade places are of one size."""
    ends = part_ends(src.used_parts + dst.used_parts)
    fine = ends
    if any(src.dims[i] != dst.dims[i] for i in _uneven_dims(src, dst, shape)):
        return ends
    while (split := _uneven_pair(*_rest(src, dst, fine))) is not None:
        fine = {**fine, split.name: sorted([*fine[split.name], split.pre * split.size])}
    in_play = {part for axes in sum(_rest(src, dst, fine), ()) for part in axes}
    return fine if len(in_play) <= MAX_SPLIT else ends


def _uneven_dims(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> set[int]:
    """The dims that are cut unevenly on either side."""
    dims = enumerate(zip(src.dims, dst.dims, shape, strict=True))
    return {i for i, (a, b, size) in dims if not (a.is_even(size) and b.is_even(size))}


def _uneven_pair(src: tuple[Axes, ...], dst: tuple[Axes, ...]) -> AxisPart | None:
    """A part that cannot trade places with parts of the other side as it is: the major piece that could."""
    for ours, theirs in zip(src, dst, strict=True):
        while ours and theirs and ours[0].size == theirs[0].size:
            ours, theirs = ours[1:], theirs[1:]
        if ours and theirs:
            first = math.gcd(ours[0].size, theirs[0].size)
            common = first if first > 1 else math.gcd(num_shards(ours), num_shards(theirs))
            for part in (ours[0], theirs[0]) if first > 1 else ours + theirs:
                if 1 < math.gcd(part.size, common) < part.size:
                    return part.major(math.gcd(part.size, common))
    return None


def _rest(src: Sharding, dst: Sharding, ends: dict[str, list[int]]) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
    """What cuts each dim on either side, without what both have in common at the major end."""
    pairs = [_without_common(split_parts(a.axes, ends), split_parts(b.axes, ends)) if a != b else ((), ())
             for a, b in zip(src.dims, dst.dims, strict=True)]  # fmt: skip
    return tuple(ours for ours, _ in pairs), tuple(theirs for _, theirs in pairs)


def _without_common(ours: Axes, theirs: Axes) -> tuple[Axes, Axes]:
    common = 0
    while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
        common += 1
    return ours[common:], theirs[common:]


def _spare_dim(src: Sharding, dst: Sharding, shape: tuple[int, ...], active: list[int], new: Axes) -> list[int]:
    """A dim that does not change, on which the new cuts can wait."""
    same = [i for i, cut in enumerate(dst.dims) if i not in active and cut == src.dims[i] and not cut.minor and new]
    return [i for i in same if dst.dims[i].local_size(shape[i]) % num_shards(new) == 0][:1]


def _unused_part(src: Sharding, dst: Sharding) -> Axes:
    """The largest part of an axis that neither side uses, to share what is moved; none if all are used."""
    parts = unused_parts(src.mesh, src.used_parts + dst.used_parts)
    largest = max(parts, key=lambda part: part.size, default=None)
    return (largest,) if largest is not None and largest.size > 1 else ()


def _closing(src: Sharding, dst: Sharding, ends: dict[str, list[int]]) -> Axes:
    """The parts whose reduction is to be done."""
    still = split_parts(dst.partial_axes, ends)
    return tuple(part for part in split_parts(src.partial_axes, ends) if part not in still)


def _joined_slices(moves: tuple[Move, ...], loose: frozenset[int]) -> Iterator[Move]:
    """The moves, with neighbouring slices of one dim as one, where the dim is cut evenly."""
    waiting: dict[int, Move] = {}
    for move in moves:
        if move.kind == "shard_slice":
            dim = move.dims[0]
            if dim in loose:
                yield from filter(None, [waiting.pop(dim, None)])
            earlier = waiting.get(dim, move._replace(atoms=()))
            waiting[dim] = move._replace(atoms=earlier.atoms + move.atoms)
            continue
        yield from waiting.values()
        waiting.clear()
        yield move
    yield from waiting.values()


def _calls(moves: Iterator[Move], atoms: Axes, active: list[int], src: Sharding) -> Iterator[tuple[Kind, Args]]:
    """Each move as a call's arguments after the value."""

    def printed(numbers: Atoms) -> tuple[str, ...]:
        return tuple(map(src.mesh.print_part, merge_parts(atoms[i] for i in numbers)))

    for move in moves:
        if move.kind == "collective_permute":
            windows = [_window(a, b) for a, b in zip(move.before.lists, move.after.lists, strict=True)]
            yield move.kind, tuple(sum((printed(window[i]) for window in windows), ()) for i in (0, 1))
            continue
        op = (src.partial[0][1],) if move.kind in ("all_reduce", "reduce_scatter") else ()
        yield move.kind, (printed(move.atoms), *op, *(active[dim] for dim in move.dims))


def _window(ours: Atoms, theirs: Atoms) -> tuple[Atoms, Atoms]:
    """What differs between two lists, without their common ends."""
    while ours and theirs and ours[0] == theirs[0]:
        ours, theirs = ours[1:], theirs[1:]
    while ours and theirs and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    return ours, theirs
