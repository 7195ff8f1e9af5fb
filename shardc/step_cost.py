"""What one step costs a rank: bytes sent by phase, kind and axes, memory by class, and floating-point operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardc.announcement import collectives_of
from shardc.collective import Collective
from shardc.cost import memory_of
from shardc.dump_text import rank_flops
from shardc.program import Program
from shardc.text import table

Size = Any  # an int; a sympy.Expr where sizes have names


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind, over the same axes, in one phase: of a step on one rank, in bytes."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    count: Size
    bytes: Size
    wire_bytes: Size

    @property
    def key(self) -> tuple[str, str, str]:
        """Phase, kind and axes as printed."""
        return self.phase, self.kind, "+".join(self.axes)


@dataclass(frozen=True, slots=True)
class StepCost:
    """``traffic`` in the order in which each first occurs; ``memory`` in bytes by class; ``flops`` of a rank."""

    traffic: tuple[Traffic, ...]
    memory: Mapping[str, Size]
    flops: Size

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("phase", "kind", "axes", "count", "bytes", "wire_bytes")
        traffic = [{name: getattr(each, name) for name in names} for each in self.traffic]
        return {"traffic": traffic, "memory": dict(self.memory), "flops": self.flops}

    def text(self) -> str:
        """Three tables; numbers in full."""
        rows: list[tuple[Any, ...]] = [(*each.key, each.count, each.bytes, each.wire_bytes) for each in self.traffic]
        total = [sum(row[i] for row in rows) for i in (3, 4, 5)]
        sent = table(("phase", "kind", "axes", "count", "bytes", "wire bytes"), [*rows, ("total", "", "", *total)])
        memory = table(("memory of one rank", "bytes"), self.memory.items())
        operations = table(("floating-point operations", "count"), [("one rank", self.flops)])
        return "\n".join([sent if rows else "no collectives\n", memory, operations])


def step_cost(program: Program) -> StepCost:
    """Of a lowered or localized program; of a pipeline the memory and operations are those of its fullest rank."""
    return StepCost(tuple(traffic_of(collectives_of(program))), memory_of(program), rank_flops(program))


def traffic_of(collectives: Iterable[Collective]) -> list[Traffic]:
    """What collectives send together."""
    found: dict[tuple[str, str, tuple[str, ...]], list[Collective]] = {}
    for each in collectives:
        found.setdefault((each.phase, each.kind, each.axes), []).append(each)
    return [
        Traffic(
            *key,
            sum(each.times for each in same),
            sum(each.bytes * each.times for each in same),
            sum(each.wire_bytes * each.times for each in same),
        )
        for key, same in found.items()
    ]
