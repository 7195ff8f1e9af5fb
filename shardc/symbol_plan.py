"""Costs of a plan for any mesh and any named sizes, from a few compiles: as expressions, and as numbers at a point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardc.action import COMPUTE, Action
from shardc.api import Compiled
from shardc.error import ShardingError
from shardc.passes.pipeline import run_passes
from shardc.passes.rematerialize import rematerialize
from shardc.passes.verify import verify
from shardc.program import Program
from shardc.stage import has_stages
from shardc.stage_schedule import schedule_of
from shardc.step_cost import StepCost, step_cost
from shardc.symbol_cost import along, expressed_cost
from shardc.symbol_expression import Cut, Symbolic
from shardc.symbol_form import Form, Point, constant
from shardc.symbol_memory import fullest
from shardc.symbol_numbers import Key, numbers, outline
from shardc.symbol_probe import (
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
from shardc.symbol_region import Region, other_meshes, probed, widest
from shardc.symbol_window import Reach, reaches


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
