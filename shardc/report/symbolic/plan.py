"""A symbolic plan: the cost of a step for any mesh and any named sizes, as expressions and as numbers at a point."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from shardc.compiler import Compiled
from shardc.costs.records import (
    CostAt,
    CostExpressions,
    MemoryExpressions,
    RegionEntry,
    SymbolicCost,
    TrafficExpression,
)
from shardc.costs.stages.record import StageRecord
from shardc.costs.stages.schedule import schedule_of
from shardc.costs.step import StepCost, step_cost
from shardc.language.errors import ShardingError
from shardc.language.machine import WHOLE_PAYLOAD
from shardc.language.text import aligned, table
from shardc.passes.lower.cut_saved import cut_saved
from shardc.passes.order import run_passes
from shardc.passes.verify import verify
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.report.symbolic.costs import along, expressed_cost, fullest
from shardc.report.symbolic.form import Point, first_difference, numbers, outline, point_text
from shardc.report.symbolic.learn import FEW, Compile, Learned, compiled_at, learn, levels_of
from shardc.report.symbolic.region import Region, other_meshes, probed, widest
from shardc.report.symbolic.symbolic_program import SymbolicProgram
from shardc.schedules.schedule import COMPUTE, Action


@dataclass(frozen=True)
class Repeated:
    """``symbol`` counts the modules of the list at ``path``, which are alike."""

    symbol: str
    path: str


def symbolic_plan(
    compile_: Compile,
    reference: Point,
    axes: Sequence[str],
    repeated: Repeated | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> SymbolicPlan:
    """The plan at ``reference``, a size for each symbol, and the region where it holds.

    ``compile_`` compiles at a point; ``axes`` are the symbols that are axes of the mesh. ``repeated``: the symbol that
    counts modules. Raises a ShardingError if sizes have no form.
    """
    compile_ = _remembering(compile_, progress)
    if repeated:
        learned = learn(compile_, {**reference, repeated.symbol: FEW}, axes, repeated.symbol, repeated.path)
    else:
        learned = learn(compile_, reference, axes)
    learned = learned.on_meshes(compile_, other_meshes(learned.lowered))
    region = widest(learned, repeated.symbol if repeated else "")
    plan = SymbolicPlan(compile_, reference, axes, learned, region, repeated)
    return replace(plan, region=probed(region, plan.is_same))


def _remembering(compile_: Compile, progress: Callable[[str], None]) -> Compile:
    """``compile_`` with a cache by point, which reports each compile."""

    @cache
    def compiled(sizes: tuple[tuple[str, int], ...], text: str) -> Compiled:
        progress(text)
        return compile_(dict(sizes))

    return lambda point: compiled(tuple(sorted(point.items())), point_text(point))


@dataclass(frozen=True)
class SymbolicPlan:
    """A plan at ``reference``, which holds in ``region``.

    ``cost``: as expressions, before collectives go in buckets; ``at``: the numbers of a step, all of them exact.
    """

    compile: Compile = field(repr=False)
    reference: Point
    axes: Sequence[str]
    learned: Learned = field(repr=False)
    region: Region
    repeated: Repeated | None = None
    _longer: dict[int, SymbolicProgram] = field(default_factory=dict, repr=False)  # by the number of modules
    _reasons: dict[tuple[tuple[str, int], ...], str] = field(default_factory=dict, repr=False)  # by point

    @cached_property
    def cost(self) -> StepCost:
        """The cost of a step as expressions in all symbols."""
        here = self._expressed(self.reference)
        if self.repeated is None:
            return here
        name = self.repeated.symbol
        last = self.reference[name] if self.reference[name] > FEW + 1 else FEW + 2  # checked by another compile
        several = [(count, self._expressed({**self.reference, name: count})) for count in (FEW, FEW + 1, last)]
        return along(name, several, here)

    def at(self, point: Point) -> StepCost:
        """The cost of a step at a point, which has the sizes that differ from those of the reference.

        Raises a ShardingError for a point where the plan is not known to hold.
        """
        return step_cost(self.program(point))

    def program(self, point: Point) -> Program:
        """The localized program at a point, equal to a fresh compile there."""
        whole = {**self.reference, **point}
        if reason := self.why_not(whole):
            raise self.refusal(whole, reason)
        return self.substituted(whole)

    def why_not(self, point: Point) -> str:
        """The reason why the plan is not known to hold at a point, which has all symbols; empty if it holds."""
        outside, key = self.region.why_not(point), tuple(sorted(point.items()))
        if not outside and key not in self._reasons:
            self._reasons[key] = self._other_branch(point) or self._other_plan(point)
        return outside or self._reasons[key]

    def refusal(self, point: Point, reason: str) -> ShardingError:
        """The error for a point where the plan does not hold."""
        what, problem = (
            f"this plan is that of {point_text(self.reference)}",
            f"it is not known to be the plan there: {reason}",
        )
        remedy = "compile there (--recompile), or choose sizes inside the region"
        return ShardingError(f"the cost at {point_text(point)}", what, problem, remedy)

    def substituted(self, point: Point) -> Program:
        """The localized program at a point that has all symbols, in the region or not."""
        return run_passes(self._lowered(point).at(point), after=cut_saved)

    @cached_property
    def here(self) -> Program:
        """The localized program at the reference."""
        return self.substituted(self.reference)

    @cached_property
    def rank(self) -> int | None:
        """The rank of a pipeline whose memory is reported, the fullest; None without a pipeline."""
        return fullest(self.here) if has_stages(self.here) else None

    def is_same(self, point: Point) -> bool:
        """Whether a fresh compile at a point has this plan and this cost."""
        logging.disable(logging.ERROR)  # torch logs tensors that no machine could address
        try:
            fresh = self.compile(point)
            return not self.learned.differs(levels_of(fresh)) and (
                step_cost(fresh.program) == step_cost(self.substituted(point))
            )
        except Exception:  # a model may raise anything for sizes that it does not take
            return False
        finally:
            logging.disable(logging.NOTSET)

    def _other_branch(self, point: Point) -> str:
        """The difference if the model's Python takes another branch at these sizes. The model knows no mesh."""
        few = {**point, **{axis: self.reference[axis] for axis in self.axes}}
        if self.repeated is not None:
            few[self.repeated.symbol] = FEW
        if few in self.learned.points:
            return ""
        levels = compiled_at(self.compile, few)
        if isinstance(levels, Exception):
            return f"it does not compile there: {levels}"
        captured = levels["capture"]
        difference = first_difference(self.learned.outlines["capture"], outline(captured))
        if difference:
            return f"the model does something else there: {difference}"
        return "" if self.learned.captured.agrees(few, captured) else "the model has other numbers there"

    def _other_plan(self, point: Point) -> str:
        """The difference if the passes choose another plan for a few modules, as costs or equal sizes may make them do.

        For a pipeline, also if microbatches go in another order or another rank is the fullest.
        """
        few = run_passes(self.learned.captured.at(point), until=cut_saved)
        difference = first_difference(self.learned.outlines["cut_saved"], outline(few))
        if difference or self.rank is None:
            return difference
        program = self.substituted(point)
        if fullest(program) != self.rank:
            return f"rank {fullest(program)} of the pipeline is the fullest there, and not rank {self.rank}"
        return "" if _order(program) == _order(self.here) else f"the schedule is {schedule_of(program).name} there"

    def _expressed(self, point: Point) -> StepCost:
        symbolic = self._lowered(point)
        lowered = symbolic.at(point)
        verify(lowered)  # binds the rule of each call in global types, which localize relies on
        return expressed_cost(symbolic, lowered, run_passes(lowered, after=cut_saved))

    def _lowered(self, point: Point) -> SymbolicProgram:
        """The lowered program with as many repeated modules as the point has, made once for each such number."""
        few = self.learned.lowered
        if self.repeated is None or point[self.repeated.symbol] == few.point[self.repeated.symbol]:
            return few
        count = point[self.repeated.symbol]
        if count not in self._longer:
            self._longer[count] = self._with_modules(self.repeated.symbol, count)
        return self._longer[count]

    def _with_modules(self, symbol: str, count: int) -> SymbolicProgram:
        """The program with ``count`` modules, from the first compile that tells its sizes apart, the reference last."""
        for i, other in ((1, 2), (2, 1), (0, 1)):
            point = {**self.learned.points[i], symbol: count}
            program = levels_of(self.compile(point))["cut_saved"]
            try:
                forms = [self.learned.form(i, *each) for each in numbers(program)]
            except ShardingError:
                if i == 0:
                    raise
                continue
            symbolic = SymbolicProgram(program, forms, point, self.axes)
            if count != FEW + 1:  # what holds for fewer and for more holds for it
                self._check(symbolic, {**self.learned.points[other], symbol: count})
            return symbolic
        raise AssertionError("the last one returns or raises")

    def _check(self, symbolic: SymbolicProgram, point: Point) -> None:
        """Raise a ShardingError unless a program with more modules agrees with a compile at another point."""
        program = levels_of(self.compile(point))["cut_saved"]
        if not symbolic.agrees(point, program) or outline(program) != outline(symbolic.reference):
            problem = f"some of its sizes or choices go by how many modules there are, not as those of {FEW}"
            remedy = "count at sizes: --at ... --recompile"
            raise ShardingError("--symbolic", f"the plan at {point_text(point)}", problem, remedy)


def _order(program: Program) -> list[list[Action]]:
    """The actions of each rank of a pipeline, in order."""
    return [[action for action in row if action.kind in COMPUTE] for row in schedule_of(program).actions]


POWERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
ROOM = 6  # letters by which a product of sent bytes may exceed a sum, for (n - 1)/n
PLACED = ("gathered", "peak")  # classes of memory that are counted at one place of the program
SHOWN = ("phase", "kind", "values", "bytes", "wire_bytes")
PLACE = "where most lives at these sizes"
ROUNDED = "what a rank sends is rounded down to whole bytes, a row at a time"

Numbers = Sequence[tuple[Point, StepCost]]


def plan_text(plan: SymbolicPlan, numbers: Numbers = ()) -> str:
    """Expressions, the region, and the numbers at points."""
    parts = [f"plan {digest(plan)} of {point_text(plan.reference)}\n", costs_text(plan), region_text(plan)]
    return "\n".join([*parts, *([numbers_text(numbers)] if numbers else [])])


def numbers_text(numbers: Numbers) -> str:
    """The cost of a step at points."""
    return "\n".join(f"at {point_text(point)}\n\n{cost.text()}" for point, cost in numbers)


def digest(plan: SymbolicPlan) -> str:
    """A hash of the plan without its sizes: of its ops, shardings and collectives."""
    lines = plan.learned.outlines["cut_saved"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def costs_text(plan: SymbolicPlan) -> str:
    """A line for each kind of collective, class of memory, and the operations."""
    cost = plan.cost
    rows = []
    for each in cost.traffic:
        sent = expression_text(each.wire_bytes, 0 if each.kind in WHOLE_PAYLOAD else ROOM)
        rows.append((*each.key, expression_text(each.values), expression_text(each.bytes), sent))
    sends, of = "bytes that a rank sends", "one rank"
    if plan.rank is not None:
        sends, of = "bytes that a rank of each stage sends", f"rank {plan.rank} of the pipeline, the fullest"
    header = ("phase", "kind", "axes", "values", "bytes", sends)
    places = {name: f"  ({PLACE})" for name in PLACED if cost.memory.get(name, 0) != 0}
    memory = [(name, f"{expression_text(size)}{places.get(name, '')}") for name, size in cost.memory.items()]
    traffic_text = f"{_columns(header, rows)}{ROUNDED}\n" if rows else "no collectives\n"
    memory_text = _columns((f"memory of {of}", "bytes"), memory)
    flops_text = _columns(("floating-point operations", "count"), [("one rank", expression_text(cost.flops))])
    return "\n".join([traffic_text, memory_text, flops_text])


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, all aligned to the left."""
    return "\n".join(aligned([header, *rows])) + "\n"


def region_text(plan: SymbolicPlan) -> str:
    """The region where the plan holds: a range for each symbol, and the conditions."""
    region = plan.region
    ranges = [(name, region.low[name], region.high[name]) for name in region.low]
    lines = list(map(_typed, region.conditions))
    small = f"{FEW} modules" if plan.repeated else "the model"
    lines.append(f"compiled at {len(region.probes)} points, its ends among them; the passes check each --at on {small}")
    if plan.rank is not None:  # the stages of a pipeline are a part of the plan
        record = StageRecord(plan.here)
        name, count = record.schedule.name, record.schedule.num_microbatches
        lines += [f"{count} microbatches by {name}, whose order and fullest rank are as here, and so are the stages:"]
        for stage in record.entries():
            modules = " to ".join(filter(None, dict.fromkeys(stage.modules)))
            lines.append(f"stage {stage.stage} on rank {stage.rank}: {modules}")
    return f"{table(('symbol', 'from', 'to'), ranges)}\n" + "".join(f"{line}\n" for line in lines)


def expression_text(expression: Any, room: int = 0) -> str:
    """``16·B·L·T·d·(tp - 1)/(dp·tp)``: as a product if that is longer than a sum by no more than ``room``."""
    import sympy

    ceiled = sympy.sympify(expression).replace(sympy.floor, lambda inside: -sympy.ceiling(-inside, evaluate=False))
    product, summands = _typed(str(sympy.factor(ceiled))), _typed(str(sympy.expand(ceiled)))
    return product if len(product) <= len(summands) + room else summands


def _typed(text: str) -> str:
    text = re.sub(r"\*\*(\d+)", lambda power: power[1].translate(POWERS), text)
    return text.replace("*", "·").replace("Min(", "min(").replace("Max(", "max(")


def plan_record(plan: SymbolicPlan, numbers: Numbers = ()) -> SymbolicCost:
    """The record of a plan, with its costs at some points."""
    region = plan.region
    places = RegionEntry(region.low, region.high, tuple(region.conditions), tuple(region.probes))
    at = tuple(CostAt(point, *cost.entries()) for point, cost in numbers)
    return SymbolicCost(digest(plan), plan.reference, _expressions(plan.cost), places, at)


def _expressions(cost: StepCost) -> CostExpressions:
    """The expressions of a cost with bytes on the wire rounded down, and without counts, which depend on buckets."""
    import sympy

    traffic = []
    for each in cost.traffic:
        row = replace(each, wire_bytes=sympy.floor(each.wire_bytes))
        texts: dict[str, Any] = {name: str(getattr(row, name)) for name in SHOWN}
        traffic.append(TrafficExpression(axes=each.axes, **texts))
    memory = MemoryExpressions(**{name: str(size) for name, size in cost.memory.items()})
    return CostExpressions(tuple(traffic), memory, str(cost.flops))
