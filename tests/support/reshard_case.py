"""Random shardings of a value, and functions that lay it out on all ranks and read it back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardc.language.cut import join_dim
from shardc.language.mesh import Axes, AxisPart, Mesh, merge_parts
from shardc.language.sharding import DimSharding, ReduceOp, Sharding, TensorType, num_shards
from shardc.ops.piece import fit
from shardc.program.collective import Step, fits, group_size
from shardc.runtime.comm.dtensor import pad, shard, unshard
from shardc.runtime.comm.simulated import SimulatedComm

MAX_RANKS = 24
GARBAGE = 77.0  # the value of padding before the first step


@dataclass(frozen=True)
class Case:
    """The shape of a value, and two shardings of it."""

    shape: tuple[int, ...]
    src: Sharding
    dst: Sharding

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, torch.float64)


@st.composite
def cases(draw: st.DrawFn, smallest: int = 1) -> Case:
    """Even cuts: meshes of 1 to 3 axes, several axes on a dim, parts of axes, cuts in blocks, open or closed sums."""
    mesh, ndim = draw(meshes(smallest)), draw(st.integers(1, 3))
    op = draw(st.sampled_from(["sum", "max", "min"]))
    sides = [[draw(cut_dims(parts, ndim)), parts] for parts in (draw(axis_parts(mesh)), draw(axis_parts(mesh)))]
    shape = tuple(math.lcm(*(smallest_size(dims[i]) for dims, _ in sides)) for i in range(ndim))
    made = [tuple(in_blocks(dim, size) for dim, size in zip(dims, shape, strict=True)) for dims, _ in sides]
    src = Sharding(mesh, made[0])
    free = [part for part in sides[0][1] if not any(part.overlaps(cut) for cut in src.cut_axes)]
    partial = tuple((part, op) for part in free if draw(st.booleans()))
    dst = Sharding(mesh, made[1])
    kept = [entry for entry in partial if not any(entry[0].overlaps(part) for part in dst.cut_axes)]
    still = tuple(entry for entry in kept if draw(st.booleans()))
    return Case(shape, Sharding(mesh, src.dims, partial), Sharding(mesh, dst.dims, still))


@st.composite
def uneven_cases(draw: st.DrawFn) -> Case:
    """Sizes that need not divide, including 0 and 1, and dims merged from a cut dim and others."""
    mesh, ndim = draw(meshes()), draw(st.integers(1, 3))
    op = draw(st.sampled_from(["sum", "max", "min"]))
    shape = tuple(draw(st.sampled_from([0, 1, 2, 3, 5, 6, 7, 10, 12, 15])) for _ in range(ndim))
    sides = [(draw(cut_dims(parts, ndim)), parts) for parts in (draw(axis_parts(mesh)), draw(axis_parts(mesh)))]
    src, dst = (Sharding(mesh, tuple(map(draw, map(uneven_cut, dims, shape)))) for dims, _ in sides)
    free = [part for part in sides[0][1] if not any(part.overlaps(cut) for cut in src.cut_axes)]
    partial = tuple((part, op) for part in free if draw(st.booleans()))
    kept = [entry for entry in partial if not any(entry[0].overlaps(part) for part in dst.cut_axes)]
    still = tuple(entry for entry in kept if draw(st.booleans()))
    return Case(shape, Sharding(mesh, src.dims, partial), Sharding(mesh, dst.dims, still))


@st.composite
def uneven_cut(draw: st.DrawFn, cut: Cut, size: int) -> DimSharding:
    """A cut of the whole dim, or of its major or minor part."""
    inner = draw(st.sampled_from([1, *(each for each in (2, 3, 5) if size and size % each == 0)]))
    cuts = DimSharding(merge_parts(cut.axes)), DimSharding(merge_parts(cut.minor))
    return join_dim([(size // inner, cuts[0]), (inner, cuts[1])]) if inner > 1 else cuts[0]


@st.composite
def meshes(draw: st.DrawFn, smallest: int = 1) -> Mesh:
    """A mesh of one to three axes of ``smallest`` to 4 ranks, and of 24 ranks at most."""
    sizes = draw(st.lists(st.integers(smallest, 4), min_size=1, max_size=3))
    while math.prod(sizes) > MAX_RANKS:
        sizes.pop()
    return Mesh(**dict(zip("abc", sizes, strict=False)))


@st.composite
def axis_parts(draw: st.DrawFn, mesh: Mesh) -> Axes:
    """Every axis of a mesh, whole or split in two, in any order."""
    parts: list[AxisPart] = []
    for name in mesh.axis_names:
        axis = mesh.axis(name)
        parts += [axis.major(2), axis.minor(2)] if axis.size == 4 and draw(st.booleans()) else [axis]
    return tuple(draw(st.permutations(parts)))


@dataclass(frozen=True)
class Cut:
    """A cut of a dim: ``axes`` cut it first, then ``minor`` cuts each of ``count`` blocks of the local part."""

    axes: Axes
    count: int
    minor: Axes


@st.composite
def cut_dims(draw: st.DrawFn, parts: Axes, ndim: int) -> list[Cut]:
    """A cut of each dim: each part cuts one dim or none, and some dims are cut in blocks."""
    places = [draw(st.integers(-1, ndim - 1)) for _ in parts]
    dims: list[Cut] = []
    for i in range(ndim):
        axes = tuple(part for part, place in zip(parts, places, strict=True) if place == i)
        at = draw(st.integers(0, len(axes))) if draw(st.integers(0, 2)) == 0 else len(axes)
        dims.append(Cut(axes[:at], draw(st.sampled_from([1, 2, 3])) if axes[at:] else 1, axes[at:]))
    return dims


def smallest_size(cut: Cut) -> int:
    return num_shards(cut.axes) * cut.count * num_shards(cut.minor)


def in_blocks(cut: Cut, size: int) -> DimSharding:
    block = size // (num_shards(cut.axes) * cut.count)
    return DimSharding(merge_parts(cut.axes), ((block, merge_parts(cut.minor)),) if cut.minor else ())


def all_shardings(mesh: Mesh, ndim: int, with_partial: bool = True) -> list[Sharding]:
    """Every plain sharding by whole axes: each axis is free, partial, or on a dim, in every order."""
    axes = [mesh.axis(name) for name in mesh.axis_names]
    found: list[Sharding] = []
    for places in product(range(-2 if with_partial else -1, ndim), repeat=len(axes)):
        partial = tuple((axis, "sum") for axis, place in zip(axes, places, strict=True) if place == -2)
        groups = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in range(ndim)]
        for dims in product(*(permutations(group) for group in groups)):
            found.append(Sharding(mesh, tuple(DimSharding(dim) for dim in dims), partial))  # type: ignore[arg-type]
    return found


# A value on all ranks.


def integers(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Random integers in float64, so that sums in any order are equal."""
    return torch.randint(-9, 10, tuple(shape), generator=torch.Generator().manual_seed(seed)).double()


def lay_out(whole: Tensor, sharding: Sharding) -> list[Tensor]:
    """The local value of each rank; over partial axes, terms that reduce to the whole value."""
    num_terms = num_shards(sharding.partial_axes)
    every = terms(whole, num_terms, sharding.partial[0][1] if sharding.partial else "sum")
    mesh, cuts = sharding.mesh, sharding.reduced()
    wholes = [every[mesh.index(i, sharding.partial_axes)] - GARBAGE for i in range(mesh.size)]
    return [pad(shard(each, cuts, i), cuts, whole.shape, i) + GARBAGE for i, each in enumerate(wholes)]


def terms(whole: Tensor, count: int, op: ReduceOp) -> list[Tensor]:
    """``count`` different tensors that reduce to ``whole``."""
    found = [integers(whole.shape, seed) for seed in range(1, count)]
    if op == "sum":
        return [whole - sum(found, torch.zeros_like(whole)), *found]
    sign = -1 if op == "max" else 1
    owner = torch.arange(whole.numel()).reshape(whole.shape) % count
    return [whole + sign * (owner != i) * (1 + noise.abs()) for i, noise in enumerate([whole, *found])]


def read_back(pieces: Sequence[Tensor], sharding: Sharding, comm: SimulatedComm, shape: tuple[int, ...]) -> Tensor:
    """The whole value of ``shape`` that the ranks hold together. Raises an AssertionError if replicas differ."""
    for part, op in sharding.partial:
        pieces = comm.all_reduce(pieces, (sharding.mesh.print_part(part),), op)
    return unshard(pieces, sharding.reduced(), shape)


def take(step: Step, held: Sequence[Tensor], comm: SimulatedComm) -> Sequence[Tensor]:
    """The local values after a step; its operand and result are padded or cut as localize does."""
    if step.kind == "view":
        return [piece.view(step.sharding.local_shape(step.shape)) for piece in held]
    made, count = step.sharding.local_shape(step.shape), group_size(comm.mesh, step.kind, step.args)
    before, after = fits(step.kind, step.args, count, tuple(held[0].shape), made)
    ready = [fit(piece, *before) for piece in held] if before else held
    found: Sequence[Tensor] = comm.start(step.kind, ready, *step.args)()
    return [fit(piece, *after) for piece in found] if after else found
