"""Where a plan holds: the sizes between which it was compiled and was the same, and which cuts of dims stay even."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardc.symbol_expression import Cut, value
from shardc.symbol_form import Point

IsSame = Callable[[Point], bool]
RANKS = 65536
GROWTH = 64  # times as large as at the reference, and a 16th of it, are dims by default
SHRINK = 16
MODULES = 1024  # of a list of them
HALVINGS = 3


@dataclass(frozen=True)
class Region:
    """``low`` and ``high``: of each symbol, both included; ``cuts``: what divides what; ``probes``: points compiled.

    ``count``: the symbol that counts modules, if there is one.
    """

    reference: Point
    axes: Sequence[str]
    low: Mapping[str, int]
    high: Mapping[str, int]
    cuts: Sequence[Cut]
    probes: Sequence[Point] = ()
    count: str = ""

    def why_not(self, point: Point) -> str:
        """What puts a point outside; nothing where it is inside."""
        for name, size in point.items():
            if not self.low[name] <= size <= self.high[name]:
                return (
                    f"{name}={size} is not in {self.low[name]} to {self.high[name]}, where the plan was found to hold"
                )
        if math.prod(point[name] for name in self.axes) > RANKS:
            return f"the mesh has more than {RANKS} ranks"
        broken = next((cut for cut in self.cuts if not cut.holds(point)), None)
        return f"it must hold that {broken.text()}" if broken else ""

    def text(self) -> str:
        """The conditions, a line each."""
        ranges = [f"{name} {self.low[name]} to {self.high[name]}" for name in self.low]
        return "\n".join([", ".join(ranges), *(cut.text() for cut in self.conditions)])

    @property
    def conditions(self) -> list[Cut]:
        """What must divide what."""
        return telling(self.cuts)


def telling(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts that say something: what no other implies."""
    from sympy import sympify

    found = [cut for cut in _fewer(cuts) if not (sympify(cut.size) / cut.shards).is_integer]
    symbols = {cut.size: cut.shards for cut in found if cut.is_even and getattr(cut.size, "is_Symbol", False)}

    def is_implied(cut: Cut) -> bool:
        rest = sympify(cut.size) / cut.shards
        for symbol, shards in symbols.items():
            if symbol != cut.size and rest.has(symbol):
                rest = rest.subs(symbol, symbol * shards)
        return cut.is_even and bool(rest.is_integer) and bool(_names(cut.size))

    return [cut for cut in dict.fromkeys(found) if not is_implied(cut)]


def _fewer(cuts: Sequence[Cut]) -> list[Cut]:
    """The same cuts, those of sizes without a symbol by the same axes as one of what divides them all."""
    fixed: dict[object, int] = {}
    for cut in cuts:
        if cut.is_even and not _names(cut.size):
            fixed[cut.shards] = math.gcd(fixed.get(cut.shards, 0), int(cut.size))
    rest = [cut for cut in cuts if not cut.is_even or _names(cut.size)]
    return [*rest, *(Cut(size, shards, is_even=True) for shards, size in fixed.items())]


def widest(reference: Point, axes: Sequence[str], count: str, cuts: Sequence[Cut], probes: Sequence[Point]) -> Region:
    """What is tried first: as many ranks as there are, and batches as large as those need."""
    limits = {axis: _limit(axis, cuts) if reference[axis] > 1 else 1 for axis in axes}
    low, high, said = {count: 1}, {count: MODULES}, telling(cuts)
    for name, size in reference.items():
        if name in axes:
            low[name], high[name] = min(size, 2), limits[name]
        elif name != count:
            axes_of = {axis for cut in said if name in _names(cut.size) for axis in _names(cut.shards)}
            grows = any(limits[axis] == RANKS for axis in axes_of)
            low[name], high[name] = max(1, size // SHRINK), size * (RANKS if grows else GROWTH)
    low, high = ({name: end[name] for name in reference} for end in (low, high))
    return Region(reference, axes, low, high, cuts, tuple(probes), count)


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
    """With one end of the ranges of some symbols as far as the plan is found to hold; none where it never does."""
    for i in range(halvings):
        region = _moved(region, names, is_high, lambda here, end: math.isqrt(here * end)) if i else region
        point = _reached(region, names, region.high if is_high else region.low)
        if point in (region.reference, *region.probes):
            return region
        if is_same(point):
            return replace(region, probes=(*region.probes, point))
    return None


def _fixed(region: Region, names: Sequence[str], is_high: bool) -> Region:
    """With symbols going no further than they are at the reference."""
    return _moved(region, names, is_high, lambda here, end: here)


def _moved(region: Region, names: Sequence[str], is_high: bool, move: Callable[[int, int], int]) -> Region:
    end = region.high if is_high else region.low
    moved = {**end, **{name: move(region.reference[name], end[name]) for name in names}}
    return replace(region, high=moved) if is_high else replace(region, low=moved)


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
        dim, shards = min(free), value(broken.shards, made)
        made[dim] *= shards // math.gcd(shards, value(broken.size, made))
    return None
