"""Costs of a plan for any mesh and any named sizes, from a few compiles: as expressions, and as numbers at a point."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardc.compiler import Compiled
from shardc.costs.stage_schedule import schedule_of
from shardc.costs.step import StepCost, step_cost
from shardc.language.errors import ShardingError
from shardc.passes.lower.rematerialize import rematerialize
from shardc.passes.order import run_passes
from shardc.passes.verify import verify
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.report.symbolic.costs import along, expressed_cost, fullest
from shardc.report.symbolic.expression import Cut, Key, Reach, Symbolic, numbers, outline, reaches
from shardc.report.symbolic.form import Form, Point, constant
from shardc.report.symbolic.learn import (
    FEW,
    Compile,
    Learned,
    compiled_at,
    first_difference,
    learn,
    levels_of,
    places_of,
    point_text,
)
from shardc.schedules.schedule import COMPUTE, Action


@dataclass(frozen=True)
class Repeated:
    """``symbol`` counts the modules of the list at ``path``, which are alike."""

    symbol: str
    path: str


@dataclass(frozen=True)
class SymbolicPlan:
    """A plan at ``reference`` and wherever in ``region`` one says.

    ``cost``: as expressions, before collectives go in buckets; ``at``: the numbers of a step, all of them exact.
    """

    compile: Compile = field(repr=False)
    reference: Point
    axes: Sequence[str]
    learned: Learned = field(repr=False)
    region: Region
    repeated: Repeated | None = None
    known: dict[int, Symbolic] = field(default_factory=dict, repr=False)
    judged: dict[tuple[tuple[str, int], ...], str] = field(default_factory=dict, repr=False)

    @cached_property
    def cost(self) -> StepCost:
        """Expressions in all symbols."""
        here = self._expressed(self.reference)
        if self.repeated is None:
            return here
        name = self.repeated.symbol
        last = self.reference[name] if self.reference[name] > FEW + 1 else FEW + 2  # which is held against a compile
        counts = [FEW, FEW + 1, last]
        several = [(count, self._expressed({**self.reference, name: count})) for count in counts]
        return along(name, several, here)

    def at(self, point: Point) -> StepCost:
        """The numbers at a point: a size for each symbol that is another than at the reference.

        Raises a ShardingError for a point where the plan is not known to hold.
        """
        return step_cost(self.program(point))

    def program(self, point: Point) -> Program:
        """The localized program at a point, equal to a fresh compile there."""
        whole = {**self.reference, **point}
        reason = self.why_not(whole)
        if reason:
            raise self.refusal(whole, reason)
        return self.substituted(whole)

    def why_not(self, point: Point) -> str:
        """Why the plan is not known to be that of a point, which has all symbols; nothing where it is."""
        outside, key = self.region.why_not(point), tuple(sorted(point.items()))
        if not outside and key not in self.judged:
            self.judged[key] = self._other_branch(point) or self._other_plan(point) or self._other_order(point)
        return outside or self.judged[key]

    def refusal(self, point: Point, reason: str) -> ShardingError:
        """The error for a point outside."""
        return ShardingError(
            f"the cost at {point_text(point)}",
            f"this plan is that of {point_text(self.reference)}",
            f"it is not known to be the plan there: {reason}",
            "compile there (--recompile), or choose sizes inside the region",
        )

    def substituted(self, point: Point) -> Program:
        """The localized program at a point that has all symbols, in the region or not."""
        return run_passes(self._lowered(point).at(point), after=rematerialize)

    def _other_branch(self, point: Point) -> str:
        """Where the model's own Python goes another way at sizes that it was not captured at; the mesh is not its."""
        few = {**point, **{axis: self.reference[axis] for axis in self.axes}}
        if self.repeated is not None:
            few[self.repeated.symbol] = FEW
        if few in self.learned.points:
            return ""
        levels = compiled_at(self.compile, few)
        if isinstance(levels, Exception):
            return f"it does not compile there: {levels}"
        known, found = self.learned.symbolic["capture"], levels["capture"]
        ours, theirs = self.learned.outlines["capture"], outline(found)
        if ours != theirs:
            return f"the model does something else there: {first_difference(ours, theirs)}"
        return "" if known.says(few, found) else "the model has other numbers there"

    def _other_plan(self, point: Point) -> str:
        """Where the order of some costs is another, or sizes are alike: what the passes make of a few modules there."""
        program = run_passes(self.learned.symbolic["capture"].at(point), until=rematerialize)
        ours, theirs = self.learned.outlines["rematerialize"], outline(program)
        return "" if ours == theirs else first_difference(ours, theirs)

    def _other_order(self, point: Point) -> str:
        """Of a pipeline: where another rank is the fullest, or microbatches go in another order."""
        if self.rank is None:
            return ""
        program = self.substituted(point)
        if fullest(program) != self.rank:
            return f"rank {fullest(program)} of the pipeline is the fullest there, and not rank {self.rank}"
        return "" if _order(program) == _order(self.here) else f"the schedule is {schedule_of(program).name} there"

    @cached_property
    def rank(self) -> int | None:
        """Of a pipeline the rank whose memory is counted, the fullest."""
        return fullest(self.here) if has_stages(self.here) else None

    @cached_property
    def here(self) -> Program:
        """The localized program at the reference."""
        return self.substituted(self.reference)

    def is_same(self, point: Point) -> bool:
        """Whether a fresh compile at a point has this plan, and its cost."""
        logging.disable(logging.ERROR)  # torch's own, of tensors that no machine could address
        try:
            fresh = self.compile(point)
            if any(outline(program) != self.learned.outlines[level] for level, program in levels_of(fresh).items()):
                return False
            return step_cost(fresh.program) == step_cost(self.substituted(point))
        except Exception:  # whatever a model says of sizes that it does not take
            return False
        finally:
            logging.disable(logging.NOTSET)

    def _expressed(self, point: Point) -> StepCost:
        symbolic = self._lowered(point)
        lowered = symbolic.at(point)
        verify(lowered)  # asks of each call in global types whether it has a rule, which localize relies on
        return expressed_cost(symbolic, lowered, run_passes(lowered, after=rematerialize))

    def _lowered(self, point: Point) -> Symbolic:
        """The program with as many repeated modules; one compile for each such number."""
        few = self.learned.symbolic["rematerialize"]
        if self.repeated is None:
            return few
        count = point[self.repeated.symbol]
        if count == few.point[self.repeated.symbol]:
            return few
        if count not in self.known:
            self.known[count] = self._read(count)
        return self.known[count]

    def _read(self, count: int) -> Symbolic:
        """From a compile where the fewest sizes are alike: the first of the multiples, if that tells them apart."""
        assert self.repeated is not None
        for i, other in ((1, 2), (2, 1), (0, 1)):
            point = {**self.learned.points[i], self.repeated.symbol: count}
            program = levels_of(self.compile(point))["rematerialize"]
            try:
                found = Symbolic(program, [self._form(i, *each) for each in numbers(program)], point, self.axes)
            except ShardingError:
                if i == 0:
                    raise
                continue
            if count != FEW + 1:  # what goes for fewer and for more goes for it
                self._check(found, {**self.learned.points[other], self.repeated.symbol: count})
            return found
        raise AssertionError("the last one returns or raises")

    def _check(self, found: Symbolic, point: Point) -> None:
        """A ShardingError unless a program with more modules is what a compile at another point has."""
        program = levels_of(self.compile(point))["rematerialize"]
        if not found.says(point, program) or outline(program) != outline(found.reference):
            raise ShardingError(
                "--symbolic",
                f"the plan at {point_text(point)}",
                f"some of its sizes or choices go by how many modules there are, not as those of {FEW}",
                "count at sizes: --at ... --recompile",
            )

    def _form(self, i: int, key: Key, size: int) -> Form:
        """As in one of the few modules; else as any number of this value is; what none has, as a seed, is fixed."""
        found: set[Form] = set()
        for place in places_of(key, self.repeated.path if self.repeated else ""):
            found = self.learned.forms.get((i, place, size), set())
            if len(found) == 1:
                return next(iter(found))
        if not found:
            return constant(size)
        raise ShardingError(
            f"a number of {' '.join(key[:-2])}",
            f"it is {size}, which is {len(found)} different sizes at {point_text(self.reference)}",
            "where there are more modules it cannot be told which it is",
            "start from sizes that differ from each other",
        )


def symbolic_plan(
    compile_: Compile,
    reference: Point,
    axes: Sequence[str],
    repeated: Repeated | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> SymbolicPlan:
    """The plan at ``reference``, a size for each symbol, and where else it holds.

    ``compile_`` compiles at a point; ``axes`` are the symbols that are axes of the mesh. ``repeated``: the symbol that
    counts modules. Raises a ShardingError where sizes have no form.
    """
    few = {**reference, **({repeated.symbol: FEW} if repeated else {})}
    told = _remembering(compile_, progress)
    learned = learn(told, few, axes, *((repeated.symbol, repeated.path) if repeated else ()))
    lowered = learned.symbolic["rematerialize"]
    learned = learned.on_meshes(told, other_meshes(lowered, lowered.expressed[1]))
    region = _region(learned, repeated.symbol if repeated else "")
    plan = SymbolicPlan(told, reference, axes, learned, region, repeated)
    return replace(plan, region=probed(region, plan.is_same))


def _region(learned: Learned, count: str) -> Region:
    """Where numbers are whole and cuts as even as in the plan: what is tried first."""
    lowered = learned.symbolic["rematerialize"]
    found = list(reaches(lowered))
    cuts = [each for symbolic in learned.symbolic.values() for each in symbolic.wholes()]
    cuts += [*lowered.expressed[1], *(each for each in found if isinstance(each, Cut))]
    region = widest(lowered, count, tuple(dict.fromkeys(cuts)), learned.points)
    return replace(region, reaches=tuple(dict.fromkeys(each for each in found if isinstance(each, Reach))))


def _order(program: Program) -> list[list[Action]]:
    """What each rank of a pipeline computes, in order."""
    return [[action for action in row if action.kind in COMPUTE] for row in schedule_of(program).actions]


def _remembering(compile_: Compile, progress: Callable[[str], None]) -> Compile:
    """The same, that compiles once at each point."""
    seen: dict[tuple[tuple[str, int], ...], Compiled] = {}

    def told(point: Point) -> Compiled:
        key = tuple(sorted(point.items()))
        if key not in seen:
            progress(point_text(point))
            seen[key] = compile_(point)
        return seen[key]

    return told


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
