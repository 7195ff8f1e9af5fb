"""Executors on virtual ranks that measure the bytes alive on each rank after every call, pipelines included."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage, fx
from torch.utils._python_dispatch import TorchDispatchMode

from shardc.api import Compiled
from shardc.language.sharding import TensorType
from shardc.language.words import Part
from shardc.ops.attention.products import tiled_workspace
from shardc.ops.attention.ring import TILE, mask_workspace
from shardc.ops.attention.tiled import TILED, TILED_BACKWARD, TILED_MASK_BACKWARD
from shardc.program.program import residual_owner
from shardc.runtime.comm.comm import REDUCE, Comm
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.part import Env, PartRunner, Values
from shardc.runtime.pipeline import runner as pipeline_runner
from shardc.runtime.pipeline.channel import LocalChannel, Message, MessageId, Types
from shardc.runtime.pipeline.runner import PipelineRunner, ScheduleRun
from shardc.runtime.pipeline.stages import StageRunner
from shardc.runtime.simulator import _stage_mesh, cut_inputs
from shardc.runtime.tier.tier import tier_of
from shardc.schedules.schedule import ALL, Action

CPU = torch.device("cpu")


def measured(compiled: Compiled, *args: Any, **kwargs: Any) -> dict[str, int]:
    """``saved`` and ``peak`` bytes of a step on virtual ranks, each of the rank with the most."""
    program = compiled.program
    inputs = _inputs(compiled, args, kwargs)
    return MeasuringExecutor(program, SimulatedComm(compiled.mesh), is_eager=False).measure(inputs)


def _inputs(compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[Tensor | None]]:
    """The inputs of each rank; parameters are stored in the tier below if the options say so."""
    program = compiled.program
    rows, tier = cut_inputs(program, compiled.inputs(program, args, kwargs)), tier_of(program.options.zero, CPU)
    if tier is not None:
        for row in rows:
            for i, (put, value) in enumerate(zip(program.inputs, row, strict=True)):
                row[i] = tier.stored(value) if put.kind == "parameter" and value is not None else value
    return rows


def _bytes(storage: UntypedStorage) -> int:
    """The bytes of a storage on the device; 0 if a file backs it."""
    return storage.nbytes() if storage.filename is None else 0


class MeasuringExecutor(Executor):
    """``given``: inputs of each rank, and values computed from them once; ``held``: outputs; ``peak``: bytes."""

    given: list[list[Tensor]]
    held: Sequence[Values]
    peak: list[int]

    def measure(self, inputs: Sequence[Values]) -> dict[str, int]:
        self.given = [[value for value in values if value is not None] for values in inputs]
        self.held = [()] * len(inputs)
        self.peak = [0] * len(inputs)
        computed = self.update(inputs)
        for given, values in zip(self.given, computed, strict=True):
            given += [value for value in values if value is not None]
        self.held, saved = self.forward(inputs, computed)
        kept = [self._made(i, tensors) for i, tensors in enumerate(saved.tensors)]
        self.backward(saved, inputs)
        return {"saved": max(kept), "peak": max(self.peak)}

    def _run(self, part: PartRunner, envs: Sequence[Env]) -> None:
        def look(i: int, values: Sequence[Any]) -> None:
            given = sum(value.nbytes for value in self.given[i] if _bytes(value.untyped_storage()))
            alive = given + self._made(i, [*values, *self.held[i]])
            self.peak[i] = max(self.peak[i], alive)

        run_watched(part, envs, self.comm, look)

    def _made(self, rank: int, values: Iterable[Any]) -> int:
        """The bytes of these values of a rank, without those that share storage with inputs."""
        given = {value.untyped_storage().data_ptr() for value in self.given[rank]}
        found = {tensor.untyped_storage() for value in values for tensor in _tensors(value)}
        sizes = {storage.data_ptr(): _bytes(storage) for storage in found}
        return sum(size for address, size in sizes.items() if address not in given)


class Scores(TorchDispatchMode):
    """Notes calls of tiled attention, which holds scores while it runs, as test_dropped_attention.py measures.

    ``held``: a tensor as large as these scores.
    """

    held = torch.empty(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (TILED, TILED_BACKWARD, TILED_MASK_BACKWARD):
            is_backward = func is not TILED
            q, k = map(TensorType.of, args[is_backward:][:2])
            nbytes = tiled_workspace(q, k, TILE, args[5 + 3 * is_backward], is_backward=is_backward)
            if func is TILED_MASK_BACKWARD:
                nbytes = mask_workspace(TensorType.of(args[11]), nbytes)
            self.held = torch.empty(nbytes, dtype=torch.uint8)
        return func(*args, **(kwargs or {}))


class Watcher(fx.Interpreter):
    """Runs a part for several ranks; after every call, looks at all live values of each rank, before any is freed.

    ``look``: takes a rank and all its values, including those in ``envs``.
    """

    def __init__(self, part: PartRunner, envs: Sequence[Env], look: Callable[[int, Sequence[Any]], None]) -> None:
        super().__init__(part.module(len(envs)))
        self.envs, self.look = envs, look

    def run_node(self, n: fx.Node) -> Any:
        with Scores() as scores:
            result = super().run_node(n)
        if n.op in ("call_function", "call_method"):
            alive = [(node, value) for node, value in self.env.items() if node.op != "placeholder" and node.users]
            columns = [self._column(node, value) for node, value in (*alive, (n, result))]
            for i, env in enumerate(self.envs):
                self.look(i, [*env, *(column[i] for column in columns if column), scores.held])
        return result

    def _column(self, node: fx.Node, value: Any) -> Sequence[Any]:
        """The value on each rank; on virtual ranks a collective has its results when it is started."""
        if callable(value):
            return value()  # type: ignore[no-any-return]
        return value if len(self.envs) > 1 or node.target is operator.call else [value]


def run_watched(
    part: PartRunner, envs: Sequence[Env], comm: Comm | None, look: Callable[[int, Sequence[Any]], None]
) -> None:
    """Run a part, and call ``look`` with all values of each rank after every call."""
    if part.places or part.results:
        part.put(envs, Watcher(part, envs, look).run(part.take(envs), comm))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from filter(lambda entry: isinstance(entry, Tensor), value)


# Pipelines.


def without_optimizer(memory: dict[str, int], is_offloaded: bool = False) -> dict[str, int]:
    """Announced ``saved`` and ``peak`` memory without the optimizer's states, which measured steps do not have."""
    states = 0 if is_offloaded else memory["optimizer"]
    return {"saved": memory["saved"], "peak": memory["peak"] - states}


def measured_by_rank(compiled: Compiled, *args: Any) -> list[dict[str, int]]:
    """``saved`` and ``peak`` of a step for each pipeline rank, of the rank within its stages that has the most."""
    program = compiled.program
    assert program.mesh is not None
    comm = SimulatedComm(_stage_mesh(program.mesh))
    runner = PipelineRunner(program, comm, channel=Posted())
    runner.channel.place = runner.schedule.place
    inputs = _inputs(compiled, args, {})
    step = MeasuringRun(runner, runner.with_tangents(inputs, 1.0))
    runner.stage_runners = {stage: MeasuringStage(step, stage, comm) for stage in runner.stage_runners}
    with mock.patch.object(pipeline_runner, "REDUCE", {op: step.watching(reduce) for op, reduce in REDUCE.items()}):
        step.run()
    return [{"saved": saved, "peak": peak} for saved, peak in zip(step.saved, step.peak, strict=True)]


class Posted(LocalChannel):
    """A channel that receives into memory of its own, as if from another process."""

    __slots__ = ("posted", "under_way")

    def __init__(self) -> None:
        super().__init__()
        self.posted: dict[MessageId, Message] = {}
        self.under_way: dict[MessageId, Message] = {}  # messages sent once a step to another rank, until the step ends

    def send(self, key: MessageId, message: Message) -> None:
        super().send(key, message)
        if key[1] == ALL and self.place[key[0].source] != self.place[key[0].target]:
            self.under_way[key] = message

    def post(self, key: MessageId, types: Types) -> None:
        if self.place[key[0].source] != self.place[key[0].target]:
            self.posted[key] = [[torch.empty(each.shape, dtype=each.dtype) for each in types]]

    def take(self, key: MessageId) -> Message:
        message = super().take(key)
        if key not in self.posted:
            return message
        rows = self.posted.pop(key) * len(message)
        return [
            [own.clone().copy_(x) for own, x in zip(*pair, strict=True)] for pair in zip(rows, message, strict=True)
        ]


class MeasuringRun(ScheduleRun):
    """``saved`` and ``peak``: bytes by rank; ``at``: the rank that computes."""

    channel: Posted

    def __init__(self, runner: PipelineRunner, inputs: Sequence[Values]) -> None:
        super().__init__(runner, inputs)
        self.at, self.place = 0, runner.schedule.place
        self.saved, self.peak = [0] * runner.schedule.num_ranks, [0] * runner.schedule.num_ranks

    def _run_action(self, action: Action) -> None:
        self.at = self.place[action.stage]
        super()._run_action(action)
        for i in range(self.width):
            self.look(i)
            timed, step = self.values.of_microbatch.items(), self.values.of_step.items()
            kept = [value for (stage, _), envs in timed if self._is_here(stage) for value in envs[i]]
            constant = [value for stage, envs in step if self._is_here(stage) for value in envs[i]]
            made, lasting = self._made(kept), self._made(constant)
            found = sum(size for address, size in made.items() if address not in lasting)
            self.saved[self.at] = max(self.saved[self.at], found)

    def watching(self, reduce: Any) -> Any:
        """A reduction that looks at live values while its operands and its result are alive."""

        def call(x: Tensor, y: Tensor) -> Tensor:
            made: Tensor = reduce(x, y)
            for i in range(self.width):
                self.look(i, (made,))
            return made

        return call

    def look(self, i: int, beside: Sequence[Any] = ()) -> None:
        """Update the peak by all live values on the rank that computes, at rank ``i`` within its stages."""
        given = {_place(value): value.nbytes for value in self._given(i) if _bytes(value.untyped_storage())}
        alive = sum(given.values()) + sum(self._made([*self._held(i), *beside]).values())
        self.peak[self.at] = max(self.peak[self.at], alive)

    def _is_here(self, stage: int) -> bool:
        return self.place[stage] == self.at

    def _given(self, i: int) -> Iterator[Tensor]:
        held = {
            name for s, stage in enumerate(self.runner.stages.stages) if self._is_here(s) for name in stage.parameters
        }
        moves = self.runner.host is not None  # then copies of parameters on the device count as computed values
        for slot, put in enumerate(self.runner.program.inputs):
            rows = self.inputs[i :: self.width] if self.runner.is_timed[slot] else self.inputs[i : i + 1]
            if put.kind == "residual":
                is_here = residual_owner(put.name) in held
            else:
                is_here = put.kind != "parameter" or (put.name in held and not moves)
            if is_here:
                yield from (row[slot] for row in rows if row[slot] is not None)  # type: ignore[misc]

    def _held(self, i: int) -> Iterator[Any]:
        """All live values of the rank that computes; most places of an env are empty."""
        for stage in filter(self._is_here, self.values.of_step):
            yield from (*self.values.of_step[stage][i], *self.values.sums[stage][i].values())
        for (stage, _), envs in self.values.of_microbatch.items():
            yield from [value for value in envs[i] if value is not None] if self._is_here(stage) else ()
        inside = {key: each for key, each in self.channel.messages.items() if self._is_here(key[0].source)}
        inside = {key: each for key, each in inside.items() if self._is_here(key[0].target)}
        for (way, _), message in (*inside.items(), *self.outbox.items(), *self.channel.under_way.items()):
            yield from message[i] if self._is_here(way.source) else ()
        for (way, _), message in self.channel.posted.items():
            yield from message[0] if self._is_here(way.target) else ()

    def _made(self, values: Sequence[Any]) -> dict[int, int]:
        given = {value.untyped_storage().data_ptr() for row in self.inputs for value in row if value is not None}
        found = [tensor.untyped_storage() for value in values if value is not None for tensor in _tensors(value)]
        return {each.data_ptr(): _bytes(each) for each in found if each.data_ptr() not in given}


def _place(value: Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.shape, value.stride()


class MeasuringStage(StageRunner):
    """A stage runner that looks at live values after each call, before any is freed."""

    def __init__(self, step: MeasuringRun, index: int, comm: Comm) -> None:
        super().__init__(step.runner.stages, index, comm, is_eager=False)
        self.step, self.index = step, index

    def run(self, part: Part, envs: Sequence[Env], comm: Comm) -> None:
        self.step.at = self.step.place[self.index]
        run_watched(self.parts[part], envs, comm, self.step.look)
