"""What one microbatch costs in each stage of a pipeline and on each edge between stages: seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardc.action import Action, Edge
from shardc.error import ShardingError, raise_all


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage, one microbatch: seconds of ``forward``, ``input`` and ``weight`` gradients; ``reduce`` once a step.

    F saves ``saved`` bytes for backward; after I what W still reads of them is ``held``. ``resident`` bytes lie there
    all the time: weights, gradients and optimizer state.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    reduce: float = 0
    saved: int = 1
    held: int = 1
    resident: int = 0

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__slots__}
        remedy = "say seconds and bytes of 0 or more"
        wrong = [name for name, value in given.items() if not isinstance(value, (int, float)) or not value >= 0]
        raise_all([_no_cost(f"{name}={given[name]!r}", remedy) for name in wrong])

    def seconds(self, kind: str) -> float:
        """Of an action; a B does I and W."""
        by_kind = {"F": self.forward, "I": self.input, "W": self.weight, "REDUCE": self.reduce}
        return self.input + self.weight if kind == "B" else by_kind[kind]

    def change(self, kind: str) -> int:
        """Of the bytes kept for backward by an action: F saves them, B frees them, I some of them and W the rest."""
        by_kind = {"F": self.saved, "I": self.held - self.saved, "W": -self.held, "B": -self.saved}
        return by_kind.get(kind, 0)


def _no_cost(what: str, remedy: str) -> ShardingError:
    return ShardingError("cost of a stage", what, "it is negative, or no number", remedy)


@dataclass(frozen=True, slots=True)
class Costs:
    """Every stage's cost, and what a message takes: ``latency`` seconds and its ``bytes`` at ``bandwidth`` a second."""

    stages: tuple[StageCost, ...]
    latency: float = 0
    bandwidth: float = float("inf")
    message_bytes: Mapping[Edge, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            what = f"latency={self.latency!r}, bandwidth={self.bandwidth!r}"
            raise ShardingError("cost of a message", what, "no time is negative", "say latency >= 0 and bandwidth > 0")

    def seconds(self, action: Action) -> float:
        """How long a computation or a reduction takes."""
        return self.stages[action.stage].seconds(action.kind)

    def transfer_seconds(self, edge: Edge) -> float:
        """How long one message is on its way."""
        size = self.message_bytes.get(edge, 0)
        return self.latency + size / self.bandwidth if size else self.latency


def costs_for(num_stages: int, costs: Costs | StageCost | None) -> Costs:
    """Costs of every stage; one StageCost is that of each, and nothing means a second for each of F, I and W."""
    if isinstance(costs, Costs) and not all(isinstance(each, StageCost) for each in costs.stages):
        problem, remedy = "a stage's cost is a shardc.StageCost", "say Costs((StageCost(...), ...))"
        raise ShardingError("costs", repr(costs.stages), problem, remedy)
    if isinstance(costs, Costs):
        if len(costs.stages) != num_stages:
            what = f"costs of {len(costs.stages)} stages for a schedule of {num_stages}"
            raise ShardingError("costs", what, "every stage has one", f"give {num_stages} of them")
        return costs
    if costs is not None and not isinstance(costs, StageCost):
        problem, remedy = "it is no shardc.Costs and no shardc.StageCost", "say StageCost(...) for all stages alike"
        raise ShardingError("costs", repr(costs), problem, remedy)
    return Costs((costs or StageCost(),) * num_stages)
