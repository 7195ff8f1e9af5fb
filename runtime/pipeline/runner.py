"""Runs a pipeline: the schedule's actions on the stages of this process, and the messages between stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import fx

from shardc.costs.stages.lifetime import ResidentStages, stage_turns, ways_after
from shardc.costs.stages.schedule import PART_OF_PHASE, schedule_of
from shardc.language.errors import second_backward
from shardc.language.words import Part
from shardc.program.lifetime import PART_OF
from shardc.program.program import Program, ends_of, parameters_of
from shardc.program.stages import PARTS_OF, Crossing, is_cut_in_time, stages_of
from shardc.schedules.schedule import ALL, COMPUTE, RECEIVES, SENDS, Action

from ..comm.comm import REDUCE, Comm
from ..execute.executor import Rows, Runner
from ..execute.part import Env, Values
from ..execute.rewrite import Taker
from ..tier.host import Host
from .channel import Channel, LocalChannel, Message, MessageId
from .microbatches import MicrobatchComm
from .offload import Offload, in_place_of_parameters
from .stages import StageResults, StageRunner, StepValues


@dataclass(slots=True)
class StepGradients:
    """The gradients of a step for a loss whose own gradient is ``scale``.

    ``rows``: a row for each position; None once they are freed.
    """

    rows: Rows | None
    scale: float


class PipelineRunner(Runner):
    """Runs a pipeline: its forward runs a whole step, and its backward scales the gradients of that step.

    ``comm``: the collectives of a stage's ranks. ``here``: the pipeline's ranks in this process, all of them by
    default. ``readers``: for each parameter that is read, the pipeline's ranks whose stages read it. ``trained``: the
    parameters that get gradients. ``residuals``: by index of an output that is a new residual, the input that is the
    old one.

    Inputs and results have a row for each position of the program: for each microbatch, the stage's ranks. Nothing is
    kept between steps.
    """

    computes_in_forward = True

    def __init__(self, program: Program, comm: Comm, here: Sequence[int] | None = None,
                 channel: Channel | None = None) -> None:  # fmt: skip
        assert program.mesh is not None and program.options.pipeline is not None
        self.program, self.device, self.channel = program, comm.device, channel or LocalChannel()
        self.pipeline, self.stages, self.schedule = program.options.pipeline, stages_of(program), schedule_of(program)
        place = self.schedule.place
        self.here = tuple(range(self.schedule.num_ranks)) if here is None else tuple(here)
        self.comms = [MicrobatchComm(comm, program.mesh, (i,)) for i in range(self.schedule.num_microbatches)]
        own = [stage for stage, rank in enumerate(place) if rank in self.here]
        self.stage_runners = {stage: StageRunner(self.stages, stage, comm) for stage in own}
        self.results = StageResults(self.stages)
        places, ends = {node: i for i, node in enumerate(program.placeholders)}, enumerate(ends_of(program))
        owners = {i: owner for i, (output, owner, _) in ends if output.kind == "residual"}
        self.residuals = {i: places[owner] for i, owner in owners.items() if owner is not None}
        parts = [part for stage in own for part in self.stages.stages[stage].parts.values()]
        self._calls = {node for part in parts for node in part}
        self.readers = {
            name: tuple(dict.fromkeys(place[stage] for stage in sorted(stages)))
            for name, stages in self.stages.holders.items()
        }
        outputs = zip(program.outputs, program.results, strict=True)
        self.trained = {output.name for output, node in outputs if output.kind == "gradient" and node is not None}
        self.is_timed = [is_cut_in_time(program.sharding(node)) for node in program.placeholders]
        self.host = Host(self.device) if self.pipeline.offload else None

    def forward(self, inputs: Sequence[Values], computed: Sequence[Values] | None = None) -> tuple[Rows, StepGradients]:
        """Run a step. Returns for each position the outputs, in the program's order, and the gradients."""
        self.channel.place = self.schedule.place
        scaler = self.pipeline.loss_scale
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        rows = ScheduleRun(self, self.with_tangents(inputs, scale)).run()
        if self.host is not None:
            on_host = self._stored_on_host(inputs)
            rows = in_place_of_parameters(rows, [owner in on_host for _, owner, _ in ends_of(self.program)], self.host)
        if self.residuals:
            self._subtract_residuals(rows, inputs)
        is_late = [PART_OF[output.kind] == "backward" for output in self.program.outputs]
        outputs, gradients = (
            [[value if kind == of else None for value, of in zip(row, is_late, strict=True)] for row in rows]
            for kind in (False, True)
        )
        return outputs, StepGradients(gradients, scale)

    def _subtract_residuals(self, rows: Rows, inputs: Sequence[Values]) -> None:
        """Subtract the old residuals from the new ones: other steps may change them before backward."""
        done = set[int]()
        for row, before in zip(rows, inputs, strict=True):
            for i, owner in self.residuals.items():
                new, old = row[i], before[owner]
                if new is not None and old is not None and id(new) not in done:  # microbatches share it
                    done.add(id(new.sub_(old)))

    def _stored_on_host(self, inputs: Sequence[Values]) -> set[fx.Node]:
        """The parameters in host memory. On virtual ranks they stay where the model has them."""
        parameters, columns = set(parameters_of(self.program).values()), zip(*inputs, strict=True)
        values = zip(self.program.placeholders, columns, strict=True)
        return {
            node for node, column in values
            if node in parameters and not any(value is not None and value.device.type != "cpu" for value in column)
        }  # fmt: skip

    def backward(
        self, saved: StepGradients, tangents: Sequence[Values], keep: bool = False, takers: Sequence[Taker] = ()
    ) -> Rows:
        """The step's gradients times the loss's gradient in ``tangents``; they are freed unless ``keep`` is set.

        A factor of 1 is noticed on the CPU alone: reading it from another device would make the host wait.
        """
        if saved.rows is None:
            raise second_backward()
        rows, saved.rows = saved.rows, saved.rows if keep else None
        factor = next(value for value in tangents[0] if value is not None) / saved.scale
        if not keep and factor.device.type == "cpu" and bool(factor == 1):  # kept gradients are not handed out
            return rows
        is_gradient = [output.kind == "gradient" for output in self.program.outputs]
        values = {id(value): value for row in rows for value in compress(row, is_gradient) if value is not None}
        scaled = {key: value * factor.to(value.device) for key, value in values.items()}
        return [[value if value is None else scaled.get(id(value), value) for value in row] for row in rows]

    def reads_input(self, index: int) -> bool:
        return not self._calls.isdisjoint(self.program.placeholders[index].users)

    def with_tangents(self, rows: Sequence[Values], scale: float) -> Rows:
        """The inputs of all positions, with ``scale`` as the tangents."""
        tangents = {
            i: torch.full(put.type.shape, scale, dtype=put.type.dtype, device=self.device)
            for i, put in enumerate(self.program.inputs)
            if put.kind == "tangent"
        }
        return [[tangents.get(i, value) for i, value in enumerate(row)] for row in rows]


class ScheduleRun:
    """One run of the schedule: the values of the step, and messages that are computed but not sent yet (``outbox``).

    ``own_sums``: sums, as stage, rank and slot, that are in memory of their own and may be added to in place.
    ``offloads``: for each rank of the pipeline, the offloading of its idle stages.
    """

    def __init__(self, runner: PipelineRunner, inputs: Sequence[Values]) -> None:
        self.runner, self.inputs, self.channel = runner, inputs, runner.channel
        self.width = len(inputs) // len(runner.comms)  # a stage's ranks in this process
        self.values = StepValues()
        self.own_sums: set[tuple[int, int, int]] = set()
        self.outbox: dict[MessageId, Message] = {}
        self.offloads: dict[int, Offload] = {}

    def run(self) -> Rows:
        """Run all actions. Returns for each position the results, in the order of the program's outputs."""
        for stage in self.runner.stage_runners:
            self.values.of_step[stage] = [self._env(row, is_timed=False) for row in self.inputs[: self.width]]
            self.values.sums[stage] = [{} for _ in range(self.width)]
        if self.runner.host is not None:
            slots = {i for i, put in enumerate(self.runner.program.inputs) if put.kind == "parameter"}
            for rank in self.runner.here:
                runners, stages = self.runner.stage_runners, self.runner.schedule.stages_on(rank)
                parameters = {stage: runners[stage].parameters for stage in stages}
                turns = ResidentStages(stage_turns(self.runner.stages, self.runner.schedule, rank))
                host = self.runner.host
                self.offloads[rank] = Offload(host, turns, self.values, self.inputs, parameters, slots)
        for stage in self.runner.stage_runners:
            self._prepare(stage)
        self._run_actions()
        self._reduce()
        self.channel.close()
        return self.runner.results.collect(self.values, len(self.runner.comms))

    def _env(self, row: Values, is_timed: bool, env: Env | None = None) -> Env:
        """An env with some inputs of a row: those that are cut over microbatches if ``is_timed``, else the others."""
        env = [None] * len(self.runner.program.graph.nodes) if env is None else env
        for slot, (value, timed) in enumerate(zip(row, self.runner.is_timed, strict=True)):
            if timed == is_timed:
                env[slot] = value
        return env

    def _microbatch_envs(self, stage: int, microbatch: int) -> list[Env]:
        rows = self.inputs[microbatch * self.width : (microbatch + 1) * self.width]
        pairs = zip(rows, self.values.of_step[stage], strict=True)
        return [self._env(row, True, list(env)) for row, env in pairs]

    def _prepare(self, stage: int) -> None:
        """Compute the values that all microbatches of a stage share, such as the number of tokens that count."""
        runner, envs, comm = self.runner.stage_runners[stage], self.values.of_step[stage], self.runner.comms[0]
        self._bring_to_device(stage)
        runner.run("once", envs, comm)
        for i in range(len(self.runner.comms)) if runner.sums["count"] else ():
            timed = self._microbatch_envs(stage, i)
            runner.run("count", timed, self.runner.comms[i])
            self._add_to_sums(stage, "count", timed)
        self._place_sums(stage)
        runner.run("settle", envs, comm)

    def _bring_to_device(self, stage: int) -> None:
        if (offload := self.offloads.get(self.runner.schedule.place[stage])) is not None:
            offload.take_turn()

    def _run_actions(self) -> None:
        """Run the actions of the ranks here, each rank's in order; of several ranks, each until it lacks a message."""
        remaining = {rank: iter(self.runner.schedule.actions[rank]) for rank in self.runner.here}
        following = {rank: next(actions, None) for rank, actions in remaining.items()}
        while any(following.values()):
            is_stuck = True
            for rank, actions in remaining.items():
                while (action := following[rank]) is not None and self._can_run(action):
                    self._run_action(action)
                    following[rank], is_stuck = next(actions, None), False
            assert not is_stuck, [str(action) for action in following.values()]

    def _can_run(self, action: Action) -> bool:
        """Whether an action can run without waiting for a message."""
        if action.kind not in COMPUTE:
            return True
        expected = self._expected(action.stage, PARTS_OF[action.kind][0], action.microbatch)
        return all(map(self.channel.is_there, expected))

    def _expected(self, stage: int, part: Part, microbatch: int) -> Iterator[MessageId]:
        """The messages that a part of a stage reads."""
        return ((way, microbatch) for way in self.runner.stage_runners[stage].entering if way.part == part)

    def _run_action(self, action: Action) -> None:
        if action.kind in COMPUTE:
            self._bring_to_device(action.stage)
            for part in PARTS_OF[action.kind]:
                self._compute(action.stage, action.microbatch, part)
        elif action.kind in SENDS:
            key = Crossing(action.stage, action.peer or 0, PART_OF_PHASE[action.phase]), action.microbatch
            self.channel.send(key, self.outbox.pop(key))
        elif action.kind in RECEIVES:
            crossing = Crossing(action.peer or 0, action.stage, PART_OF_PHASE[action.phase])
            types = self.runner.stage_runners[action.stage].types[crossing]
            self.channel.post((crossing, action.microbatch), types)

    def _compute(self, stage: int, microbatch: int, part: Part) -> None:
        """Run a part of a stage for one microbatch: receive operands, run, add to the sums, hand results over."""
        runner = self.runner.stage_runners[stage]
        if part == "forward":
            self.values.of_microbatch[stage, microbatch] = self._microbatch_envs(stage, microbatch)
        envs = self.values.of_microbatch[stage, microbatch]
        for key in self._expected(stage, part, microbatch):
            self._receive(key, envs)
        runner.run(part, envs, self.runner.comms[microbatch])
        self._add_to_sums(stage, part, envs)
        place = self.runner.schedule.place
        for crossing, slots in runner.leaving.items():
            if crossing.part == part:
                message = [[env[slot] for slot in slots] for env in envs]
                if place[crossing.source] == place[crossing.target]:
                    self.channel.send((crossing, microbatch), message)
                else:  # sent by an action of the schedule
                    self.outbox[crossing, microbatch] = message
        runner.forget(part, envs)

    def _receive(self, key: MessageId, envs: Sequence[Env]) -> None:
        crossing, _ = key
        slots = self.runner.stage_runners[crossing.target].entering[crossing]
        for env, values in zip(envs, self.channel.take(key), strict=True):
            for slot, value in zip(slots, values, strict=True):
                env[slot] = value

    def _add_to_sums(self, stage: int, part: Part, envs: Sequence[Env]) -> None:
        """Add the values of one microbatch to the sums over microbatches."""
        for total, slot, op, is_own in self.runner.stage_runners[stage].sums[part]:
            for i, (env, sums) in enumerate(zip(envs, self.values.sums[stage], strict=True)):
                if total not in sums:
                    sums[total] = env[slot]
                    self.own_sums |= {(stage, i, total)} if is_own else set()
                elif op == "sum" and (stage, i, total) in self.own_sums:
                    sums[total].add_(env[slot])
                else:
                    sums[total] = REDUCE[op](sums[total], env[slot])
                    self.own_sums.add((stage, i, total))

    def _place_sums(self, stage: int) -> None:
        """Copy complete sums to the step's values."""
        for env, sums in zip(self.values.of_step[stage], self.values.sums[stage], strict=True):
            for slot, value in sums.items():
                env[slot] = value

    def _reduce(self) -> None:
        """After the last microbatch: add the terms that several stages have of one sum, and reduce sums over ranks."""
        runners, envs = self.runner.stage_runners, self.values.of_step
        for crossing in ways_after(self.runner.stages):
            source = crossing.source
            if source in runners:
                self._bring_to_device(source)
                self._place_sums(source)
                slots = runners[source].leaving[crossing]
                self.channel.send((crossing, ALL), [[env[slot] for slot in slots] for env in envs[source]])
            if crossing.target in runners:
                self.channel.post((crossing, ALL), runners[crossing.target].types[crossing])
        for stage, runner in runners.items():
            self._bring_to_device(stage)
            self._place_sums(stage)
            for key in self._expected(stage, "after", ALL):
                self._receive(key, envs[stage])
            runner.run("after", envs[stage], self.runner.comms[0])
