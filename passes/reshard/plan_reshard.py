"""The cheapest sequence of collectives from one sharding to another, as pure values.

This file decides between all_gather and all_to_all, all_reduce and reduce_scatter, one step and several. Both shardings
are first brought to common terms: a dim cut in blocks becomes one dim for each block level, and an axis is split where
parts of either sharding begin or end. The axes that both share at the major end of a dim stay; the rest is a shortest
path (move_axes.py). Dims without common terms are gathered and sliced again, or neighbours exchange the edges of their
chunks if that is enough.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, permutations
from typing import TYPE_CHECKING

from shardc.language.cut import split_dim, without_idle
from shardc.language.errors import ShardingError
from shardc.language.machine import CollectiveKind
from shardc.language.mesh import MICROBATCH, Axes, AxisPart, Mesh, merge_parts, part_ends, split_parts, unused_parts
from shardc.language.partition import P
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, ceil_div, dtype_name, num_shards
from shardc.language.windows import Windows
from shardc.program.collective import (
    Collective,
    Step,
    group_size,
    payload_numel,
    rechunked_numel,
    steps_sharding,
    wire_bytes,
    wire_bytes_total,
    wire_numel,
)

from .move_axes import LATENCY, Atoms, Move, Space, State, cheapest_path, may_be_shared

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=4096)
def plan_reshard(src: Sharding, dst: Sharding, type: TensorType) -> tuple[Step, ...]:
    """The steps from ``src`` to ``dst``; the last step's sharding is ``dst``. ``dst`` is partial only where ``src`` is.

    No local value on the way is larger than at the larger end, unless cuts do not line up.
    """
    assert src.mesh == dst.mesh and can_reach(src, dst), (src, dst)
    sizes = [common_subdims(*cuts) for cuts in zip(src.dims, dst.dims, type.shape, strict=True)]
    refined: list[Sharding] = []  # on the separate dims; a dim that is not split keeps its cuts as they are
    for sharding in (src, dst):
        dims = [
            (cut,) if subs is None or len(subs) == 1 else _on_subdims(cut, size, subs)
            for cut, size, subs in zip(sharding.dims, type.shape, sizes, strict=True)
        ]
        refined.append(replace(sharding, dims=sum(dims, ())))
    split = _split_uneven(src, dst, type.shape, refined)
    if split:
        return _by_whole_dims(src, dst, type, split)
    apart = _apart(src, dst, sizes, refined)
    for i in sorted(apart):
        if has_chunks_in_a_row(src.dims[i], dst.dims[i], type.shape[i]):
            return _rechunked(src, dst, type, i)
    if apart:
        via = _whole_at(dst, apart)
        return plan_reshard(src, via, type) + plan_reshard(via, dst, type)
    shape = tuple(size for sub in sizes for size in sub or ())
    steps = list(plain_steps(refined[0], refined[1], shape))
    if shape != type.shape and steps:
        view = Step("view", (list(shape),), refined[0], shape)
        steps = [view, *steps, Step("view", (list(type.shape),), dst, type.shape)]
    return (*steps[:-1], replace(steps[-1], sharding=dst)) if steps else ()


def _by_whole_dims(src: Sharding, dst: Sharding, type: TensorType, dims: set[int]) -> tuple[Step, ...]:
    """Steps that gather ``dims`` and cut them again; axes that leave some ranks without elements slice last."""
    parts = [without_idle(cut, size) for cut, size in zip(dst.dims, type.shape, strict=True)]
    filled = replace(dst, dims=tuple(cut for cut, _ in parts))
    if filled in (src, dst):
        stops = [stop for stop in (_whole_at(src, dims), _whole_at(dst, dims)) if stop != src]
        return tuple(step for one, two in pairwise([src, *stops, dst]) for step in plan_reshard(one, two, type))
    steps = list(plan_reshard(src, filled, type))
    for dim, (_, idle) in enumerate(parts):
        filled = filled.with_dim(dim, dst.dims[dim])
        if idle:
            args = tuple(map(dst.mesh.print_part, idle)), dim
            steps.append(Step("shard_slice", args, filled, type.shape))
    return tuple(steps)


def can_reach(src: Sharding, dst: Sharding) -> bool:
    """Whether every reduction that is open in ``dst`` is open in ``src``."""
    ends = part_ends(src.partial_axes + dst.partial_axes)
    fine = [{(piece, op) for part, op in at.partial for piece in split_parts((part,), ends)} for at in (src, dst)]
    return fine[1] <= fine[0]


def move_bytes(src: Sharding, dst: Sharding, type: TensorType) -> int:
    """Bytes that a rank sends to bring a value from one sharding to another."""
    steps = () if src == dst else plan_reshard(src, dst, type)
    return sum(collective.wire_bytes for collective in collectives_of_steps(src, steps, type))


def collectives_of_steps(
    before: Sharding, steps: Sequence[Step], type: TensorType, is_reordered: bool = False
) -> Iterator[Collective]:
    """The collectives among the steps. ``is_reordered``: a permute also reorders devices, and sends whole shards."""
    shape = type.shape
    for step in steps:
        if step.kind not in ("view", "shard_slice", "mask_padding"):
            collective = _collective(step, before.local_shape(shape), type.dtype)
            if is_reordered and step.kind == "collective_permute":
                total = collective.bytes * step.sharding.mesh.size
                collective = replace(collective, wire_bytes=collective.bytes, wire_bytes_total=total)
            yield collective
        before, shape = step.sharding, step.shape


def _collective(step: Step, local_shape: tuple[int, ...], dtype: torch.dtype) -> Collective:
    assert step.kind != "view"
    mesh, after = step.sharding.mesh, step.sharding.local_shape(step.shape)
    if step.kind == "rechunk":
        payload, sent = (numel * dtype.itemsize for numel in rechunked_numel(step.args, local_shape))
    else:
        count = group_size(mesh, step.kind, step.args)
        payload = payload_numel(step.kind, step.args, count, local_shape, after) * dtype.itemsize
        sent = wire_bytes(step.kind, payload, count)
    total = wire_bytes_total(mesh, step.kind, step.args, sent)
    kind: CollectiveKind = "collective_permute" if step.kind == "rechunk" else step.kind
    return Collective(kind, step.args[0], dtype_name(dtype), local_shape, after, payload, sent, total)


# The public function, of shardings as users write them.


def reshard_plan(
    mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, src: P | Sharding, dst: P | Sharding
) -> tuple[Collective, ...]:
    """The collectives of the cheapest way from one sharding to another, without local slices.

    Args:
        mesh: a Mesh.
        shape: sizes of the whole value.
        dtype: a dtype of torch.
        src: a P, or a Sharding that may be partial. A Sharding may be on a mesh of the same axes with its devices in
            another order.
        dst: the same.

    Returns:
        The collectives in order, with the bytes that a rank sends.

    Raises:
        ShardingError: if a sharding does not fit the shape, or ``dst`` is partial where ``src`` is not.

    Examples:
        >>> import torch, shardc
        >>> from shardc import P
        >>> shardc.reshard_plan(shardc.Mesh(tp=4), (8, 64), torch.float32, P("tp"), P(None, "tp"))
        (<all_to_all over tp, forward, 384 bytes sent>,)
    """
    mesh, type_ = Mesh.of(mesh), _type(shape, dtype)
    before, after = _sharding(mesh, type_, src, "src"), _sharding(mesh, type_, dst, "dst")
    moved = replace(before, mesh=after.mesh)
    if not can_reach(moved, after):
        raise ShardingError("dst", after.text(type_), f"src is {before.text(type_)}: no reduction can be opened again",
                            "make dst partial only where src is")  # fmt: skip
    if before.mesh == after.mesh or _is_same_on_devices(before, after.mesh) or _is_same_on_devices(after, before.mesh):
        return tuple(collectives_of_steps(moved, plan_reshard(moved, after, type_), type_))
    # One step permutes the devices: steps before it are on the first mesh, steps after it on the other.
    is_plain = not any(cut.minor for cut in moved.dims + after.dims)
    if is_plain and moved.is_even(type_.shape) and after.is_even(type_.shape):
        steps = plain_steps(moved, after, type_.shape, reorders=True)
    else:
        permute = Step("collective_permute", ((), ()), moved, type_.shape)
        steps = (permute, *plan_reshard(moved, after, type_))
    return tuple(collectives_of_steps(moved, steps, type_, is_reordered=True))


def _type(shape: object, dtype: object) -> TensorType:
    sizes = tuple(shape) if isinstance(shape, Sequence) else (-1,)
    if any(isinstance(size, (str, float)) or (isinstance(size, int) and size < 0) for size in sizes):
        raise ShardingError("shape", repr(shape), "it holds the sizes of dims, 0 or more", "write for example (8, 64)")
    if type(dtype).__name__ != "dtype":
        raise ShardingError("dtype", repr(dtype), "it is no dtype of torch", "write for example torch.float32")
    return TensorType(sizes, dtype)  # type: ignore[arg-type]


def _sharding(mesh: Mesh, type: TensorType, spec: P | Sharding, who: str) -> Sharding:
    if isinstance(spec, P):
        return spec.sharding(mesh, type.shape, who)
    if not isinstance(spec, Sharding):
        raise ShardingError(who, repr(spec), "it is no P and no Sharding", "write for example P('dp', None)")
    is_same = (spec.mesh.axis_names, spec.mesh.shape) == (mesh.axis_names, mesh.shape)
    if len(spec.dims) != len(type.shape) or not is_same:
        raise ShardingError(who, f"{spec} on {spec.mesh}, shape {list(type.shape)}, {mesh}",
                            "the sharding does not fit: mesh or number of dims",
                            "make the sharding on this mesh for this shape")  # fmt: skip
    return spec


def _is_same_on_devices(sharding: Sharding, other: Mesh) -> bool:
    """Whether every device holds the same piece, and the same summands, on either mesh."""
    parts = [*(cut.all_axes for cut in sharding.dims), sharding.partial_axes]
    places = [{mesh.rank(position): position for position in range(mesh.size)} for mesh in (sharding.mesh, other)]
    return all(
        sharding.mesh.index(places[0][rank], axes) == other.index(places[1][rank], axes)
        for rank in range(other.size)
        for axes in parts
    )


# If the same axes cut both sides in order, in chunks of different sizes, neighbours exchange the edges of their chunks.


def has_chunks_in_a_row(src: DimSharding, dst: DimSharding, size: int) -> bool:
    """Whether each rank holds one run of the dim on both sides, in the order of the same axes."""
    if src.axes != dst.axes or size == 0:
        return False
    for cut in (src, dst):
        (lead, axes), *minor = cut.subdims(size)
        if not axes or any(cuts for _, cuts in minor) or ceil_div(lead, axes[0].size) % num_shards(axes[1:]):
            return False
    return True


def _rechunked(src: Sharding, dst: Sharding, type: TensorType, dim: int) -> tuple[Step, ...]:
    """Steps that change the dim's chunks to those of ``dst``: first if that makes them smaller, else last."""
    size, cut = type.shape[dim], dst.dims[dim]
    before, after, count = src.dims[dim].local_size(size), cut.local_size(size), num_shards(cut.axes)
    total = size if ceil_div(size, count) == after else count * after
    window = Windows(count, size, total, 0, fixed_shard_size=before)
    inner = math.prod(sub for sub, _ in cut.minor)
    args = (tuple(map(src.mesh.print_part, cut.axes)), dim, window.values, inner)
    if after <= before:
        via = src.with_dim(dim, cut)
        return (Step("rechunk", args, via, type.shape), *plan_reshard(via, dst, type))
    return (*plan_reshard(src, dst.with_dim(dim, src.dims[dim]), type), Step("rechunk", args, dst, type.shape))


# Common terms for both sides.


def common_subdims(src: DimSharding, dst: DimSharding, size: int) -> tuple[int, ...] | None:
    """The dim as separate dims on which both cuts are plain; None if there are none."""
    if src == dst or not (src.minor or dst.minor):
        return (size,)
    if WHOLE in (src, dst):
        return tuple(sub for sub, _ in (dst if src == WHOLE else src).subdims(size))
    marks: Counter[int] = Counter()  # the number of elements that are minor to each border between dims
    for cut in (src, dst):
        marks |= Counter([size, 1, *(math.prod(sub for sub, _ in cut.minor[i:]) for i in range(len(cut.minor)))])
    borders = sorted(marks.elements(), reverse=True)
    if any(major % minor for major, minor in pairwise(borders)):
        return None
    sizes = tuple(major // minor for major, minor in pairwise(borders))
    for cut in (src, dst):
        subs = _on_subdims(cut, size, sizes)
        parts = merge_parts(part for sub in subs for part in sub.axes)
        if parts != merge_parts(cut.all_axes) or any(sub.minor for sub in subs):
            return None
    return sizes


def _on_subdims(cut: DimSharding, size: int, sizes: tuple[int, ...]) -> tuple[DimSharding, ...]:
    """The cut on separate dims of these sizes."""
    subdims = cut.subdims(size)
    if tuple(sub for sub, _ in subdims) == sizes:
        return tuple(DimSharding(axes) for _, axes in subdims)
    return split_dim(cut, size, sizes)


def _apart(src: Sharding, dst: Sharding, sizes: list[tuple[int, ...] | None], fine: list[Sharding]) -> set[int]:
    """The dims without common terms: blocks that do not line up, or an axis in parts that do not."""
    ends = part_ends(part for sharding in fine for part in sharding.used_parts)
    broken = {name for name, at in ends.items() if any(end % start for start, end in pairwise(at))}
    names = [{part.name for part in a.all_axes + b.all_axes} for a, b in zip(src.dims, dst.dims, strict=True)]
    return {i for i, used in enumerate(names) if sizes[i] is None or used & broken}


def _whole_at(sharding: Sharding, dims: set[int]) -> Sharding:
    return replace(sharding, dims=tuple(WHOLE if i in dims else dim for i, dim in enumerate(sharding.dims)))


def _split_uneven(src: Sharding, dst: Sharding, shape: tuple[int, ...], fine: list[Sharding]) -> set[int]:
    """The dims that change and are cut unevenly by an axis that the other side has in parts.

    Chunks of ceiling size by an axis differ from those by its parts in turn, unless the axis divides what it cuts.
    """
    ends = part_ends(part for sharding in fine for part in sharding.used_parts)
    dims: set[int] = set()
    for i, (ours, theirs, size) in enumerate(zip(src.dims, dst.dims, shape, strict=True)):
        uneven = [cut for cut in (ours, theirs) if ours != theirs and not cut.is_even(size)]
        for room, axes in (subdim for cut in uneven for subdim in cut.subdims(size)):
            for part in axes:
                if room % part.size and len(split_parts((part,), ends)) > 1:
                    dims.add(i)
                room = ceil_div(room, part.size)
    return dims


# The search, on dims on which both cuts are plain.


MAX_SPLIT = 4  # most parts, over all axes, that axes are split into for a permute
MAX_SPARE = 4  # most parts in play with which an unchanged dim may be cut on the way
MAX_SHARED = 5  # most parts in play up to which parts that neither end uses are added, though always one


def plain_steps(src: Sharding, dst: Sharding, shape: tuple[int, ...], reorders: bool = False) -> Sequence[Step]:
    """The steps between two shardings that are plain on every dim on which they differ.

    ``reorders``: one step is a permute, which reorders devices too, even if it does nothing else.
    """
    space, atoms, active, ends = search_space(src, dst, shape)
    space = replace(space, reorders=reorders)
    path = cheapest_path(space) or cheapest_path(replace(space, permutes=True))
    if path is None:
        via = replace(dst, dims=tuple(a if a == b else WHOLE for a, b in zip(src.dims, dst.dims, strict=True)))
        return (*plain_steps(src, via, shape), *plain_steps(via, dst, shape))
    steps = list(steps_of(path.moves, space, atoms, active, src, shape))
    unused = [
        part
        for part in unused_parts(src.mesh, src.used_parts + dst.used_parts)
        if part.size > 1 and part.name != MICROBATCH  # microbatches run in turn, so they cannot share a value
    ]
    if not unused or not may_be_shared(space, path):
        return steps
    spare = tuple(sorted(unused, key=lambda part: -part.size)[: max(1, MAX_SHARED - len(atoms))])
    atoms, numbers = atoms + spare, range(len(atoms), len(atoms + spare))
    space = replace(_space(src, dst, shape, ends, atoms, active), reorders=reorders, spare=frozenset(numbers))
    if (shared := cheapest_path(space)) is None:
        return steps
    others = list(steps_of(shared.moves, space, atoms, active, src, shape))

    def cost(steps: Sequence[Step]) -> int:
        """Elements that one rank sends, padding included, and a part of the larger end for each collective."""
        shapes = [src.local_shape(shape), *(step.sharding.local_shape(step.shape) for step in steps)]
        latency = max(math.prod(shapes[0]), math.prod(shapes[-1])) // LATENCY
        return sum(sent + latency for at, step in zip(shapes, steps, strict=False) if (sent := wire_numel(step, at)))

    return min(steps, others, key=cost)


def search_space(
    src: Sharding, dst: Sharding, shape: tuple[int, ...], is_wide: bool = False
) -> tuple[Space, Axes, list[int], dict[str, list[int]]]:
    """The space of a search, its atoms as axis parts, the dims in play, and the places where axes are split.

    Axes are split at the ends of both sides' parts, and so that axes that trade places have one size. An unchanged dim
    is in play if the target's atoms divide it. ``is_wide``: if all atoms do, so that any may cut it on the way.
    """
    ends = fine = part_ends(src.used_parts + dst.used_parts)
    if all(src.dims[i] == dst.dims[i] for i in _uneven_dims(src, dst, shape)):
        while (split := _uneven_pair(*_rest(src, dst, fine))) is not None:
            fine = {**fine, split.name: sorted([*fine[split.name], split.pre * split.size])}
        if len({part for axes in sum(_rest(src, dst, fine), ()) for part in axes}) <= MAX_SPLIT:
            ends = fine
    start, target = _rest(src, dst, ends)
    in_play = {part for axes in (*start, *target, _closing(src, dst, ends)) for part in axes}
    atoms = tuple(sorted(in_play, key=lambda part: (src.mesh.axis_names.index(part.name), part.pre)))
    active = [i for i in range(len(shape)) if start[i] or target[i]]
    new = atoms if is_wide else sum(target, ())
    if new and len(atoms) <= MAX_SPARE:  # an unchanged dim, on which the new cuts can wait
        same = [i for i, cut in enumerate(dst.dims) if i not in active and cut == src.dims[i] and not cut.minor]
        spare = [i for i in same if dst.dims[i].local_size(shape[i]) % num_shards(new) == 0]
        active = sorted(active + spare[:1])
    return _space(src, dst, shape, ends, atoms, active), atoms, active, ends


def steps_of(
    moves: tuple[Move, ...], space: Space, atoms: Axes, active: list[int], src: Sharding, shape: tuple[int, ...]
) -> Iterator[Step]:
    """The moves of a search as steps."""

    def names(numbers: Atoms) -> tuple[str, ...]:
        return tuple(map(src.mesh.print_part, merge_parts(atoms[i] for i in numbers)))

    sharding = src
    for move in _joined_slices(moves, space.loose):
        if move.kind == "collective_permute":
            before: tuple[str, ...] = ()
            after: tuple[str, ...] = ()
            for ours, theirs in zip(move.before.lists, move.after.lists, strict=True):
                while ours and theirs and ours[0] == theirs[0]:
                    ours, theirs = ours[1:], theirs[1:]
                while ours and theirs and ours[-1] == theirs[-1]:
                    ours, theirs = ours[:-1], theirs[:-1]
                before, after = before + names(ours), after + names(theirs)
            args: tuple[object, ...] = (before, after)
        else:
            op = (src.partial[0][1],) if move.kind in ("all_reduce", "reduce_scatter") else ()
            args = (names(move.atoms), *op, *(active[dim] for dim in move.dims))
        sharding = steps_sharding(sharding, move.kind, args)
        yield Step(move.kind, args, sharding, shape)


def _space(
    src: Sharding, dst: Sharding, shape: tuple[int, ...], ends: dict[str, list[int]], atoms: Axes, active: list[int]
) -> Space:
    number = {part: i for i, part in enumerate(atoms)}
    rest = _rest(src, dst, ends)
    start, target = (tuple(tuple(number[part] for part in side[i]) for i in active) for side in rest)
    kept = [num_shards(split_parts(src.dims[i].axes, ends)) // num_shards(rest[0][i]) for i in active]
    loose = _uneven_dims(src, dst, shape)
    return Space(
        tuple(part.size for part in atoms),
        tuple(ceil_div(shape[i], pieces) for i, pieces in zip(active, kept, strict=True)),
        State(start, tuple(sorted(number[part] for part in _closing(src, dst, ends)))),
        State(target, ()),
        frozenset(at for at, dim in enumerate(active) if dim in loose),
        frozenset((number[a], number[b]) for a, b in permutations(atoms, 2) if len(merge_parts((a, b))) == 1),
    )


def _uneven_dims(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> set[int]:
    """The dims that are cut unevenly on either side."""
    dims = enumerate(zip(src.dims, dst.dims, shape, strict=True))
    return {i for i, (a, b, size) in dims if not (a.is_even(size) and b.is_even(size))}


def _uneven_pair(src: tuple[Axes, ...], dst: tuple[Axes, ...]) -> AxisPart | None:
    """The major piece of a part that cannot itself trade places with parts of the other side, while the piece can."""
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
    """The axes that cut each dim on either side, without those that both share at the major end."""
    rests: list[tuple[Axes, Axes]] = []
    for a, b in zip(src.dims, dst.dims, strict=True):
        ours, theirs = (split_parts(a.axes, ends), split_parts(b.axes, ends)) if a != b else ((), ())
        while ours and theirs and ours[0] == theirs[0]:
            ours, theirs = ours[1:], theirs[1:]
        rests.append((ours, theirs))
    return tuple(ours for ours, _ in rests), tuple(theirs for _, theirs in rests)


def _closing(src: Sharding, dst: Sharding, ends: dict[str, list[int]]) -> Axes:
    """The parts over which a reduction is still to be done."""
    still = split_parts(dst.partial_axes, ends)
    return tuple(part for part in split_parts(src.partial_axes, ends) if part not in still)


def _joined_slices(moves: tuple[Move, ...], loose: frozenset[int]) -> Iterator[Move]:
    """The moves, with consecutive slices of one dim joined if the dim is cut evenly."""
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
