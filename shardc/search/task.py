"""The task of a search: devices, their links and memory, and the parts of a plan that are fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardc.language.machine import Machine
from shardc.language.partition import P
from shardc.options import Pipeline, Precision, Remat, Saved
from shardc.search.space.plan import Axis, Plan
from shardc.wire import Wire

Objective = Literal["time", "memory"]
Progress = Callable[[str], None]  # receives lines about what a search does


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a search.

    ``memory``: bytes of memory of a rank. ``given``: annotations that stay. ``sample_axes``: the axes by which they cut
    the first dim of an input. ``fix``: the allowed values of each fixed part, by name, as the user wrote them.
    ``sizes``: the allowed sizes of axes, by name; an axis that a plan lacks has one rank. ``meshes``: the allowed sizes
    of a mesh's axes, in ascending order; None for all. ``stages``: the allowed stages of ZeRO, 0 for none. ``remats``,
    ``precisions``: the allowed options. ``pipelines``, ``overlaps``, ``saved``: likewise; None leaves them to the
    search. ``wire``: the codecs of all plans.
    """

    devices: int
    machine: Machine
    memory: float = float("inf")
    objective: Objective = "time"
    optimizer: str = "adamw"
    given: Mapping[str, P] = field(default_factory=dict)
    sample_axes: frozenset[str] = frozenset()
    fix: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    meshes: Sequence[tuple[int, ...]] | None = None
    stages: Sequence[int] = (0, 1, 2, 3)
    remats: Sequence[Remat | None] = (None,)
    precisions: Sequence[Precision | None] = (None,)
    pipelines: Sequence[Pipeline | None] | None = None
    overlaps: Sequence[str | None] | None = None
    saved: Sequence[Saved | None] | None = None
    wire: Wire | None = None

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The first allowed values of options that are fixed and that the search does not change otherwise."""
        remats = () if None in self.remats else self.remats
        options = {"remat": remats, "overlap": self.overlaps, "saved": self.saved}
        return {name: values[0] for name, values in options.items() if values}

    @property
    def extremes(self) -> tuple[Machine, ...]:
        """The machine with all devices in one node and, if there are several nodes, with each device in its own."""
        links, device, between = self.machine.links, self.machine.device, self.machine.between
        inside = Machine(links, device)
        return (inside,) if between is None else (inside, Machine({"*": between}, device))

    def allows(self, axes: Iterable[Axis]) -> bool:
        """Whether axes have the sizes that are fixed."""
        sizes = {axis.name: axis.size for axis in axes if axis.size > 1}
        if self.meshes is not None and tuple(sorted(sizes.values())) not in self.meshes:
            return False
        return all(sizes.get(name, 1) in allowed for name, allowed in self.sizes.items() if name != "pp")

    @property
    def fixed_axes(self) -> set[str]:
        """The names of axes whose sizes are fixed, without the numbers behind them."""
        return {name.rstrip("0123456789") for name in self.sizes}

    @property
    def given_axes(self) -> tuple[str, ...]:
        """The axes that the user's annotations name."""
        return tuple(dict.fromkeys(axis for spec in self.given.values() for axis in spec.axes))

    @property
    def may_recompute(self) -> bool:
        """Whether the search may choose how much to recompute."""
        return None in self.remats and any(self.remats) and "remat" not in self.fix

    def allows_zero(self, plan: Plan) -> bool:
        """Whether a plan has an allowed stage of ZeRO."""
        return (plan.zero.stage if plan.zero else 0) in self.stages

    def permits(self, plan: Plan) -> bool:
        """Whether a plan has allowed options and an allowed number of stages."""
        is_budget = plan.remat is not None and plan.remat.budget is not None and self.may_recompute
        has_remat = is_budget or plan.remat in self.remats
        has_pipeline = self.pipelines is None or plan.pipeline in self.pipelines
        has_stages = plan.num_stages in self.sizes.get("pp", (plan.num_stages,))
        has_others = all(
            allowed is None or option in allowed
            for option, allowed in ((plan.overlap, self.overlaps), (plan.saved, self.saved))
        )
        has_precision = plan.precision in self.precisions
        return self.allows_zero(plan) and has_remat and has_pipeline and has_stages and has_precision and has_others

    def of_stage(self, num_stages: int) -> Task:
        """The task for the devices of one pipeline stage, priced for the whole model with the memory of all stages."""
        sizes = {name: each for name, each in self.sizes.items() if name != "pp"}
        meshes = self.meshes and [_without(num_stages, each) for each in self.meshes if num_stages in each]
        devices, memory = self.devices // num_stages, num_stages * self.memory
        return replace(self, devices=devices, memory=memory, sizes=sizes, meshes=meshes)

    @property
    def is_for_memory(self) -> bool:
        """Whether the least memory is looked for, rather than the least time."""
        return self.objective == "memory"

    def excess(self, peak: float) -> float:
        """The bytes by which a peak exceeds the memory of a rank."""
        return max(0.0, peak - self.memory)

    def figure(self, seconds: float, peak: float) -> float:
        """The figure to minimize: the seconds or the peak."""
        return seconds if self.objective == "time" else peak


def _without(size: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes without the first one of this size."""
    at = sizes.index(size)
    return sizes[:at] + sizes[at + 1 :]
