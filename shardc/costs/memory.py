"""Bytes alive on one rank over a step, by class: of a program, of each rank of a pipeline, and over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import fx

from shardc.costs.count import persistent_bytes, stored_bytes
from shardc.costs.pipeline_memory import rank_bytes
from shardc.costs.stage_schedule import schedule_of
from shardc.program.communication import is_early
from shardc.program.lifetime import Storage, split, storages
from shardc.program.node import ancestors
from shardc.program.program import Program, parameters_of
from shardc.program.stages import has_stages, stages_of

MEMORY_CLASSES = ("parameters", "gradients", "optimizer", "saved", "gathered", "peak")
CURVE_CLASSES = ("parameters", "inputs", "gathered", "saved", "outputs", "gradients", "working", "optimizer")


def memory_of(program: Program) -> dict[str, int]:
    """Bytes on one rank by class, of an annotated program or a later one; of a pipeline, on the rank of highest peak.

    ``parameters``: as they are stored, with the copies that are kept to compute on; shared bytes count once.
    ``gradients``: as they are before the optimizer's step, which is whole under stage 1 of ``Zero``. ``optimizer``:
    its states in the parameter's dtype, Adam's two by default (the fp32 master copy of ZeRO's paper is a parameter
    here). ``saved``: activations that forward makes and backward reads. ``gathered``: the most that is gathered of
    parameters at a time. ``peak``: the most that is alive at a time, inputs and optimizer included.
    """
    if has_stages(program):
        return max(memory_by_rank(program), key=lambda memory: memory["peak"])
    parameters, live = parameters_of(program), list(storages(program))
    gathered = [storage for storage in live if is_gathered(program, storage.value[0], parameters)]
    saved = sum(storage.nbytes for storage in live if storage.is_saved)
    most_gathered, most = (max(bytes_alive(those).values(), default=0) for those in (gathered, live))
    memory = {**persistent_bytes(program), "saved": saved, "gathered": most_gathered, "peak": most}
    return with_optimizer(program, memory)


def with_optimizer(program: Program, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes by class with the optimizer's states in ``peak``; an offloading pipeline has them in the host's memory."""
    pipeline = program.options.pipeline
    is_on_host = pipeline is not None and pipeline.offload
    return {**memory, "peak": memory["peak"] + (0 if is_on_host else memory["optimizer"])}


def memory_by_rank(program: Program) -> list[dict[str, int]]:
    """The same for each rank of a lowered or localized pipeline, of the stages that it holds.

    ``saved``: the most that microbatches under way keep between two actions of the schedule. ``gathered``: all of it,
    since it lives for the whole step. ``peak``: over the whole step, with the inputs of all microbatches, the sums of
    gradients and what is added to them, messages, and the optimizer's states.
    """
    stages, schedule, parameters = stages_of(program), schedule_of(program), parameters_of(program)
    gathered = [storage for storage in storages(program) if is_gathered(program, storage.value[0], parameters)]
    memory = []
    for rank, (saved, peak) in enumerate(rank_bytes(stages, schedule)):
        here = [stages.stages[stage] for stage in schedule.stages_on(rank)]
        once = [set(stage.parts["once"]) for stage in here]  # each stage has a copy of what several of them gather
        stored = stored_bytes(program, {name for stage in here for name in stage.parameters})
        copies = sum(storage.nbytes for calls in once for storage in gathered if storage.value[0] in calls)
        by_class = {**stored, "saved": saved, "gathered": copies, "peak": peak}
        memory.append(with_optimizer(program, {name: by_class[name] for name in MEMORY_CLASSES}))
    return memory


def is_gathered(program: Program, node: fx.Node, parameters: Mapping[str, fx.Node]) -> bool:
    """Whether a value is gathered from parameters for a use."""
    is_used_up = is_early(node) and program.source(node).phase != "update"
    return is_used_up and not ancestors(node).isdisjoint(parameters.values())


def bytes_alive(live: Iterable[Storage]) -> dict[int, int]:
    """The bytes alive from each position of a program where a storage is allocated or freed."""
    change: Counter[int] = Counter()
    for storage in live:
        change[storage.born] += storage.nbytes
        change[storage.last + 1] -= storage.nbytes
    positions = sorted(change)
    return dict(zip(positions, accumulate(change[position] for position in positions), strict=True))


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Memory by class over a step.

    ``places``: the calls in the order in which they run. ``starts``: the index of the first call of each phase.
    ``changes``: by class, pairs of an index and the bytes alive from there on; ``len(places)`` is the end of the step.
    """

    places: tuple[fx.Node, ...]
    starts: dict[str, int]
    changes: dict[str, list[tuple[int, int]]]

    def record(self) -> dict[str, Any]:
        """The JSON form, without classes that have no bytes."""
        classes = {name: changes for name, changes in self.changes.items() if changes}
        return {"places": [node.name for node in self.places], "starts": self.starts, "classes": classes}


def memory_curve(program: Program) -> MemoryCurve:
    """The memory of a program without stages; the highest sum over classes is the ``peak`` of ``memory_of``.

    ``parameters``: as stored, with the copies kept to compute on. ``inputs``: data and buffers. ``gathered``,
    ``saved``, ``optimizer``: see ``memory_of``. ``outputs``, ``gradients``: results. ``working``: freed in the phase
    that made it.
    """
    parts = split(program)
    places = (*parts.update, *parts.forward, *parts.backward)
    starts = {"update": 0, "forward": len(parts.update), "backward": len(parts.update) + len(parts.forward)}
    parameters = parameters_of(program)
    live: dict[str, list[Storage]] = {name: [] for name in CURVE_CLASSES}
    for storage in storages(program):
        if storage.value[0] in parameters.values():
            live["parameters"].append(storage)
        elif is_gathered(program, storage.value[0], parameters):
            live["gathered"].append(storage)
        else:
            live[_class(storage, len(places), starts)].append(storage)
    changes = {name: _changes(those, len(places)) for name, those in live.items()}
    states = persistent_bytes(program)["optimizer"]
    return MemoryCurve(places, starts, {**changes, "optimizer": [(0, states)] if states else []})


def _class(storage: Storage, end: int, starts: Mapping[str, int]) -> str:
    if storage.born < 0:
        return "inputs"
    if storage.is_saved:
        return "saved"
    if storage.last < end:
        return "working"
    if storage.born < starts["forward"]:
        return "parameters"
    return "outputs" if storage.born < starts["backward"] else "gradients"


def _changes(live: Iterable[Storage], end: int) -> list[tuple[int, int]]:
    """The positions at which the bytes alive change; what is alive before the first call counts from there."""
    sums = {max(position, 0): nbytes for position, nbytes in bytes_alive(live).items() if position <= end}
    return [(position, now) for (_, before), (position, now) in pairwise([(0, 0), *sums.items()]) if now != before]
