"""One step of a pipeline: the actions of its schedule, over the values of each stage and microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shardc.action import ALL, COMPUTE, RECEIVES, SENDS, Action
from shardc.pipeline_cost import PART_OF_PHASE
from shardc.stage import PARTS_OF, Crossing, Part
from shardc.stage_turns import ways_after

from .channel import Key, Message
from .comm import REDUCE
from .instruction import Env
from .interpreter import Values
from .offload import Offload, settled

if TYPE_CHECKING:
    from .pipeline import PipelineRunner


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
