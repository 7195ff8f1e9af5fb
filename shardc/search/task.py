"""What a search is asked: devices, their links and memory, and what is fixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardc.language.machine import Machine
from shardc.language.partition import P
from shardc.options import Pipeline, Precision, Remat
from shardc.search.plan import Axis

Objective = Literal["time", "memory"]


@dataclass(frozen=True, slots=True)
class Task:
    """A question to the search.

    ``memory``: bytes that a rank has. ``given``: annotations that stay. ``sizes``: the sizes that an axis may have, by
    its name; an axis that a plan does not have has one rank. ``stages``: of ZeRO, 0 for none. ``remats``,
    ``precisions`` and ``pipelines``: the options that a plan may have; of a pipeline, the ones with any number of
    stages where ``pipelines`` is None.
    """

    devices: int
    machine: Machine
    memory: float = float("inf")
    objective: Objective = "time"
    optimizer: str = "adamw"
    given: Mapping[str, P] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    stages: Sequence[int] = (0, 1, 2, 3)
    remats: Sequence[Remat | None] = (None,)
    precisions: Sequence[Precision | None] = (None,)
    pipelines: Sequence[Pipeline | None] | None = None

    @property
    def extremes(self) -> tuple[Machine, Machine]:
        """The machine as if all devices were in one node, and as if each were in a node of its own."""
        inside = Machine(self.machine.links, self.machine.device)
        between = self.machine.between
        return inside, inside if between is None else Machine({"*": between}, self.machine.device)

    def allows(self, axes: Iterable[Axis]) -> bool:
        """Whether axes have the sizes that are fixed."""
        sizes = {axis.name: axis.size for axis in axes}
        return all(sizes.get(name, 1) in allowed for name, allowed in self.sizes.items())

    def figure(self, seconds: float, peak: float) -> float:
        """What is to be small."""
        return seconds if self.objective == "time" else peak


def sizes_of(value: Any) -> tuple[int, ...]:
    """The sizes that ``fix`` allows an axis: a number or several."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
