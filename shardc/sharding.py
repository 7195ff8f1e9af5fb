"""How a value lies on the mesh: which axes cut each dim, and over which axes a reduction is still open."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

from shardc.error import ShardingError
from shardc.mesh import Axes, AxisPart, Mesh

if TYPE_CHECKING:
    import torch

ReduceOp = Literal["sum", "max", "min"]


def ceil_div(size: int, parts: int) -> int:
    """The size of the largest of ``parts`` chunks, as torch.chunk cuts them."""
    return -(-size // parts)


def num_shards(axes: Axes) -> int:
    """Into how many pieces these parts cut together."""
    return math.prod(part.size for part in axes)


@dataclass(frozen=True, slots=True)
class DimSharding:
    """How one dim is cut: ``axes`` cut it whole, major first; each ``(size, axes)`` of ``minor`` cuts the trailing
    ``size`` elements again.

    A dim of ``S`` elements with ``minor=((m1, a1), (m2, a2))`` is seen as ``[S/(m1*m2), m1, m2]``, the first cut by
    ``axes``, the second by ``a1``, the third by ``a2``. So ``minor=((S//3, (tp,)),)`` is what ``blocks(3, "tp")`` says:
    each of three equal blocks is cut; and a merge of ``[8@dp, 16@tp]`` is one dim of 128 with ``axes=(dp,)`` and
    ``minor=((16, (tp,)),)``. Invariant: every entry of ``minor`` has an axis.
    """

    axes: Axes = ()
    minor: tuple[tuple[int, Axes], ...] = ()

    @property
    def all_axes(self) -> Axes:
        """Every part that cuts the dim, major first."""
        return self.axes + tuple(part for _, axes in self.minor for part in axes)

    def subdims(self, size: int) -> tuple[tuple[int, Axes], ...]:
        """The dim as separate ``(size, axes)`` dims, each cut whole."""
        rest = math.prod(sub for sub, _ in self.minor)
        assert size % rest == 0, (size, self)
        return ((size // rest, self.axes), *self.minor)

    def local_size(self, size: int) -> int:
        """Elements on one rank (of the largest shard)."""
        return math.prod(ceil_div(sub, num_shards(axes)) for sub, axes in self.subdims(size))

    def is_even(self, size: int) -> bool:
        """Whether every rank holds as many elements."""
        rest = math.prod(sub for sub, _ in self.minor)
        return size % rest == 0 and all(sub % num_shards(axes) == 0 for sub, axes in self.subdims(size))


WHOLE = DimSharding()


@dataclass(frozen=True, slots=True)
class Sharding:
    """Where a value's elements lie, and what is still to be added up.

    ``dims[i]`` cuts dim ``i``; ``partial`` maps parts of axes to the reduction open over them: the value is the sum
    (max, min) of what the ranks along that part hold. Invariants, one check each: a part appears once; it exists;
    a partial part cuts nothing.
    """

    mesh: Mesh
    dims: tuple[DimSharding, ...]
    partial: tuple[tuple[AxisPart, ReduceOp], ...] = ()

    def __post_init__(self) -> None:
        seen: list[AxisPart] = []
        for part in self.cut_axes + self.partial_axes:
            size = self.mesh.axis_size(part.name)
            if size % (part.pre * part.size):
                raise ShardingError(
                    f"axis part {part.name}:({part.pre}){part.size}",
                    f"{self.mesh}, {part.name}={size}",
                    "the axis does not split that way",
                    f"pre * size must divide {size}",
                )
            for other in seen:
                if part.overlaps(other):
                    raise ShardingError(
                        f"sharding {self.text()}",
                        f"axis {part.name!r} of {self.mesh}",
                        "an axis can cut one dim of a value, once",
                        f"write {part.name!r} in one place only",
                    )
            seen.append(part)

    @staticmethod
    def replicated(mesh: Mesh, ndim: int) -> Sharding:
        """Whole on every rank."""
        return Sharding(mesh, (WHOLE,) * ndim)

    @property
    def cut_axes(self) -> Axes:
        """Every part that cuts a dim."""
        return tuple(part for dim in self.dims for part in dim.all_axes)

    @property
    def partial_axes(self) -> Axes:
        """Every part over which a reduction is open."""
        return tuple(part for part, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return not self.cut_axes and not self.partial

    def reduced(self) -> Sharding:
        """The same cuts with no reduction open."""
        return replace(self, partial=())

    def with_dim(self, dim: int, sharding: DimSharding) -> Sharding:
        """The same with one dim cut otherwise."""
        return replace(self, dims=(*self.dims[:dim], sharding, *self.dims[dim + 1 :]))

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that one rank holds (of the largest shard) of a value of global ``shape``."""
        return tuple(dim.local_size(size) for dim, size in zip(self.dims, shape, strict=True))

    def is_even(self, shape: tuple[int, ...]) -> bool:
        """Whether all ranks hold shards of one shape."""
        return all(dim.is_even(size) for dim, size in zip(self.dims, shape, strict=True))

    def text(self, type_: TensorType | None = None) -> str:
        """As one types it: ``f32[8@dp, (3 64@tp)]{sum tp}``; without a type the sizes read ``_``."""
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


@dataclass(frozen=True, slots=True)
class TensorType:
    """A value's global shape and dtype. Prints ``f32[8, 64]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def short_dtype(self) -> str:
        """``f32``, ``bf16``, ``i64``, ``bool``."""
        name = str(self.dtype).removeprefix("torch.")
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
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.short_dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Blocks:
    """An entry of ``P``: each of ``count`` equal blocks of the dim is cut by ``axes``."""

    count: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"blocks({self.count},{'+'.join(self.axes)})"


def blocks(count: int, *axes: str) -> Blocks:
    """Cut each of ``count`` equal blocks of a dim, as a fused q, k, v weight needs: ``P(None, blocks(3, "tp"))``."""
    return Blocks(count, axes)


class _Open:
    def __repr__(self) -> str:
        return "P.OPEN"


Entry = str | tuple[str, ...] | Blocks | _Open | None


class P:
    """What a user says of a value: one entry a dim.

    ``"dp"`` cuts by an axis, ``("dp", "tp")`` by several, major first; ``None`` says whole; ``P.OPEN`` leaves the dim
    to propagation; a trailing ``...`` leaves all further dims open; missing trailing dims are whole. ``P()`` is
    replicated. An axis may be a part, ``"tp:(2)2"``. Lower ``priority`` propagates first.
    """

    OPEN = _Open()
    entries: tuple[Entry, ...]
    rest_open: bool
    priority: int

    def __init__(self, *entries: Entry | type(Ellipsis), priority: int = 0) -> None:  # type: ignore[valid-type]
        self.rest_open = bool(entries) and entries[-1] is Ellipsis
        kept = entries[:-1] if self.rest_open else entries
        if any(entry is Ellipsis for entry in kept):
            raise ShardingError(
                f"P{entries}",
                "a '...' before the end",
                "'...' stands for all further dims",
                "write P.OPEN for one open dim",
            )
        self.entries = cast("tuple[Entry, ...]", kept)
        self.priority = priority

    @staticmethod
    def parse(text: str) -> P:
        """Read ``dp,-,tp``: ``-`` whole, ``?`` open, ``dp+tp`` several axes, ``blocks(3,tp)``, trailing ``...``."""
        return P(*_parse_entries(text))

    def __repr__(self) -> str:
        entries = [repr(entry) for entry in self.entries] + ["..."] * self.rest_open
        entries += [f"priority={self.priority}"] * bool(self.priority)
        return f"P({', '.join(entries)})"

    def __str__(self) -> str:
        def one(entry: Entry) -> str:
            if isinstance(entry, tuple):
                return "+".join(entry) or "-"
            return "-" if entry is None else "?" if isinstance(entry, _Open) else str(entry)

        return ",".join([one(entry) for entry in self.entries] + ["..."] * self.rest_open)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and (str(self), self.priority) == (str(other), other.priority)

    def __hash__(self) -> int:
        return hash((str(self), self.priority))

    def is_open(self, dim: int) -> bool:
        """Whether propagation may choose this dim."""
        return isinstance(self.entries[dim], _Open) if dim < len(self.entries) else self.rest_open

    def sharding(self, mesh: Mesh, shape: tuple[int, ...], who: str) -> Sharding:
        """The sharding it gives a value of ``shape``, open dims whole.

        Raises a ShardingError in the name of ``who`` for an unknown axis, an axis used twice, more entries than dims,
        or a size that does not divide.
        """
        if len(self.entries) > len(shape):
            raise ShardingError(
                who,
                f"{self!r} on shape {list(shape)}",
                f"{len(self.entries)} entries for {len(shape)} dims",
                f"write at most {len(shape)} entries",
            )
        dims = [WHOLE] * len(shape)
        for dim, entry in enumerate(self.entries):
            try:
                dims[dim] = _dim_sharding(entry, mesh, shape[dim])
            except ShardingError as error:
                raise ShardingError(
                    who, f"{self!r} on shape {list(shape)}, dim {dim}: {error.what}", error.problem, error.remedy
                ) from None
            self._check_even(dims[dim], mesh, shape, dim, who)
        return self._checked(Sharding, mesh, tuple(dims), who, shape)

    def _checked(
        self, make: type[Sharding], mesh: Mesh, dims: tuple[DimSharding, ...], who: str, shape: tuple[int, ...]
    ) -> Sharding:
        try:
            return make(mesh, dims)
        except ShardingError as error:
            raise ShardingError(
                who, f"{self!r} on shape {list(shape)}: {error.what}", error.problem, error.remedy
            ) from None

    def _check_even(self, cut: DimSharding, mesh: Mesh, shape: tuple[int, ...], dim: int, who: str) -> None:
        if cut.is_even(shape[dim]):
            return
        axes = cut.all_axes
        count = shape[dim] // cut.minor[0][0] if cut.minor else 1
        raise ShardingError(
            who,
            f"{self!r} on shape {list(shape)}, {mesh}",
            f"dim {dim} of size {shape[dim]}{f' in {count} blocks' if count > 1 else ''} does not divide by "
            f"{'*'.join(f'{mesh.print_part(part)}={part.size}' for part in axes)}",
            f"choose a multiple of {count * num_shards(axes)} for dim {dim}, or leave it whole with None",
        )


def _dim_sharding(entry: Entry, mesh: Mesh, size: int) -> DimSharding:
    if entry is None or isinstance(entry, _Open):
        return WHOLE
    if isinstance(entry, Blocks):
        if size % entry.count:
            raise ShardingError(
                "",
                f"size {size}",
                f"{size} does not split in {entry.count} equal blocks",
                f"use a block count that divides {size}",
            )
        return DimSharding((), ((size // entry.count, tuple(parse_part(axis, mesh) for axis in entry.axes)),))
    names = (entry,) if isinstance(entry, str) else entry
    return DimSharding(tuple(parse_part(name, mesh) for name in names))


def parse_part(text: str, mesh: Mesh) -> AxisPart:
    """An axis or a part of one as printed: ``tp``, ``tp:(2)2``."""
    name, _, rest = text.partition(":")
    if not rest:
        return mesh.axis(name)
    mesh.axis_size(name)
    pre, _, size = rest.removeprefix("(").partition(")")
    if not (pre.isdigit() and size.isdigit() and int(size)):
        raise ShardingError("", f"axis part {text!r}", "a part reads axis:(pre)size", "write for example 'tp:(2)2'")
    return AxisPart(name, int(pre), int(size))


def _parse_entries(text: str) -> Iterator[Entry]:
    for item in _split_commas(text):
        if item == "...":
            yield cast("Entry", ...)
        elif item.startswith("blocks("):
            count, _, axes = item.removeprefix("blocks(").removesuffix(")").partition(",")
            if not count.strip().isdigit():
                raise ShardingError(f"SPEC {text!r}", item, "blocks takes a count and axes", "write blocks(3,tp)")
            yield Blocks(int(count), tuple(axes.strip().split("+")))
        else:
            names = item.split("+")
            yield {"-": None, "?": P.OPEN}[item] if item in ("-", "?") else tuple(names) if len(names) > 1 else item


def _split_commas(text: str) -> list[str]:
    items, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items if item.strip()]
