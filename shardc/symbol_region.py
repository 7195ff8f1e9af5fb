"""Where a plan holds: the sizes between which it was compiled and was the same, and which cuts of dims stay even."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardc.symbol_expression import Cut, Symbolic
from shardc.symbol_form import Point
from shardc.symbol_probe import FEW
from shardc.symbol_window import Reach

IsSame = Callable[[Point], bool]
RANKS = 65536
GROWTH = 64  # times as large as at the reference, and a 16th of it, are dims by default
SHRINK = 16
MODULES = 1024  # of a list of them
HALVINGS = 3


@dataclass(frozen=True)
class Region:
    """``low`` and ``high``: of each symbol, both included; ``cuts``: what divides what; ``probes``: points compiled.

    ``reaches``: chunks that are long enough for what neighbours take. ``count``: the symbol that counts modules, if
    there is one.
    """

    reference: Point
    axes: Sequence[str]
    low: Mapping[str, int]
    high: Mapping[str, int]
    cuts: Sequence[Cut]
    probes: Sequence[Point] = ()
    count: str = ""
    reaches: Sequence[Reach] = ()

    def why_not(self, point: Point) -> str:
        """What puts a point outside; nothing where it is inside."""
        for name, size in point.items():
            if not self.low[name] <= size <= self.high[name]:
                return (
                    f"{name}={size} is not in {self.low[name]} to {self.high[name]}, where the plan was found to hold"
                )
        if math.prod(point[name] for name in self.axes) > RANKS:
            return f"the mesh has more than {RANKS} ranks"
        asked: list[Cut | Reach] = [*self.cuts, *self.reaches]
        broken = next((each for each in asked if not each.holds(point)), None)
        return f"it must hold that {broken.text()}" if broken else ""

    @property
    def conditions(self) -> list[str]:
        """What must divide what, and be how long."""
        asked: list[Cut | Reach] = [*telling(self.cuts), *self.reaches]
        return list(dict.fromkeys(each.text() for each in asked))


def telling(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts that say something: what no other implies."""
    from sympy import expand, sympify

    found = [_rest(cut) for cut in _fewer(cuts) if not expand(sympify(cut.size) / cut.shards).is_integer]
    even = {cut: sympify(cut.size) / cut.shards for cut in found if cut.is_even}
    symbols = {cut.size: cut.shards for cut in even if getattr(cut.size, "is_Symbol", False)}

    def is_implied(cut: Cut) -> bool:
        if not cut.is_even or not _names(cut.size):
            return False
        times = (even[cut] / other for other in even.values() if other != even[cut])
        if any(each.is_integer for each in times):
            return True
        rest = even[cut]
        for symbol, shards in symbols.items():
            if symbol != cut.size and rest.has(symbol):
                rest = rest.subs(symbol, symbol * shards)
        return bool(expand(rest).is_integer)

    return [cut for cut in dict.fromkeys(found) if not is_implied(cut)]


def _rest(cut: Cut) -> Cut:
    """An even cut of a sum without the summands that are multiples: of ``H + 2*n`` by ``n`` that of ``H``."""
    from sympy import Add, expand, fraction, sympify, together

    if not cut.is_even or not _names(cut.size):
        return cut
    summands = Add.make_args(expand(sympify(cut.size) / cut.shards))
    size, shards = fraction(together(Add(*(each for each in summands if not each.is_integer))))
    return Cut(size, shards, is_even=True)


def _fewer(cuts: Sequence[Cut]) -> list[Cut]:
    """The same cuts, those of sizes without a symbol by the same axes as one of what divides them all."""
    fixed: dict[object, int] = {}
    for cut in cuts:
        if cut.is_even and not _names(cut.size):
            fixed[cut.shards] = math.gcd(fixed.get(cut.shards, 0), int(cut.size))
    rest = [cut for cut in cuts if not cut.is_even or _names(cut.size)]
    return [*rest, *(Cut(size, shards, is_even=True) for shards, size in fixed.items())]


def widest(symbolic: Symbolic, count: str, cuts: Sequence[Cut], probes: Sequence[Point]) -> Region:
    """What is tried first: as many ranks as there are, and batches as large as those need."""
    reference, axes = symbolic.point, symbolic.axes
    held = {axis for axis in axes if reference[axis] == 1 or axis in symbolic.held}
    limits = {axis: reference[axis] if axis in held else _limit(axis, cuts) for axis in axes}
    low, high, said = {count: FEW}, {count: MODULES}, telling(cuts)
    for name, size in reference.items():
        if name in axes:
            low[name], high[name] = size if name in held else 2, limits[name]
        elif name != count:
            axes_of = {axis for cut in said if name in _names(cut.size) for axis in _names(cut.shards)}
            grows = any(limits.get(axis) == RANKS for axis in axes_of)
            low[name], high[name] = max(1, size // SHRINK), size * (RANKS if grows else GROWTH)
    low, high = ({name: end[name] for name in reference} for end in (low, high))
    return Region(reference, axes, low, high, cuts, tuple(probes), count)


def other_meshes(symbolic: Symbolic, cuts: Sequence[Cut]) -> Iterator[Point]:
    """Points of other meshes, with dims as much larger as their cuts need: all axes larger, each alone, all again."""
    moving = [axis for axis in symbolic.axes if symbolic.point[axis] > 1 and axis not in symbolic.held]
    alone = [([axis], 2) for axis in moving] if len(moving) > 1 else []
    for names, factor in ((moving, 2), *alone, (moving, 4), (moving, 3)) if moving else ():
        point = {name: size * factor if name in names else size for name, size in symbolic.point.items()}
        for cut in cuts:
            free = _names(cut.size) - {*symbolic.axes}
            if cut.is_even and free and not cut.holds(point):
                point[min(free)] *= cut.lacks(point)
        yield point


def _limit(axis: str, cuts: Sequence[Cut]) -> int:
    """The ranks along an axis that cuts dims evenly that have no symbol."""
    fixed = [int(cut.size) for cut in cuts if cut.is_even and axis in _names(cut.shards) and not _names(cut.size)]
    return math.gcd(*fixed) if fixed else RANKS


def _names(expression: object) -> set[str]:
    return {each.name for each in getattr(expression, "free_symbols", ())}


def probed(region: Region, is_same: IsSame) -> Region:
    """The region made so small that the plan is the same at its ends; ``is_same`` compiles at a point and looks.

    Ends: all dims as large as can be, all as small; all axes likewise, with what they cut as much larger. Where the
    plan is another there, each symbol alone, and all within what these leave.
    """
    for names in (_dims(region), list(region.axes)):
        for is_high in (True, False):
            found = _narrowed(region, names, is_high, is_same, halvings=1)
            if found is None:
                for name in names:
                    region = _narrowed(region, [name], is_high, is_same, HALVINGS) or _fixed(region, [name], is_high)
                found = _narrowed(region, names, is_high, is_same, HALVINGS)
            region = found or _fixed(region, names, is_high)
    return region


def _dims(region: Region) -> list[str]:
    return [name for name in region.low if name not in (*region.axes, region.count)]


def _narrowed(region: Region, names: Sequence[str], is_high: bool, is_same: IsSame, halvings: int) -> Region | None:
    """With one end of the ranges of some symbols as far as the plan is found to hold; none where it never does.

    Dims go no further than a point that was compiled: between two points where a size is of one form it is of that.
    """
    for i in range(halvings):
        end = region.high if is_high else region.low
        if i:
            end = {**end, **{name: math.isqrt(region.reference[name] * end[name]) for name in names}}
            region = _ending(region, end, is_high)
        point = _reached(region, names, end)
        is_known = point in (region.reference, *region.probes)
        if is_known or is_same(point):
            found = region if is_known else replace(region, probes=(*region.probes, point))
            dims = [name for name in names if name not in region.axes]
            return _ending(found, {**end, **{name: point[name] for name in dims}}, is_high)
    return None


def _fixed(region: Region, names: Sequence[str], is_high: bool) -> Region:
    """With symbols going no further than they are at the reference."""
    end = region.high if is_high else region.low
    return _ending(region, {**end, **{name: region.reference[name] for name in names}}, is_high)


def _ending(region: Region, end: Mapping[str, int], is_high: bool) -> Region:
    return replace(region, high=end) if is_high else replace(region, low=end)


def _reached(region: Region, names: Sequence[str], bound: Mapping[str, int]) -> Point:
    """A point where these symbols are as near to a bound as the conditions let them."""
    point: Point = region.reference
    for name in names:
        point = next(
            (found for size in _steps(point[name], bound[name]) if (found := _with(region, point, name, size))), point
        )
    return point


def _steps(size: int, bound: int) -> Iterator[int]:
    """Sizes from a bound to where we are, that are this size times or by small primes."""
    ratios = sorted({2**i * 3**j for i in range(17) for j in range(3)}, reverse=True)
    for ratio in ratios:
        if bound >= size * ratio:
            yield size * ratio
        elif bound < size and size % ratio == 0 and size // ratio >= bound:
            yield size // ratio


def _with(region: Region, point: Point, name: str, size: int) -> Point | None:
    """The point with a symbol at a size, and what it cuts as much larger; none where there is none.

    Dims are made multiples of what cuts them.
    """
    made = {**point, name: size}
    for cut in region.cuts:
        if name in _names(cut.shards) and getattr(cut.size, "is_Symbol", False):
            made[cut.size.name] = max(point[cut.size.name], point[cut.size.name] * size // point[name])
    for _ in range(2 * len(region.cuts) + 1):
        broken = next((cut for cut in region.cuts if not cut.holds(made)), None)
        if broken is None:
            return made if not region.why_not(made) else None
        free = _names(broken.size) - {name, region.count, *region.axes}
        if not free or not broken.is_even:
            return None
        made[min(free)] *= broken.lacks(made)
    return None
