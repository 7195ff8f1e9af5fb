"""Plans compiled whole: their cost is that of the program that would run, not an estimate from a few blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardc.compiler import Compiled, Request, compile_request
from shardc.costs.count import call_seconds
from shardc.costs.memory import memory_of
from shardc.costs.stages.record import StageRecord
from shardc.costs.step import StepRecord, copies_of, rank_flops
from shardc.costs.step_time import COMPUTING, step_timeline
from shardc.options import OVERLAPS, Options
from shardc.passes.order import LOCAL
from shardc.passes.verify import verify
from shardc.program.communication import is_collective
from shardc.program.idle_axes import idle_axes
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.program.traffic import collectives_of
from shardc.search.found import Found, first_of_each
from shardc.search.pricing.compiling import REFUSALS, PlanCompiler
from shardc.search.pricing.price import Price
from shardc.search.pricing.workers import Workers
from shardc.search.space.plan import Plan
from shardc.search.task import Progress, Task


@dataclass(frozen=True, slots=True)
class Copying:
    """The copies of a step between the device and the tier below.

    ``nbytes``: bytes copied. ``seconds``: the time of the copies. ``waited``: seconds in which a rank computes nothing
    because of them. Both times are None with a pipeline.
    """

    nbytes: int
    seconds: float | None
    waited: float | None


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a step of a plan.

    ``seconds``: the predicted time of a step: the sum of ``computing``, with the optimizer, ``exposed``, while a rank
    waits for collectives and copies, and ``bubble``, while the busiest rank of a pipeline is idle. ``memory``: bytes
    on a rank by class. ``wire_bytes``: bytes that one rank sends in ``num_collectives``. ``flops``: operations of one
    rank. ``copying``: None if nothing is copied to the tier below. ``idle``: the axes that cut nothing.
    """

    seconds: float
    computing: float
    exposed: float
    bubble: float
    memory: Mapping[str, int]
    wire_bytes: int
    num_collectives: int
    flops: int
    copying: Copying | None = None
    idle: tuple[str, ...] = ()


def cost_of(program: Program) -> Cost:
    """The cost of a step of a compiled program."""
    line, collectives = step_timeline(program), collectives_of(program)
    if has_stages(program):
        computing, bubble = _pipeline_seconds(program)
    else:
        computing, bubble = sum(task.seconds for task in line.on(COMPUTING)), 0.0
    sent = sum(each.times * each.wire_bytes for each in collectives)
    exposed = max(0.0, line.makespan - computing - bubble)
    num_collectives = sum(each.times for each in collectives)
    return Cost(
        line.makespan, computing, exposed, bubble, memory_of(program), sent, num_collectives, rank_flops(program),
        _copying(program), idle_axes(program),
    )  # fmt: skip


def _copying(program: Program) -> Copying | None:
    nbytes = sum(each.bytes for each in copies_of(program))
    if not nbytes:
        return None
    times = StepRecord(program).entry().copies
    if times is None:
        return Copying(nbytes, None, None)
    return Copying(nbytes, sum(each.seconds for each in times), sum(each.waited for each in times))


def _pipeline_seconds(program: Program) -> tuple[float, float]:
    """Seconds in which the busiest rank of a pipeline computes, and seconds in which the schedule leaves it idle."""
    record = StageRecord(program)
    of_stage = [
        sum(
            call_seconds(program, node) * record.times(part)
            for part, calls in stage.parts.items()
            for node in calls
            if not is_collective(node)
        )
        for stage in record.stages.stages
    ]
    ranks = range(record.schedule.num_ranks)
    busiest = max(sum(of_stage[stage] for stage in record.schedule.stages_on(rank)) for rank in ranks)
    return busiest, record.timeline.bubble


@dataclass(eq=False)
class WholeCompiler:
    """Compiles plans of a whole model.

    State: ``_plain``, the compiler of plans without a pipeline; ``_known``, the latest compiled plan by annotations of
    modules and precision.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    task: Task
    _plain: PlanCompiler = field(init=False)
    _known: dict[Any, Compiled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plain = PlanCompiler(self.model, self.args, self.kwargs)

    @property
    def can_capture(self) -> bool:
        """Whether the model can be captured."""
        return self._plain.can_capture

    def cost(self, plan: Plan) -> Cost | None:
        """The cost of a plan; None if it cannot be compiled."""
        with suppress(*REFUSALS):
            return cost_of(self.program(plan))
        return None

    def program(self, plan: Plan) -> Program:
        """The program that each rank runs; without a pipeline it is verified once, at the end."""
        if plan.pipeline is not None:
            return self.compiled(plan).program
        program = self._plain.program(plan.mesh, plan.annotations, self._options(plan), until=LOCAL)
        verify(program)
        return program

    def compiled(self, plan: Plan, **further: Any) -> Compiled:
        """The compiled plan, with ``further`` options. Raises what ``shardc.compile`` raises."""
        annotations = plan.annotations
        key = tuple((k, v) for k, v in annotations.items() if k.startswith("module:")), plan.precision
        options = replace(self._options(plan), **further)
        request = Request(plan.mesh, annotations, self.args, self.kwargs, options=options)
        self._known[key] = compile_request(self.model, request, self._known.get(key))
        return self._known[key]

    def _options(self, plan: Plan) -> Options:
        return plan.compiler_options(self.task.optimizer, self.task.wire, self.task.machine)


@dataclass(eq=False)
class WholePlans:
    """Plans compiled whole, some of them by ``workers``.

    State: their ``costs``; ``tried``, which also has the plans that cannot be compiled; the costs of those compiled
    ``_ahead``, which count once they are asked for.
    """

    compiler: WholeCompiler
    task: Task
    progress: Progress
    workers: Workers[Plan, Cost | None]
    costs: dict[Plan, Cost] = field(default_factory=dict)
    tried: set[Plan] = field(default_factory=set)
    _ahead: dict[Plan, Cost | None] = field(default_factory=dict)

    def compile(self, plans: Iterable[Plan]) -> None:
        """Compile further plans, and leave out those that the task forbids or the compiler refuses."""
        plans = list(plans)
        self.ahead(plans)
        for plan in self._new(plans):
            if plan not in self._ahead:
                self.progress(f"compiling plan {len(self.tried) + 1} for the whole model: {plan.mesh}")
            cost = self._ahead.pop(plan) if plan in self._ahead else self.compiler.cost(plan)
            if cost is not None:
                self.costs[plan] = cost
            self.tried.add(plan)  # not if a Ctrl-C ended it

    def ahead(self, plans: Iterable[Plan]) -> None:
        """Compile plans that are asked for next, or may be, if there are several workers."""
        if self.workers.count > 1 and self.compiler.can_capture:  # captured before the processes start
            new = [each for each in self._new(plans) if each not in self._ahead]
            if len(new) > 1:
                self.progress(f"compiling {len(new)} plans for the whole model")
                self._ahead.update(self.workers.map(new))

    def _new(self, plans: Iterable[Plan]) -> list[Plan]:
        return [plan for plan in dict.fromkeys(plans) if plan not in self.tried and self.task.permits(plan)]

    def found(self, plan: Plan) -> Found:
        """A compiled plan with its price, in the form that the search uses."""
        cost = self.costs[plan]
        exposed = cost.seconds - cost.computing  # with the bubble of a pipeline
        return Found(plan, Price(cost.computing, exposed, **cost.memory, wire_bytes=cost.wire_bytes, flops=cost.flops))

    def may_surpass(self, plan: Plan) -> bool:
        """Whether a variant that saves less than this plan, and so is no faster, may still beat the best plan."""
        best = self.ranked()[0]
        is_fast = self.costs[plan].seconds < self.costs[best].seconds
        return self.task.objective != "time" or is_fast or not self.fits(best)

    def fits(self, plan: Plan) -> bool:
        """Whether a rank has enough memory for a plan."""
        return self.costs[plan].memory["peak"] <= self.task.memory

    def ranked(self) -> list[Plan]:
        """The plans, the best first, without those that have a useless option.

        Of plans with equal costs and equal sizes of axes, such as plans with two axes swapped, only the shortest is
        kept; none is kept if one of them is better with another ``overlap``.
        """
        plans = [plan for plan in self.costs if not self._has_useless_option(plan)]
        kinds = {plan: (plan.shape, repr(replace(self.costs[plan], idle=()))) for plan in plans}
        surpassed = {kinds[plan] for plan in plans if self._is_surpassed(plan)}
        plans.sort(key=lambda plan: self.found(plan).rank(self.task))
        return first_of_each((plan for plan in plans if kinds[plan] not in surpassed), kinds.__getitem__)

    def _has_useless_option(self, plan: Plan) -> bool:
        """Whether the plan is no better than without ``saved``, or than without ``overlap``."""
        twins = [replace(plan, saved=None), replace(plan, overlap=None)]
        return any(
            twin != plan and twin in self.costs and not self.found(plan).is_better(self.found(twin), self.task)
            for twin in twins
        )

    def _is_surpassed(self, plan: Plan) -> bool:
        """Whether the plan is better with another ``overlap``."""
        twins = [replace(plan, overlap=each) for each in (None, *OVERLAPS) if each != plan.overlap]
        return any(self.found(twin).is_better(self.found(plan), self.task) for twin in twins if twin in self.costs)
