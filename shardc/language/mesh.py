"""The mesh: named axes over ranks, and the parts of an axis that can cut a dim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from shardc.language.errors import ShardingError, did_you_mean

MOST_RANKS = 2**20  # more than any job has
MICROBATCH = "microbatch"  # the axis of time: its pieces are computed one after the other on the same ranks


@dataclass(frozen=True, slots=True, order=True)
class AxisPart:
    """A factor of a mesh axis: the middle coordinate of an axis of ``pre * size * post`` ranks.

    A whole axis is ``pre=1`` with the axis's own size. Printed ``tp`` when whole, ``tp:(2)2`` when not.
    """

    name: str
    pre: int
    size: int

    def major(self, size: int) -> AxisPart:
        """The leading ``size`` of this part."""
        assert self.size % size == 0, (self, size)
        return AxisPart(self.name, self.pre, size)

    def minor(self, size: int) -> AxisPart:
        """The trailing ``size`` of this part."""
        assert self.size % size == 0, (self, size)
        return AxisPart(self.name, self.pre * (self.size // size), size)

    def overlaps(self, other: AxisPart) -> bool:
        """Whether the two share a coordinate of the axis."""
        if self.name != other.name or self == other:
            return self == other
        return self.pre < other.pre * other.size and other.pre < self.pre * self.size

    def includes(self, other: AxisPart) -> bool:
        """Whether this part has every coordinate of the other."""
        is_inside = self.pre <= other.pre and other.pre * other.size <= self.pre * self.size
        return self.name == other.name and is_inside


Axes = tuple[AxisPart, ...]


def axis_of(part: str) -> str:
    """The axis of a printed part: ``tp`` of ``tp:(2)2``."""
    return part.partition(":")[0]


def part_ends(axes: Iterable[AxisPart]) -> dict[str, list[int]]:
    """For each axis, the boundaries of its parts in order, counted in ranks from the major end."""
    ends: dict[str, set[int]] = {}
    for part in axes:
        ends.setdefault(part.name, set()).update((part.pre, part.pre * part.size))
    return {name: sorted(places) for name, places in ends.items()}


def split_parts(axes: Iterable[AxisPart], ends: Mapping[str, Sequence[int]]) -> Axes:
    """The parts, each split wherever one of ``ends`` falls inside it."""
    pieces: list[AxisPart] = []
    for part in axes:
        inside = [end for end in ends.get(part.name, ()) if part.pre < end < part.pre * part.size]
        starts = [part.pre, *inside, part.pre * part.size]
        for start, end in pairwise(starts):
            assert end % start == 0, (part, ends)
            pieces.append(AxisPart(part.name, start, end // start))
    return tuple(pieces)


def merge_parts(axes: Iterable[AxisPart]) -> Axes:
    """The parts, with neighbours joined if they follow each other on their axis."""
    merged: list[AxisPart] = []
    for part in axes:
        last = merged[-1] if merged else None
        if last is not None and last.name == part.name and last.pre * last.size == part.pre and part.size > 1:
            merged[-1] = AxisPart(part.name, last.pre, last.size * part.size)
        else:
            merged.append(part)
    return tuple(merged)


class Mesh:
    """A description of devices as a grid with named axes: no process, no device.

    ``device_ids`` names the rank at each position, row-major over the axes; without it position is rank.

    Examples:
        >>> from shardc import Mesh
        >>> mesh = Mesh(dp=2, tp=4)
        >>> mesh.axis_names, mesh.shape, mesh.size
        (('dp', 'tp'), (2, 4), 8)
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    device_ids: tuple[int, ...] | None
    stage_axis: str | None = None  # on the mesh of one pipeline stage: the axis of the stages, which it lacks

    def __init__(self, *sizes: object, device_ids: Sequence[int] | None = None, **axes: int) -> None:
        if sizes:
            what = ", ".join(map(repr, sizes))
            raise ShardingError("Mesh", what, "every axis has a name", "write Mesh(dp=2, tp=4), or Mesh(**{'dp': 2})")
        if not axes:
            raise ShardingError("Mesh()", "no axes", "a mesh needs at least one axis", "write Mesh(dp=2)")
        for name, size in axes.items():
            _check_axis(name, size)
        self.axis_names = tuple(axes)
        self.shape = tuple(axes.values())
        ids: Any = device_ids if device_ids is None or isinstance(device_ids, Iterable) else (device_ids,)
        self.device_ids = ids = None if ids is None else tuple(ids)
        are_ranks = ids is None or all(hasattr(rank, "__index__") for rank in ids)
        if ids is not None and not (are_ranks and sorted(ids) == list(range(self.size))):
            problem = f"{self} has {self.size} ranks, each must appear once"
            raise ShardingError("Mesh", f"device_ids={ids}", problem, f"list each of 0..{self.size - 1} once")

    @staticmethod
    def of(mesh: Any) -> Mesh:
        """A Mesh as it is, or the description of a torch ``DeviceMesh``."""
        if isinstance(mesh, Mesh):
            if mesh.size > MOST_RANKS:
                remedy = f"say sizes whose product is at most {MOST_RANKS}"
                raise ShardingError(f"{mesh}", f"{mesh.size} ranks", f"a mesh has at most {MOST_RANKS}", remedy)
            return mesh
        names = getattr(mesh, "mesh_dim_names", None)
        if names is None:
            problem = "shardc needs a shardc.Mesh or a DeviceMesh with mesh_dim_names"
            remedy = "write Mesh(dp=2, tp=4) or init_device_mesh(device, (2, 4), mesh_dim_names=('dp', 'tp'))"
            raise ShardingError("mesh", f"of type {type(mesh).__name__}", problem, remedy)
        ids = tuple(mesh.mesh.flatten().tolist())
        described = Mesh(**dict(zip(names, mesh.shape, strict=True)))
        described.device_ids = None if ids == tuple(range(len(ids))) else ids  # any ranks, of a part of a job
        return described

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis, by its name."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def axis_size(self, name: str) -> int:
        """The number of ranks along an axis. Raises a ShardingError that suggests similar names if there is none."""
        if name not in self.axis_names:
            remedy = did_you_mean(name, self.axis_names) or f"use one of {', '.join(self.axis_names)}"
            raise ShardingError(f"axis {name!r}", f"the mesh is {self}", "it has no such axis", remedy)
        return self.shape[self.axis_names.index(name)]

    def axis(self, name: str) -> AxisPart:
        """The whole axis as a part."""
        return AxisPart(name, 1, self.axis_size(name))

    def is_whole(self, part: AxisPart) -> bool:
        """Whether the part is its whole axis."""
        return part.pre == 1 and part.size == self.axis_size(part.name)

    def print_part(self, part: AxisPart) -> str:
        """The part as one types it: ``tp``, or ``tp:(2)2``."""
        return part.name if self.is_whole(part) else f"{part.name}:({part.pre}){part.size}"

    def coordinate(self, position: int, part: AxisPart) -> int:
        """The coordinate of a position of the mesh along a part of an axis."""
        i = self.axis_names.index(part.name)
        along = position // math.prod(self.shape[i + 1 :]) % self.shape[i]
        return along // (self.shape[i] // (part.pre * part.size)) % part.size

    def index(self, position: int, axes: Iterable[AxisPart]) -> int:
        """The coordinate of a position along several parts taken together, major first."""
        result = 0
        for part in axes:
            result = result * part.size + self.coordinate(position, part)
        return result

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """The groups of positions that differ only along these parts; in a group, major part first."""
        return _groups(self, axes)

    def rank(self, position: int) -> int:
        """The rank at a position."""
        return position if self.device_ids is None else self.device_ids[position]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.axis_names, self.shape, self.device_ids) == (
            other.axis_names, other.shape, other.device_ids,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.axis_names, self.shape, self.device_ids))

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        ids = "" if self.device_ids is None else f", device_ids={self.device_ids}"
        return f"Mesh({axes}{ids})"


def _check_axis(name: str, size: object) -> None:
    """Raise a ShardingError for a name that is no identifier, or a size that is no whole number from 1 on."""
    if not name.isidentifier():
        what, problem = f"axis {name!r} of size {size!r}", "a name is of letters, digits and _, as a name in Python is"
        raise ShardingError("Mesh", what, problem, "write Mesh(dp=2)")
    if type(size) is not int or size < 1:
        problem = "a size is a whole number of ranks, 1 or more"
        raise ShardingError("Mesh", f"axis {name!r} has size {size!r}", problem, f"write Mesh({name}=2)")


@lru_cache(maxsize=256)
def _groups(mesh: Mesh, axes: Axes) -> tuple[tuple[int, ...], ...]:
    members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    rest = unused_parts(mesh, axes)
    for position in range(mesh.size):
        key = tuple(mesh.coordinate(position, part) for part in rest)
        members.setdefault(key, []).append((mesh.index(position, axes), position))
    return tuple(tuple(position for _, position in sorted(group)) for group in members.values())


def unused_parts(mesh: Mesh, axes: Axes) -> Axes:
    """The parts of the mesh that are in none of ``axes``, in mesh order."""
    rest: list[AxisPart] = []
    for name, size in mesh.sizes.items():
        pre = 1
        for part in sorted(part for part in axes if part.name == name):
            if part.pre > pre:
                rest.append(AxisPart(name, pre, part.pre // pre))
            pre = max(pre, part.pre * part.size)
        if pre < size:
            rest.append(AxisPart(name, pre, size // pre))
    return tuple(rest)


_SAME_WORK = "ranks do the same work:"


def idle_axis_text(name: str, size: int, remedy: str, is_stored: bool = False) -> str:
    """The sentence about an axis that cuts no value, or only stored values."""
    cuts = "cuts what is stored and no op" if is_stored else "cuts nothing"
    return f"axis {name} {cuts}, so that its {size} {_SAME_WORK} {remedy}"


WITHOUT_EFFECT = {
    "ring": "attention='ring' makes no ring of any attention",
    "ulysses": "attention='ulysses' shares the heads of no attention",
}
NO_DOT_RING = "overlap='ring' makes no ring of any product"
NO_CODES = "no collective that carries more than a few floats is meant by it"


def warnings_among(notes: Iterable[str]) -> tuple[str, ...]:
    """The notes that become warnings: about axes over which no work is cut, and options without effect."""

    def is_told(note: str) -> bool:
        is_idle = note.startswith("axis ") and _SAME_WORK in note
        return is_idle or note.startswith((*WITHOUT_EFFECT.values(), NO_DOT_RING)) or note.endswith(NO_CODES)

    return tuple(filter(is_told, notes))
