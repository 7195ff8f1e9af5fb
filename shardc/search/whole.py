"""Plans compiled whole: their cost is that of the program which would run, not of a part of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardc.compiler import Compiled, Request, compile_request
from shardc.costs.count import call_seconds
from shardc.costs.memory import memory_of
from shardc.costs.stage_record import StageRecord
from shardc.costs.step import rank_flops
from shardc.costs.step_time import COMPUTING, step_timeline
from shardc.program.communication import is_collective
from shardc.program.program import Program
from shardc.program.stages import has_stages
from shardc.program.traffic import collectives_of
from shardc.search.space.plan import Plan
from shardc.search.task import Task


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a step of a plan.

    ``seconds``: the predicted time of a step: ``computing``, with the optimizer, ``exposed``, in which a rank waits for
    collectives, and ``bubble``, in which the busiest rank of a pipeline is idle. ``memory``: bytes on a rank by class.
    ``wire_bytes`` that one rank sends in ``num_collectives``; ``flops`` of one rank.
    """

    seconds: float
    computing: float
    exposed: float
    bubble: float
    memory: Mapping[str, int]
    wire_bytes: int
    num_collectives: int
    flops: int


def cost_of(program: Program) -> Cost:
    """The cost of a program as it was compiled."""
    line, collectives = step_timeline(program), collectives_of(program)
    if has_stages(program):
        computing, bubble = _pipeline_seconds(program)
    else:
        computing, bubble = sum(task.seconds for task in line.on(COMPUTING)), 0.0
    sent = sum(each.times * each.wire_bytes for each in collectives)
    exposed = max(0.0, line.makespan - computing - bubble)
    num_collectives = sum(each.times for each in collectives)
    return Cost(
        line.makespan, computing, exposed, bubble, memory_of(program), sent, num_collectives, rank_flops(program)
    )


def _pipeline_seconds(program: Program) -> tuple[float, float]:
    """Seconds for which the busiest rank of a pipeline computes, and for which it is idle in the schedule."""
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
    """Compiles plans of a whole model. State: ``_known``, the latest by what a capture depends on."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    task: Task
    _known: dict[Any, Compiled] = field(default_factory=dict)

    def compiled(self, plan: Plan) -> Compiled:
        """The compiled plan. Raises what ``shardc.compile`` raises."""
        annotations = plan.annotations
        key = tuple((k, v) for k, v in annotations.items() if k.startswith("module:")), plan.precision
        self._known[key] = compile_request(self.model, self.request(plan), self._known.get(key))
        return self._known[key]

    def request(self, plan: Plan) -> Request:
        """The request of a plan."""
        options = plan.compiler_options(self.task.optimizer, self.task.wire, self.task.machine)
        return Request(plan.mesh, plan.annotations, self.args, self.kwargs, options=options)
