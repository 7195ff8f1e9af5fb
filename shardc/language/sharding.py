"""The sharding of a value: which mesh axes cut each dim, and over which axes a reduction is still open."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shardc.language.errors import ShardingError
from shardc.language.mesh import Axes, AxisPart, Mesh, merge_parts
from shardc.language.size import number_of, plain

if TYPE_CHECKING:
    import torch

ReduceOp = Literal["sum", "max", "min"]


def ceil_div(size: int, parts: int) -> int:
    """The size of the largest of ``parts`` chunks, as torch.chunk cuts them."""
    return -(-size // parts)


def chunk_of(size: int, axes: Axes, mesh: Mesh, position: int) -> tuple[int, int]:
    """Start and length of a position's data along a dim; each axis cuts the chunks that the axes before it left."""
    start, chunk, end = 0, size, size
    for part in axes:
        chunk = ceil_div(chunk, part.size)
        start = min(start + chunk * mesh.coordinate(position, part), end)
        end = min(start + chunk, end)
    return start, end - start


def num_shards(axes: Axes) -> int:
    """The number of pieces that these parts cut a dim into."""
    return math.prod([part.size for part in axes]) if axes else 1


OpenReductions = tuple[tuple[AxisPart, ReduceOp], ...]


def open_reductions(parts: Iterable[tuple[AxisPart, ReduceOp]]) -> OpenReductions:
    """Open reductions in their normal form: in order, those over neighbouring parts of an axis as one."""
    by_op: dict[ReduceOp, list[AxisPart]] = {}
    for part, op in sorted(parts):
        by_op.setdefault(op, []).append(part)
    return tuple(sorted((part, op) for op, each in by_op.items() for part in merge_parts(each)))


class KeepsHash:
    """A value that computes its hash once: shardings are keys of many tables."""

    __slots__ = ("_hash",)
    _hash: int

    def _hash_of(self, *fields: object) -> int:
        object.__setattr__(self, "_hash", hash(fields))
        return self._hash


@dataclass(frozen=True, slots=True)
class DimSharding(KeepsHash):
    """The cut of one dim.

    ``axes`` cut all of it, major first; each ``(size, axes)`` of ``minor`` cuts the trailing ``size`` elements again.
    A dim of ``S`` elements with ``minor=((m1, a1), (m2, a2))`` is seen as ``[S/(m1*m2), m1, m2]``, the first cut by
    ``axes``, the second by ``a1``, the third by ``a2``. So ``blocks(3, "tp")`` is ``minor=((S//3, (tp,)),)``: each of
    three equal blocks is cut; and a merge of ``[8@dp, 16@tp]`` is one dim of 128 with ``axes=(dp,)`` and
    ``minor=((16, (tp,)),)``. Invariant: an entry of ``minor`` without axes follows one that is cut unevenly.

    Sizes need not divide. An axis cuts the chunks of the axes before it into chunks of the rounded-up size, as
    torch.chunk does. Every rank holds equally many elements: data first, then *padding* of no particular value. Some
    ranks may hold padding alone.
    """

    axes: Axes = ()
    minor: tuple[tuple[int, Axes], ...] = ()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self._hash_of(self.axes, self.minor)

    @property
    def all_axes(self) -> Axes:
        """Every part that cuts the dim, major first."""
        return self.axes + tuple(part for _, axes in self.minor for part in axes) if self.minor else self.axes

    def without(self, axes: Collection[str]) -> DimSharding:
        """This sharding without the cuts by these axes."""

        def remaining(parts: Axes) -> Axes:
            return tuple(part for part in parts if part.name not in axes)

        minor = tuple((size, remaining(parts)) for size, parts in self.minor)
        return DimSharding(remaining(self.axes), minor if any(parts for _, parts in minor) else ())

    def subdims(self, size: int) -> tuple[tuple[int, Axes], ...]:
        """The dim as separate dims ``(size, axes)`` without minor cuts; an expression is assumed to divide evenly."""
        inner = math.prod(sub for sub, _ in self.minor)
        assert not isinstance(size, int) or size % inner == 0, (size, inner)
        return ((size // inner if isinstance(size, int) else size / inner, self.axes), *self.minor)

    def local_size(self, size: int) -> int:
        """Elements on one rank, padding included."""
        if not self.minor:
            return ceil_div(size, num_shards(self.axes)) if self.axes else size
        return math.prod(ceil_div(sub, num_shards(axes)) for sub, axes in self.subdims(size))

    def is_even(self, size: int) -> bool:
        """Whether there is no padding."""
        return all(sub % num_shards(axes) == 0 for sub, axes in self.subdims(size))


WHOLE = DimSharding()


@dataclass(frozen=True, slots=True)
class Sharding(KeepsHash):
    """The elements of a value that each rank holds, and the reductions that are still open.

    ``dims[i]`` cuts dim ``i``; ``partial`` maps parts of axes to the reduction open over them: the value is the sum
    (max, min) of the values that the ranks along that part hold. Invariants, one check each: a part appears once; it
    exists; a partial part cuts nothing.
    """

    mesh: Mesh
    dims: tuple[DimSharding, ...]
    partial: OpenReductions = ()

    def __post_init__(self) -> None:
        checked: list[AxisPart] = []
        for part in self.used_parts:
            size = self.mesh.axis_size(part.name)
            if size % (part.pre * part.size):
                who, what = f"axis part {part.name}:({part.pre}){part.size}", f"{self.mesh}, {part.name}={size}"
                remedy = f"write {part.name!r}, or {part.name}:(pre)size where pre * size divides {size}"
                raise ShardingError(who, what, "the axis does not split that way", remedy)
            if any(part.overlaps(other) for other in checked):
                what, problem = f"axis {part.name!r} of {self.mesh}", "an axis can cut one dim of a value, once"
                raise ShardingError(f"sharding {self.text()}", what, problem, f"write {part.name!r} in one place only")
            checked.append(part)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self._hash_of(self.mesh, self.dims, self.partial)

    @staticmethod
    def replicated(mesh: Mesh, ndim: int) -> Sharding:
        """Whole on every rank."""
        return Sharding(mesh, (WHOLE,) * ndim)

    @property
    def cut_axes(self) -> Axes:
        """Every part that cuts a dim."""
        return tuple([part for dim in self.dims for part in dim.all_axes])

    @property
    def partial_axes(self) -> Axes:
        """Every part over which a reduction is open."""
        return tuple(part for part, _ in self.partial)

    @property
    def used_parts(self) -> Axes:
        """Every part that cuts a dim, then every part over which a reduction is open."""
        return self.cut_axes + self.partial_axes

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return not self.cut_axes and not self.partial

    def on(self, mesh: Mesh) -> Sharding:
        """This sharding on a mesh that lacks some of the axes: their cuts and open reductions are dropped."""
        dims = tuple(dim.without(set(self.mesh.axis_names) - set(mesh.axis_names)) for dim in self.dims)
        return Sharding(mesh, dims, tuple(each for each in self.partial if each[0].name in mesh.axis_names))

    def reduced(self) -> Sharding:
        """This sharding with no reduction open."""
        return replace(self, partial=())

    def with_dim(self, dim: int, sharding: DimSharding) -> Sharding:
        """This sharding with another cut of one dim."""
        return replace(self, dims=(*self.dims[:dim], sharding, *self.dims[dim + 1 :]))

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one rank's shard of a value of global ``shape``, padding included."""
        assert len(self.dims) == len(shape), (self, shape)
        return tuple(map(DimSharding.local_size, self.dims, shape))

    def is_even(self, shape: tuple[int, ...]) -> bool:
        """Whether there is no padding."""
        return all(dim.is_even(size) for dim, size in zip(self.dims, shape, strict=True))

    def storable(self, shape: tuple[int, ...]) -> Sharding:
        """This sharding with each dim cut no further than a DTensor can express.

        A DTensor's axes cut in the mesh's order, and torch.chunk cuts each chunk by its own length: 5 elements over
        2 x 2 ranks are 2, 1, 1, 1 there and 2, 1, 2, 0 here.
        """

        def storable(cut: DimSharding, size: int) -> DimSharding:
            order = [self.mesh.axis_names.index(part.name) for part in cut.axes]
            count = 0 if cut.minor else len(order)
            while order[:count] != sorted(order[:count]) or not _are_torchs_chunks(size, cut.axes[:count]):
                count -= 1
            return DimSharding(cut.axes[:count])

        pairs = zip(self.dims, shape, strict=True)
        return replace(self, dims=tuple(cut if cut.is_even(size) else storable(cut, size) for cut, size in pairs))

    def text(self, type_: TensorType | None = None) -> str:
        """The printed form: ``f32[8@dp, (3 64@tp)]{sum tp}``; without a type the sizes are ``_``."""
        sizes: tuple[int | str, ...] = ("_",) * len(self.dims) if type_ is None else type_.shape
        dims = ", ".join(self._dim_text(dim, size) for dim, size in zip(self.dims, sizes, strict=True))
        by_op: dict[str, list[str]] = {}
        for part, op in self.partial:
            by_op.setdefault(op, []).append(self.mesh.print_part(part))
        partial = "".join(f"{{{op} {' '.join(parts)}}}" for op, parts in by_op.items())
        return f"{'' if type_ is None else type_.short_dtype}[{dims}]{partial}"

    def _dim_text(self, dim: DimSharding, size: int | str) -> str:
        def one(size: int | str, axes: Axes) -> str:
            return f"{size}@{'+'.join(map(self.mesh.print_part, axes))}" if axes else f"{size}"

        if not dim.minor:
            return one(size, dim.axes)
        lead = "_" if isinstance(size, str) else dim.subdims(size)[0][0]
        return f"({' '.join([one(lead, dim.axes), *(one(*sub) for sub in dim.minor)])})"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{self} on {self.mesh}>"


def _are_torchs_chunks(size: int, axes: Axes) -> bool:
    """Whether torch's chunks, each cut by its own length, equal ours, which are cut by the length of the longest."""
    lengths, chunk = {size}, size
    for part in axes:
        chunk = ceil_div(chunk, part.size)
        ours, torchs = ({n: _chunks(n, part.size, ceil_div(n, part.size) if own else chunk) for n in lengths}
                        for own in (False, True))  # fmt: skip
        if ours != torchs:
            return False
        lengths = {length for chunks in ours.values() for length in chunks}
    return True


def _chunks(size: int, count: int, chunk: int) -> list[int]:
    return [max(0, min(chunk, size - i * chunk)) for i in range(count)]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A value's global shape and dtype. Prints ``f32[8, 64]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorType) and self.dtype == other.dtype and self.has_shape_of(other)

    def has_shape_of(self, other: TensorType) -> bool:
        """Whether two shapes are equal. The lengths come first: comparing Sizes of unrelated dims would add guards."""
        return len(self.shape) == len(other.shape) and self.shape == other.shape

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        """The type of a tensor."""
        return TensorType(tuple(map(number_of, tensor.shape)), tensor.dtype)

    @property
    def short_dtype(self) -> str:
        """The dtype in short, such as ``f32``, ``bf16``, ``i64`` or ``bool``."""
        name = dtype_name(self.dtype)
        for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
            if name.startswith(long):
                return short + name.removeprefix(long)
        return name

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return plain(self.numel) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.short_dtype}[{', '.join(map(str, self.shape))}]"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
