"""A plan and its price: the cost of the whole compiled plan on a machine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

from torch import nn

import shardc
from shardc import Mesh, P, Pipeline, Remat, Zero
from shardc.api import Compiled
from shardc.costs.count import on_machine
from shardc.costs.step_time import step_timeline
from shardc.language.machine import Machine

OPTIMIZER = "adamw"


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A mesh, annotations and options, with the name of the plan in the table.

    ``others``: options that only suggestions have, by name.
    """

    name: str
    mesh: Mesh
    annotations: Mapping[str, P] = field(default_factory=dict)
    zero: Zero | None = None
    remat: Remat | None = None
    pipeline: Pipeline | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The plan as arguments of ``shardc.compile``."""
        return {
            "mesh": self.mesh, "annotations": self.annotations, "zero": self.zero, "remat": self.remat,
            "pipeline": self.pipeline, **self.others,
        }  # fmt: skip

    @property
    def text(self) -> str:
        """The arguments of the plan as Python code."""
        return ", ".join(f"{name}={code(value)}" for name, value in self.arguments.items() if value)


def code(value: Any) -> str:
    """An option as Python code, without fields that have their default values."""
    if not is_dataclass(value):
        return repr(value)
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    said = (f"{each.name}={given[each.name]!r}" for each in fields(value) if given[each.name] != default_of(each))
    return f"{type(value).__name__}({', '.join(said)})"


def default_of(each: Field[Any]) -> Any:
    """The default value of a field."""
    return each.default if each.default_factory is MISSING else each.default_factory()


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a plan: predicted seconds of a step; peak memory, sent bytes and operations of one rank.

    ``num_collectives``: those of a step; for a pipeline, those of all stages.
    """

    seconds: float
    peak: int
    wire_bytes: int
    num_collectives: int
    flops: int


def price(model: nn.Module, inputs: Mapping[str, Any], plan: Plan, machine: Machine) -> Price:
    """The price of one plan. Raises what ``shardc.compile`` raises."""
    return Pricer(model, inputs).prices(plan, [machine])[0]


class Pricer:
    """Prices plans of one model and its inputs by name.

    State: ``_captured``, a compiled plan for each set of annotations of modules; other plans reuse its capture.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self._captured: dict[Hashable, Compiled] = {}

    def prices(self, plan: Plan, machines: Sequence[Machine]) -> list[Price]:
        """The price on each machine. Without a pipeline the program is the same on all machines, and is compiled once.

        Raises what ``shardc.compile`` raises.
        """
        if plan.pipeline is not None and len(machines) > 1:  # stages are balanced by the times of the machine
            return [each for machine in machines for each in self.prices(plan, [machine])]
        compiled = self._compiled(plan, machines[0])
        collectives, cost = compiled.collectives, compiled.cost
        wire = sum(each.times * each.wire_bytes for each in collectives)
        count = sum(each.times for each in collectives)
        programs = [on_machine(compiled.program, machine) for machine in machines]
        seconds = [step_timeline(program).makespan for program in programs]
        return [Price(took, cost.memory["peak"], wire, count, cost.flops) for took in seconds]

    def _compiled(self, plan: Plan, machine: Machine) -> Compiled:
        key = tuple((name, repr(spec)) for name, spec in plan.annotations.items() if name.startswith("module:"))
        if key in self._captured:
            return self._captured[key].recompile(**plan.arguments, links=machine)
        compiled = shardc.compile(self.model, **plan.arguments, kwargs=self.inputs, links=machine, optimizer=OPTIMIZER)
        self._captured[key] = compiled
        return compiled
