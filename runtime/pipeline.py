"""The runner of a pipeline: a schedule's actions over the stages that live in this process.

A step runs whole in the forward call: forward and backward of every microbatch, from a tangent of one, into gradients
of its own. ``backward`` gives those, times the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.ends import ends_of, parameters_of
from shardc.error import second_backward
from shardc.program import Program
from shardc.stage import Stages, is_cut_in_time
from shardc.stage_cut import stages_of
from shardc.stage_schedule import schedule_of

from .channel import Channel, Mailbox
from .comm import Comm
from .deferred import Sums, Totals
from .host import Host
from .interpreter import Values
from .pipeline_step import PipelineStep
from .stage_results import StageResults
from .stage_runner import StageRunner
from .timed import TimedComm


@dataclass(slots=True)
class Gradients:
    """What a step found, for each position, from a tangent of ``scale``; None once it is freed."""

    rows: list[list[Tensor | None]] | None
    scale: float


class PipelineRunner:
    """A pipeline ready to run. ``comm``: that of the stage's ranks; ``here``: the pipeline's ranks of this process.

    ``readers``: for each parameter that any stage reads the pipeline's ranks that do, by stage; ``trained``: those that
    get gradients.

    ``host``: where idle stages go; ``of_parameter``: which outputs are parameters' gradients.

    It holds no values between steps. ``rows`` of inputs and results are those of the program's positions: of each
    microbatch those of the stage's ranks.
    """

    deferred: frozenset[int] = frozenset()

    def __init__(
        self,
        program: Program,
        comm: Comm,
        here: Sequence[int] | None = None,
        channel: Channel | None = None,
    ) -> None:
        self.program, self.stages, self.device = program, stages_of(program), comm.device
        self.schedule = schedule_of(program)
        self.here = tuple(range(self.schedule.num_ranks)) if here is None else tuple(here)
        self.channel = channel or Mailbox()
        count = self.schedule.num_microbatches
        assert program.mesh is not None
        self.comms = [TimedComm(comm, program.mesh, (i,)) for i in range(count)]
        self.runners = {
            stage: StageRunner(self.stages, stage, comm)
            for stage, rank in enumerate(self.schedule.place)
            if rank in self.here
        }
        self.readers = _readers(self.stages, self.schedule.place)
        ends = zip(program.outputs, program.results, strict=True)
        self.trained = {output.name for output, node in ends if output.kind == "gradient" and node is not None}
        self.results = StageResults(self.stages)
        parameters = set(parameters_of(program).values())
        self.of_parameter = [owner in parameters for _, owner, _ in ends_of(program)]
        pipeline = program.options.pipeline
        self.host = Host(self.device) if pipeline is not None and pipeline.offload else None
        self.is_timed = [is_cut_in_time(program.sharding(node)) for node in program.placeholders]

    def forward(
        self, inputs: Sequence[Values], computed: Sequence[Values] | None = None
    ) -> tuple[list[list[Tensor | None]], Gradients]:
        """Run a step: for each position the outputs, parallel to the program's, and the gradients."""
        self.channel.place = self.schedule.place
        scale = self._scale()
        rows = PipelineStep(self, self._with_tangents(inputs, scale)).run()
        kinds = [output.kind == "gradient" for output in self.program.outputs]
        results, gradients = (
            [[value if is_gradient == kind else None for value, kind in zip(row, kinds, strict=True)] for row in rows]
            for is_gradient in (False, True)
        )
        return results, Gradients(gradients, scale)

    def backward(self, saved: Gradients, tangents: Sequence[Values], keep: bool = False) -> list[list[Tensor | None]]:
        """The gradients, times what comes in; they are freed unless told to ``keep`` them."""
        if saved.rows is None:
            raise second_backward()
        rows = saved.rows
        if not keep:
            saved.rows = None
        by = next(value for value in tangents[0] if value is not None) / saved.scale
        return rows if not keep and bool(by == 1) else _scaled(rows, by)  # what is kept is not given away

    def _scale(self) -> float:
        """The tangent of the loss."""
        pipeline = self.program.options.pipeline
        assert pipeline is not None
        return 1.0 if pipeline.loss_scale is None else float(pipeline.loss_scale.get_scale())

    def _with_tangents(self, rows: Sequence[Values], scale: float) -> list[list[Tensor | None]]:
        """The inputs of all positions with tangents of ``scale``, which are the same for all."""
        tangents = {
            i: torch.full(put.type.shape, scale, dtype=put.type.dtype, device=self.device)
            for i, put in enumerate(self.program.inputs)
            if put.kind == "tangent"
        }
        return [[tangents.get(i, value) for i, value in enumerate(row)] for row in rows]

    def update(self, inputs: Sequence[Values], into: Sequence[Values] | None = None) -> list[list[Tensor | None]]:
        """Nothing is kept between steps."""
        return [[None] * len(self.program.outputs) for _ in inputs]

    def accumulate(
        self, saved: Gradients, tangents: Sequence[Values], keep: bool, totals: Totals | None, is_last: bool
    ) -> tuple[list[list[Tensor | None]], Sums]:
        """As ``backward``: no reduction waits."""
        return self.backward(saved, tangents, keep), [{} for _ in tangents]

    def close(self, sums: Sums) -> list[list[Tensor | None]]:
        """Nothing has waited."""
        return [[None] * len(self.program.outputs) for _ in sums]

    def keeps_input(self, index: int) -> bool:
        """Nothing of the user's is kept."""
        return False

    def keeps_output(self, index: int) -> bool:
        """Nothing of the user's is kept."""
        return False


def _readers(stages: Stages, place: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """For each parameter that any stage reads the ranks that do, in order of stages."""
    return {name: tuple(dict.fromkeys(place[i] for i in sorted(held))) for name, held in stages.holders.items()}


def _scaled(rows: Sequence[Values], by: Tensor) -> list[list[Tensor | None]]:
    """Each value times a number; what is the same for all microbatches is one tensor, and stays one."""
    values = {id(value): value for row in rows for value in row if value is not None}
    scaled = {key: value * by.to(value.device) for key, value in values.items()}
    return [[None if value is None else scaled[id(value)] for value in row] for row in rows]
