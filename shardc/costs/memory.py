"""Bytes alive on one rank over a step, by class: what ``memory_of`` sums up, place by place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from shardc.costs.count import alive, is_gathered, stored_bytes
from shardc.costs.pipeline_memory import rank_bytes
from shardc.costs.stage_record import schedule_of
from shardc.program.lifetime import Storage, split, storages
from shardc.program.program import Program, parameters_of
from shardc.program.stages import Stage, stages_of

CLASSES = ("parameters", "inputs", "gathered", "saved", "outputs", "gradients", "working")


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """``places``: the calls in the order in which they run; ``starts``: where among them each part of the step starts.

    ``changes``: by class, at which place how many bytes live; that holds until the next entry. The last place,
    ``len(places)``, is the end of the step.
    """

    places: tuple[fx.Node, ...]
    starts: dict[str, int]
    changes: dict[str, list[tuple[int, int]]]

    def record(self) -> dict[str, Any]:
        """The JSON form; a class that has no bytes is left out."""
        classes = {name: changes for name, changes in self.changes.items() if changes}
        return {"places": [node.name for node in self.places], "starts": self.starts, "classes": classes}


def memory_curve(program: Program) -> MemoryCurve:
    """Of a program without stages; its highest sum over classes is the ``peak`` of ``memory_of``.

    ``parameters`` as they are stored, and what is kept of them to compute on; ``inputs``: data and buffers;
    ``gathered``, ``saved``: see ``memory_of``; ``outputs`` and ``gradients``: what the program returns;
    ``working``: all that dies in the part in which it is made.
    """
    parts = split(program)
    places = (*parts.update, *parts.forward, *parts.backward)
    forward, backward = len(parts.update), len(parts.update) + len(parts.forward)
    parameters = parameters_of(program)
    live: dict[str, list[Storage]] = {name: [] for name in CLASSES}
    for storage in storages(program):
        if storage.value[0] in parameters.values():
            name = "parameters"
        elif is_gathered(program, storage.value[0], parameters):
            name = "gathered"
        else:
            name = _class(storage, len(places), forward, backward)
        live[name].append(storage)
    starts = {"update": 0, "forward": forward, "backward": backward}
    return MemoryCurve(places, starts, {name: _changes(those, len(places)) for name, those in live.items()})


def _class(storage: Storage, end: int, forward: int, backward: int) -> str:
    if storage.born < 0:
        return "inputs"
    if storage.is_saved:
        return "saved"
    if storage.last < end:
        return "working"
    return "parameters" if storage.born < forward else "outputs" if storage.born < backward else "gradients"


def _changes(live: Iterable[Storage], end: int) -> list[tuple[int, int]]:
    """Where it is no longer as many bytes as before; what is there before the first call counts at that."""
    sums = {max(place, 0): nbytes for place, nbytes in alive(live).items() if place <= end}
    return [(place, now) for (_, before), (place, now) in pairwise([(0, 0), *sums.items()]) if now != before]


def stage_memory(program: Program) -> dict[str, int]:
    """Of a lowered or localized program, on the rank with the highest peak; see ``memory_by_rank``."""
    return max(memory_by_rank(program), key=lambda memory: memory["peak"])


def memory_by_rank(program: Program) -> list[dict[str, int]]:
    """Of a lowered or localized program, for each rank of its pipeline.

    As ``memory_of``, of the stages that the rank holds. ``saved``: the most that is kept between two of the schedule's
    actions of all microbatches under way; ``gathered`` lives for the whole step; ``peak`` is that of a whole step, with
    the inputs of all microbatches, both the sums of gradients and what is being added to them, and messages.
    """
    stages = stages_of(program)
    schedule, live = schedule_of(program), list(storages(program))
    found = []
    for rank, (saved, peak) in enumerate(rank_bytes(stages, schedule)):
        here = [stages.stages[stage] for stage in schedule.stages_on(rank)]
        of_rank = dict(_of_rank(program, here, live)) | {"saved": saved, "peak": peak}
        found.append({name: of_rank[name] for name in ORDER})
    return found


ORDER = ("parameters", "gradients", "optimizer", "saved", "gathered", "peak")


def _of_rank(program: Program, stages: Iterable[Stage], live: Iterable[Storage]) -> Iterator[tuple[str, int]]:
    """What does not depend on the schedule, of the stages of one rank."""
    stages = list(stages)
    nodes = parameters_of(program)
    yield from stored_bytes(program, {name for stage in stages for name in stage.parameters}).items()
    gathered = [each for each in live if is_gathered(program, each.value[0], nodes)]
    once = [set(stage.parts["once"]) for stage in stages]  # of what two of them read each has a copy
    yield "gathered", sum(each.nbytes for calls in once for each in gathered if each.value[0] in calls)
