"""The region of sizes and meshes in which a plan holds: ranges and conditions, checked by compiles at its ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardc.report.symbolic.form import Point
from shardc.report.symbolic.learn import FEW, Learned
from shardc.report.symbolic.symbolic_program import (
    Condition,
    CutCondition,
    LengthCondition,
    SymbolicProgram,
    exchange_conditions,
    independent,
    names_in,
)

IsSame = Callable[[Point], bool]
RANKS = 65536
GROWTH = 64  # dims go from a 16th of their size at the reference to 64 times that size by default
SHRINK = 16
MODULES = 1024  # most modules of a list
HALVINGS = 3


@dataclass(frozen=True)
class Region:
    """``low`` and ``high`` of each symbol, both included, and the conditions that hold between symbols.

    ``cuts``: conditions that one size divides another, or does not. ``lengths``: conditions that chunks are long enough
    for the rows that neighbours take. ``probes``: points that were compiled. ``count``: the symbol that counts modules,
    if there is one.
    """

    reference: Point
    axes: Sequence[str]
    low: Mapping[str, int]
    high: Mapping[str, int]
    cuts: Sequence[CutCondition]
    lengths: Sequence[LengthCondition] = ()
    probes: Sequence[Point] = ()
    count: str = ""

    def why_not(self, point: Point) -> str:
        """The reason why a point is outside; empty if it is inside."""
        for name, size in point.items():
            low, high = self.low[name], self.high[name]
            if not low <= size <= high:
                return f"{name}={size} is not in {low} to {high}, where the plan was found to hold"
        if math.prod(point[name] for name in self.axes) > RANKS:
            return f"the mesh has more than {RANKS} ranks"
        conditions: list[Condition] = [*self.cuts, *self.lengths]
        violated = next((each for each in conditions if not each.holds(point)), None)
        return f"it must hold that {violated.text()}" if violated else ""

    @property
    def conditions(self) -> list[str]:
        """The conditions as text."""
        conditions: list[Condition] = [*independent(self.cuts), *self.lengths]
        return list(dict.fromkeys(each.text() for each in conditions))


def widest(learned: Learned, count: str) -> Region:
    """The region to try first: numbers are whole, and cuts are even where the plan's are.

    Meshes have up to ``RANKS`` ranks, and dims are as large as the meshes need.
    """
    symbolic, exchanges = learned.lowered, list(exchange_conditions(learned.lowered))
    cuts = [each for program in learned.symbolic.values() for each in program.whole_numbers()]
    cuts += [*symbolic.cuts, *(each for each in exchanges if isinstance(each, CutCondition))]
    cuts = list(dict.fromkeys(cuts))
    low, high = _ranges(symbolic, count, cuts)
    lengths = tuple(dict.fromkeys(each for each in exchanges if isinstance(each, LengthCondition)))
    return Region(symbolic.point, symbolic.axes, low, high, tuple(cuts), lengths, tuple(learned.points), count)


Ranges = tuple[Mapping[str, int], Mapping[str, int]]  # the least and the most of each symbol


def _ranges(symbolic: SymbolicProgram, count: str, cuts: Sequence[CutCondition]) -> Ranges:
    reference, axes, moving = symbolic.point, symbolic.axes, symbolic.moving_axes
    fixed_cuts = [cut for cut in cuts if cut.is_even and not names_in(cut.size)]
    limits = {axis: reference[axis] for axis in axes}
    for axis in moving:  # an axis has no more ranks than dims without a symbol can be cut into evenly
        sizes = [int(cut.size) for cut in fixed_cuts if axis in names_in(cut.shards)]
        limits[axis] = math.gcd(*sizes) if sizes else RANKS
    low, high, conditions = {count: FEW}, {count: MODULES}, independent(cuts)
    for name, size in reference.items():
        if name in axes:
            low[name], high[name] = 2 if name in moving else size, limits[name]
        elif name != count:
            cut_by = {axis for cut in conditions if name in names_in(cut.size) for axis in names_in(cut.shards)}
            grows = any(limits.get(axis) == RANKS for axis in cut_by)
            low[name], high[name] = max(1, size // SHRINK), size * (RANKS if grows else GROWTH)
    return {name: low[name] for name in reference}, {name: high[name] for name in reference}


def other_meshes(symbolic: SymbolicProgram) -> Iterator[Point]:
    """Points of other meshes: all axes twice as large, each alone, all 4 and 3 times. Dims grow as their cuts need."""
    moving = symbolic.moving_axes
    alone = [([axis], 2) for axis in moving] if len(moving) > 1 else []
    for names, factor in ((moving, 2), *alone, (moving, 4), (moving, 3)) if moving else ():
        point = {name: size * factor if name in names else size for name, size in symbolic.point.items()}
        for cut in symbolic.cuts:
            free = names_in(cut.size) - {*symbolic.axes}
            if cut.is_even and free and not cut.holds(point):
                point[min(free)] *= cut.missing_factor(point)
        yield point


def probed(region: Region, is_same: IsSame) -> Region:
    """The region made so small that the plan is the same at its ends; ``is_same`` compiles at a point and compares.

    The ends: all dims at their largest, then at their smallest; all axes likewise, and the dims that they cut grow as
    much. If the plan differs at an end, the region is narrowed for each symbol alone, then for all of them together.
    """
    dims = [name for name in region.low if name not in (*region.axes, region.count)]
    for names in (dims, list(region.axes)):
        for is_high in (True, False):
            smaller = _narrowed(region, names, is_high, is_same, halvings=1)
            if smaller is None:
                for name in names:
                    region = _narrowed(region, [name], is_high, is_same, HALVINGS) or _fixed(region, [name], is_high)
                smaller = _narrowed(region, names, is_high, is_same, HALVINGS)
            region = smaller or _fixed(region, names, is_high)
    return region


def _narrowed(region: Region, names: Sequence[str], is_high: bool, is_same: IsSame, halvings: int) -> Region | None:
    """The region with one end of some symbols as far as the plan is found to hold; None if it never does.

    Dims go no further than a point that was compiled: a size that has one form at two points has it in between.
    """
    for i in range(halvings):
        end = region.high if is_high else region.low
        if i:
            end = {**end, **{name: math.isqrt(region.reference[name] * end[name]) for name in names}}
            region = _with_end(region, end, is_high)
        point: Point = region.reference
        for name in names:
            nearest = (_with_size(region, point, name, size) for size in _steps(point[name], end[name]))
            point = next(filter(None, nearest), point)
        is_known = point in (region.reference, *region.probes)
        if is_known or is_same(point):
            narrowed = region if is_known else replace(region, probes=(*region.probes, point))
            dims = [name for name in names if name not in region.axes]
            return _with_end(narrowed, {**end, **{name: point[name] for name in dims}}, is_high)
    return None


def _fixed(region: Region, names: Sequence[str], is_high: bool) -> Region:
    """The region in which some symbols go no further than their sizes at the reference."""
    end = region.high if is_high else region.low
    return _with_end(region, {**end, **{name: region.reference[name] for name in names}}, is_high)


def _with_end(region: Region, end: Mapping[str, int], is_high: bool) -> Region:
    return replace(region, high=end) if is_high else replace(region, low=end)


def _steps(size: int, bound: int) -> Iterator[int]:
    """Sizes from ``bound`` to ``size``, each a multiple or a divisor of ``size`` by factors 2 and 3."""
    ratios = sorted({2**i * 3**j for i in range(17) for j in range(3)}, reverse=True)
    for ratio in ratios:
        if bound >= size * ratio:
            yield size * ratio
        elif bound < size and size % ratio == 0 and size // ratio >= bound:
            yield size // ratio


def _with_size(region: Region, point: Point, name: str, size: int) -> Point | None:
    """The point inside the region with another size of a symbol; the dims that it cuts grow as much.

    Dims become multiples of the axes that cut them. None if there is no such point.
    """
    sizes = {**point, name: size}
    for cut in region.cuts:
        if name in names_in(cut.shards) and getattr(cut.size, "is_Symbol", False):
            sizes[cut.size.name] = max(point[cut.size.name], point[cut.size.name] * size // point[name])
    for _ in range(2 * len(region.cuts) + 1):
        violated = next((cut for cut in region.cuts if not cut.holds(sizes)), None)
        if violated is None:
            return sizes if not region.why_not(sizes) else None
        free = names_in(violated.size) - {name, region.count, *region.axes}
        if not free or not violated.is_even:
            return None
        sizes[min(free)] *= violated.missing_factor(sizes)
    return None
