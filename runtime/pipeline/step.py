"""One step of a pipeline: the actions of its schedule, over the values of each stage and microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardc.costs.stage_lifetime import ResidentStages, stage_turns, ways_after
from shardc.costs.stage_schedule import PART_OF_PHASE, schedule_of
from shardc.language.errors import second_backward
from shardc.program.program import Program, ends_of, parameters_of
from shardc.program.stages import PARTS_OF, Crossing, Part, Stages, is_cut_in_time, stages_of
from shardc.schedules.schedule import ALL, COMPUTE, RECEIVES, SENDS, Action

from ..comm.comm import REDUCE, Comm
from ..execute.deferred import Sums, Totals
from ..execute.instruction import Env
from ..execute.interpreter import Values
from .channel import Channel, Key, Mailbox, Message
from .host import Host, OnHost, bytes_of, memory_of, stored_on_host
from .stages import StageResults, StageRunner
from .timed import TimedComm


class PipelineStep:
    """One step.

    State, by stage or by stage and microbatch: ``base``, what no microbatch changes; ``envs``; ``sums``, of which those
    by stage, rank and slot in ``own`` are in memory of their own. ``waiting``: what was made and is not sent yet.
    ``offloads``: by rank, what moves its idle stages away.
    """

    def __init__(self, runner: PipelineRunner, inputs: Sequence[Values]) -> None:
        self.runner, self.inputs, self.channel = runner, inputs, runner.channel
        self.width = len(inputs) // len(runner.comms)  # ranks of a stage in this process
        self.base: dict[int, list[Env]] = {}
        self.envs: dict[tuple[int, int], list[Env]] = {}
        self.sums: dict[int, list[dict[int, Tensor]]] = {}
        self.waiting: dict[Key, Message] = {}
        self.own: set[tuple[int, int, int]] = set()
        self.offloads: dict[int, Offload] = {}

    def run(self) -> list[list[Tensor | None]]:
        """All of it: for each position the results, parallel to the program's outputs."""
        for stage in self.runner.runners:
            self.base[stage] = [self._env(row, is_timed=False) for row in self.inputs[: self.width]]
            self.sums[stage] = [{} for _ in range(self.width)]
        if self.runner.host is not None:
            self.offloads = {rank: Offload(self, rank, self.runner.host) for rank in self.runner.here}
        for stage in self.runner.runners:
            self._begin(stage)
        left = {rank: iter(self.runner.schedule.actions[rank]) for rank in self.runner.here}
        following = {rank: next(actions, None) for rank, actions in left.items()}
        while any(following.values()):
            is_stuck = True
            for rank, actions in left.items():
                while (action := following[rank]) is not None and self._can_do(action):
                    self._do(action)
                    following[rank], is_stuck = next(actions, None), False
            assert not is_stuck, [str(action) for action in following.values()]
        rows = self._close()
        self.channel.close()
        return rows

    def _begin(self, stage: int) -> None:
        runner, comm = self.runner.runners[stage], self.runner.comms[0]
        self._take_turn(stage)
        runner.run("once", self.base[stage], comm)
        for i in range(len(self.runner.comms)) if runner.sums["count"] else ():
            envs = self._new_envs(stage, i)
            runner.run("count", envs, self.runner.comms[i])
            self._add(stage, "count", envs)
        self._take_sums(stage)
        runner.run("settle", self.base[stage], comm)

    def _take_turn(self, stage: int) -> None:
        """Have a stage on the device."""
        offload = self.offloads.get(self.runner.schedule.place[stage])
        if offload is not None:
            offload.take_turn()

    def held(self, stage: int, i: int) -> Iterator[Env | dict[int, Tensor]]:
        """Where the values of a stage are, of its ranks in this process the one of that index."""
        yield from (self.base[stage][i], self.sums[stage][i])
        yield from (envs[i] for (its, _), envs in self.envs.items() if its == stage)

    def _env(self, row: Values, is_timed: bool, env: Env | None = None) -> Env:
        env = [None] * len(self.runner.program.graph.nodes) if env is None else env
        for slot, (value, timed) in enumerate(zip(row, self.runner.is_timed, strict=True)):
            if timed == is_timed:
                env[slot] = value
        return env

    def _new_envs(self, stage: int, microbatch: int) -> list[Env]:
        rows = self.inputs[microbatch * self.width : (microbatch + 1) * self.width]
        return [self._env(row, True, list(env)) for row, env in zip(rows, self.base[stage], strict=True)]

    def _can_do(self, action: Action) -> bool:
        if action.kind not in COMPUTE:
            return True
        part = PARTS_OF[action.kind][0]
        return all(map(self.channel.is_there, self._entering(action.stage, part, action.microbatch)))

    def _entering(self, stage: int, part: Part, microbatch: int) -> Iterator[Key]:
        """What a part of a stage's work waits for."""
        return ((way, microbatch) for way in self.runner.runners[stage].entering if way.part == part)

    def _do(self, action: Action) -> None:
        if action.kind in COMPUTE:
            self._take_turn(action.stage)
            for part in PARTS_OF[action.kind]:
                self._compute(action, part)
        elif action.kind in SENDS:
            key = Crossing(action.stage, action.peer or 0, PART_OF_PHASE[action.phase]), action.microbatch
            self.channel.send(key, self.waiting.pop(key))
        elif action.kind in RECEIVES:
            crossing = Crossing(action.peer or 0, action.stage, PART_OF_PHASE[action.phase])
            self._post(crossing, action.microbatch)

    def _post(self, crossing: Crossing, microbatch: int) -> None:
        self.channel.post((crossing, microbatch), self.runner.runners[crossing.target].types[crossing])

    def _compute(self, action: Action, part: Part) -> None:
        stage, microbatch = action.stage, action.microbatch
        runner = self.runner.runners[stage]
        if part == "forward":
            self.envs[stage, microbatch] = self._new_envs(stage, microbatch)
        envs = self.envs[stage, microbatch]
        for key in self._entering(stage, part, microbatch):
            self._receive(key, envs)
        runner.run(part, envs, self.runner.comms[microbatch])
        self._add(stage, part, envs)
        for crossing, slots in runner.leaving.items():
            if crossing.part == part:
                self._hand_over((crossing, microbatch), [[env[slot] for slot in slots] for env in envs])
        runner.forget(part, envs)

    def _receive(self, key: Key, envs: Sequence[Env]) -> None:
        slots = self.runner.runners[key[0].target].entering[key[0]]
        for env, values in zip(envs, self.channel.take(key), strict=True):
            for slot, value in zip(slots, values, strict=True):
                env[slot] = value

    def _hand_over(self, key: Key, message: Message) -> None:
        """To a stage of the same rank at once; else the schedule says when."""
        place = self.runner.schedule.place
        if place[key[0].source] == place[key[0].target]:
            self.channel.send(key, message)
        else:
            self.waiting[key] = message

    def _add(self, stage: int, part: Part, envs: Sequence[Env]) -> None:
        """Add to the sums over microbatches."""
        for into, added, op, is_own in self.runner.runners[stage].sums[part]:
            for i, (env, sums) in enumerate(zip(envs, self.sums[stage], strict=True)):
                if into not in sums:
                    sums[into] = env[added]
                    self.own |= {(stage, i, into)} if is_own else set()
                elif op == "sum" and (stage, i, into) in self.own:
                    sums[into].add_(env[added])
                else:
                    sums[into] = REDUCE[op](sums[into], env[added])
                    self.own.add((stage, i, into))

    def _take_sums(self, stage: int) -> None:
        """Sums are whole, and values like others."""
        for env, sums in zip(self.base[stage], self.sums[stage], strict=True):
            for slot, value in sums.items():
                env[slot] = value

    def _close(self) -> list[list[Tensor | None]]:
        """Once all microbatches are done: what stages sum together, reductions over ranks, and all results."""
        runners = self.runner.runners
        for crossing in ways_after(self.runner.stages):
            if crossing.source in runners:
                self._take_turn(crossing.source)
                self._take_sums(crossing.source)
                slots = runners[crossing.source].leaving[crossing]
                message = [[env[slot] for slot in slots] for env in self.base[crossing.source]]
                self.channel.send((crossing, ALL), message)
            if crossing.target in runners:
                self._post(crossing, ALL)
        for stage, runner in runners.items():
            self._take_turn(stage)
            self._take_sums(stage)
            for key in self._entering(stage, "after", ALL):
                self._receive(key, self.base[stage])
            runner.run("after", self.base[stage], self.runner.comms[0])
        found = self.runner.results.collect(self.base, self.envs, len(self.runner.comms))
        return found if self.runner.host is None else settled(found, self.runner.of_parameter, self.runner.host)


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


class Offload:
    """What moves the stages of one rank during a step, as ``turns`` says.

    State: ``stored``, for each of the stage's ranks in this process the parameters of our stages by slot, in host
    memory, where they stay: the device has copies. ``fixed``: where inputs that are no parameters lie, which stay too.
    ``marks``: by stage, to wait for before its turn.

    Values that share memory go together, and share it on the other side.
    """

    def __init__(self, step: PipelineStep, rank: int, host: Host) -> None:
        self.step, self.host, runner = step, host, step.runner
        self.turns, self.marks = ResidentStages(stage_turns(runner.stages, runner.schedule, rank)), dict[int, Any]()
        parameters = {i for i, put in enumerate(runner.program.inputs) if put.kind == "parameter"}
        given = (value for row in step.inputs for i, value in enumerate(row) if i not in parameters)
        self.fixed = {value.untyped_storage().data_ptr() for value in given if value is not None}
        held = {
            stage: each.parameters for stage, each in runner.runners.items() if runner.schedule.place[stage] == rank
        }
        self.stored = [
            {slot: _stored(row[slot]) for slot in set().union(*held.values())} for row in step.inputs[: step.width]
        ]
        for stage, slots in held.items():
            for env, stored in zip(step.base[stage], self.stored, strict=True):
                for slot in parameters:
                    env[slot] = stored[slot] if slot in slots else None

    def take_turn(self) -> None:
        """Begin the next turn: stages that are idle leave the device, and then those that are next come there."""
        leaving, coming = self.turns.advance()
        for stage in leaving:
            self._move_out(stage)
        for stage in coming:
            self._bring_back(stage)
            self.marks[stage] = self.host.mark()
        self.host.wait(self.marks.get(self.turns.here[0]))

    def _move_out(self, stage: int) -> None:
        for i in range(self.step.width):
            known = {copy.untyped_storage().data_ptr(): memory for copy, memory in self._copies(stage, i)}
            self._replace(stage, i, Tensor, partial(self._moved_out, known))

    def _moved_out(self, known: dict[int, Tensor], value: Tensor) -> Tensor | OnHost:
        """``known``: by address the memory that is on the host already."""
        address = value.untyped_storage().data_ptr()
        if address in self.fixed or not value.untyped_storage().nbytes():
            return value
        if address not in known:
            known[address] = self.host.out(memory_of(value))
        return OnHost.of(value, known[address])

    def _bring_back(self, stage: int) -> None:
        for i in range(self.step.width):
            others = (each for other in self.turns.here if other != stage for each in self._copies(other, i))
            known = {id(memory): memory_of(copy) for copy, memory in others}
            self._replace(stage, i, OnHost, partial(self._brought_back, known))

    def _brought_back(self, known: dict[int, Tensor], value: OnHost) -> Tensor:
        """``known``: by id of memory on the host that of the device."""
        if id(value.memory) not in known:
            known[id(value.memory)] = self.host.back(value.memory)
        return value.within(known[id(value.memory)])

    def _copies(self, stage: int, i: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of the parameters of a stage that are on the device, the copy there and the memory on the host."""
        for slot, stored in self.stored[i].items():
            value = self.step.base[stage][i][slot]
            if isinstance(value, Tensor):
                yield value, stored.memory

    def _replace(self, stage: int, i: int, kind: type, by: Callable[[Any], Any]) -> None:
        """Each value of a kind that a stage holds by what takes its place."""
        for held in self.step.held(stage, i):
            for slot, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
                if value is not None:
                    held[slot] = pytree.tree_map_only(kind, by, value)


def _stored(value: Tensor | None) -> OnHost:
    assert value is not None
    own = stored_on_host(value.detach().contiguous())
    return OnHost(bytes_of(own), own.dtype, tuple(own.shape), own.stride(), 0)


def settled(rows: Sequence[Sequence[Any]], is_stored: Sequence[bool], host: Host) -> list[list[Tensor | None]]:
    """Results, each where it belongs: gradients in host memory if their parameter ``is_stored`` there."""
    made: dict[int, Tensor | None] = {}  # what is the same for all microbatches is one tensor, and stays one
    for row in rows:
        for value, on_host in zip(row, is_stored, strict=True):
            if id(value) not in made:
                made[id(value)] = _settled(value, on_host, host)
    host.finish()
    return [[made[id(value)] for value in row] for row in rows]


def _settled(value: Tensor | OnHost | None, is_stored: bool, host: Host) -> Tensor | None:
    if isinstance(value, OnHost):
        return value.within(value.memory if is_stored else host.back(value.memory))
    if value is None or value.is_meta or not is_stored:
        return value
    moved = OnHost.of(value, host.out(memory_of(value)))
    return moved.within(moved.memory)
