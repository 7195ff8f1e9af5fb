"""What one step costs a rank: bytes sent by phase, kind and axes, memory by class, and floating-point operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardc.announcement import collectives_of
from shardc.cost import flops_of, memory_of
from shardc.program import Program
from shardc.stage import has_stages
from shardc.stage_record import StageRecord
from shardc.text import flops_text, memory_text
from shardc.traffic import Size, Traffic, traffic_of, traffic_text


@dataclass(frozen=True, slots=True)
class StepCost:
    """``traffic`` in the order in which each first occurs; ``memory`` in bytes by class; ``flops`` of a rank."""

    traffic: tuple[Traffic, ...]
    memory: Mapping[str, Size]
    flops: Size

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("phase", "kind", "axes", "values", "count", "bytes", "wire_bytes")
        traffic = [{name: getattr(each, name) for name in names} for each in self.traffic]
        return {"traffic": traffic, "memory": dict(self.memory), "flops": self.flops}

    def text(self) -> str:
        """Three tables; numbers in full."""
        parts = (
            traffic_text(self.traffic, has_values=True),
            memory_text(self.memory),
            flops_text({"one rank": self.flops}),
        )
        return "\n".join(parts)


def step_cost(program: Program) -> StepCost:
    """Of a lowered or localized program; of a pipeline the memory and operations are those of its fullest rank."""
    return StepCost(tuple(traffic_of(collectives_of(program))), memory_of(program), rank_flops(program))


def rank_flops(program: Program) -> int:
    """Those of a step; in a pipeline, of the rank that has most of them."""
    return StageRecord(program).rank_flops if has_stages(program) else flops_of(program, of_rank=True)
