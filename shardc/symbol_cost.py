"""What a step costs as expressions: the functions that count bytes and operations, given expressions for sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardc.announcement import collectives_of
from shardc.cost import flops_of, flops_of_call
from shardc.program import Program
from shardc.stage import TIMED, has_stages
from shardc.stage_cut import stages_of
from shardc.step_cost import StepCost
from shardc.symbol_expression import Symbolic, named
from shardc.symbol_memory import expressed_memory
from shardc.traffic import traffic_of


def expressed_cost(symbolic: Symbolic, lowered: Program, final: Program) -> StepCost:
    """Of a plan before its collectives go in buckets; ``lowered``, ``final``: its program at a point, as it ends too.

    Bytes on the wire are not yet rounded down. What lives is what does where most lives at that point.
    """
    program, _ = symbolic.expressed
    traffic = tuple(replace(each, count=None) for each in traffic_of(collectives_of(program)))
    flops = _stage_flops(program) if has_stages(program) else flops_of(program, of_rank=True)
    memory = {name: symbolic.evened(size) for name, size in expressed_memory(program, lowered, final).items()}
    return StepCost(traffic, memory, flops)


def _stage_flops(program: Program) -> Any:
    """Of the rank of a pipeline that has most of them."""
    import sympy

    pipeline = program.options.pipeline
    assert pipeline is not None
    of_rank: dict[int, Any] = {}
    for stage, rank in zip(stages_of(program).stages, pipeline.place(program.num_stages), strict=True):
        for part, calls in stage.parts.items():
            times = pipeline.microbatches if part in TIMED else 1
            of_rank[rank] = of_rank.get(rank, 0) + times * sum(flops_of_call(program, node) for node in calls)
    return sympy.Max(*map(sympy.expand, of_rank.values()))


def along(name: str, several: Sequence[tuple[int, StepCost]], here: StepCost) -> StepCost:
    """The cost for any number of modules, from those of three numbers of them.

    What does not grow evenly is as it is ``here``.
    """
    import sympy

    symbol = named([name])[name]
    counts = [count for count, _ in several]

    def line(values: Sequence[Any], otherwise: Any) -> Any:
        first, second, third = map(sympy.sympify, values)
        slope = (second - first) / (counts[1] - counts[0])
        is_even = sympy.expand(first + (counts[2] - counts[0]) * slope - third) == 0
        return first + (symbol - counts[0]) * slope if is_even else otherwise

    rows = [{each.key: each for each in cost.traffic} for _, cost in several]
    traffic = []
    for each in here.traffic:
        same = [row.get(each.key) for row in rows]
        fields = {
            part: line([getattr(found, part) if found else 0 for found in same], getattr(each, part))
            for part in ("values", "bytes", "wire_bytes")
        }
        traffic.append(replace(each, **fields))
    memory = {part: line([cost.memory[part] for _, cost in several], held_) for part, held_ in here.memory.items()}
    return StepCost(tuple(traffic), memory, line([cost.flops for _, cost in several], here.flops))
