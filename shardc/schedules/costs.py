"""Seconds and bytes of a pipeline's stages and messages: the input of every simulation and search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardc.language.errors import ShardingError, raise_all
from shardc.schedules.schedule import Action, Edge


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one stage for one microbatch.

    ``forward``, ``input``, ``weight``: seconds of the actions F, I and W; ``reduce``: of REDUCE, once a step.
    ``saved``: bytes that F saves for backward; ``held``: those of them that W still needs after I. ``resident``: bytes
    of weights, gradients and optimizer state, allocated all the time. Raises a ShardingError for a negative value.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    reduce: float = 0
    saved: int = 1
    held: int = 1
    resident: int = 0

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__slots__}
        wrong = [name for name, value in values.items() if not isinstance(value, (int, float)) or not value >= 0]
        problem, remedy = "it is negative, or no number", "say seconds and bytes of 0 or more"
        raise_all([ShardingError("cost of a stage", f"{name}={values[name]!r}", problem, remedy) for name in wrong])

    def seconds(self, kind: str) -> float:
        """The time of an action of this kind; B takes as long as I and W."""
        by_kind = {"F": self.forward, "I": self.input, "W": self.weight, "REDUCE": self.reduce}
        return self.input + self.weight if kind == "B" else by_kind[kind]

    def change(self, kind: str) -> int:
        """The change in bytes saved for backward: F saves them, B frees them, I frees a part and W the rest."""
        by_kind = {"F": self.saved, "I": self.held - self.saved, "W": -self.held, "B": -self.saved}
        return by_kind.get(kind, 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of every stage and of messages.

    ``latency``: seconds of each message. ``bandwidth``: bytes a second. ``message_bytes``: the size of one message over
    each edge. Raises a ShardingError for a negative latency or a bandwidth of 0 or less.
    """

    stages: tuple[StageCost, ...]
    latency: float = 0
    bandwidth: float = float("inf")
    message_bytes: Mapping[Edge, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            what = f"latency={self.latency!r}, bandwidth={self.bandwidth!r}"
            raise ShardingError("cost of a message", what, "no time is negative", "say latency >= 0 and bandwidth > 0")

    def seconds(self, action: Action) -> float:
        """The time of a computation or a reduction."""
        return self.stages[action.stage].seconds(action.kind)

    def transfer_seconds(self, edge: Edge) -> float:
        """The time of one message over an edge."""
        size = self.message_bytes.get(edge, 0)
        return self.latency + size / self.bandwidth if size else self.latency


def costs_for(num_stages: int, costs: Costs | StageCost | None) -> Costs:
    """The costs of every stage. A StageCost counts for each stage; by default F, I and W take one second each.

    Raises a ShardingError for any other type, and for costs of another number of stages.
    """
    if costs is None or isinstance(costs, StageCost):
        return Costs((costs or StageCost(),) * num_stages)
    if not isinstance(costs, Costs):
        problem, remedy = "it is no shardc.Costs and no shardc.StageCost", "say StageCost(...) for all stages alike"
        raise ShardingError("costs", repr(costs), problem, remedy)
    if not all(isinstance(each, StageCost) for each in costs.stages):
        problem, remedy = "a stage's cost is a shardc.StageCost", "say Costs((StageCost(...), ...))"
        raise ShardingError("costs", repr(costs.stages), problem, remedy)
    if len(costs.stages) != num_stages:
        what = f"costs of {len(costs.stages)} stages for a schedule of {num_stages}"
        raise ShardingError("costs", what, "every stage has one", f"give {num_stages} of them")
    return costs
