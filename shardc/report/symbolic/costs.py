"""The cost of a step as expressions: traffic, memory and operations of a program whose sizes are expressions.

The ledger of memory is that of the program at a point; the sizes of its blocks are added up as expressions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.costs.count import flops_of, flops_of_call, nbytes
from shardc.costs.ledger import WORKSPACE, Block
from shardc.costs.memory import memory_by_rank, memory_on
from shardc.costs.replay import ledgers_of, workspace
from shardc.costs.step import StepCost
from shardc.program.communication import members, results
from shardc.program.program import Program, Value
from shardc.program.stages import TIMED, has_stages, stages_of
from shardc.program.traffic import collectives_of, traffic_of
from shardc.report.symbolic.symbolic_program import SymbolicProgram, count_rows, symbols_of


def expressed_cost(symbolic: SymbolicProgram, lowered: Program, final: Program) -> StepCost:
    """The cost of a plan before its collectives go in buckets, and before bytes on the wire are rounded down.

    ``lowered`` and ``final`` are its program at a point, before and after the last passes. Memory is counted at the
    place in the program where most is alive at that point.
    """
    program = symbolic.expressed
    traffic = tuple(replace(each, count=None) for each in traffic_of(collectives_of(program, count_rows)))
    flops = _stage_flops(program) if has_stages(program) else flops_of(program, of_rank=True)
    memory = {name: symbolic.without_rounding(size) for name, size in _memory(program, lowered, final).items()}
    return StepCost(traffic, memory, flops)


def _stage_flops(program: Program) -> Any:
    """The operations of the rank of a pipeline that has the most."""
    import sympy

    pipeline = program.options.pipeline
    assert pipeline is not None
    of_rank: dict[int, Any] = {}
    for stage, rank in zip(stages_of(program).stages, pipeline.place(program.num_stages), strict=True):
        for part, calls in stage.parts.items():
            times = pipeline.microbatches if part in TIMED else 1
            of_rank[rank] = of_rank.get(rank, 0) + times * sum(flops_of_call(program, node) for node in calls)
    return sympy.Max(*map(sympy.expand, of_rank.values()))


def _memory(program: Program, lowered: Program, final: Program) -> dict[str, Any]:
    """Bytes by class. ``program`` has expressions for sizes; ``lowered`` and ``final`` are its forms at a point.

    ``gathered`` and ``peak`` are counted at the place where most is alive at that point. For a pipeline these, and
    ``saved``, are counted on the rank that is fullest there.
    """
    nodes = {node.name: node for node in program.graph.nodes}

    def value_of(node: fx.Node, index: int) -> Value | None:
        """The value of ``program`` that a value of a later program, perhaps in a bucket, stands for; None if none."""
        parts = members(node)
        if node.name not in nodes and index < len(parts):
            node, index = next(results(node, parts[index]), node), 0
        return (nodes[node.name], index) if node.name in nodes else None

    def count(blocks: Iterable[Block]) -> Any:
        """The bytes of blocks: the sum of each distinct expression times the number of its blocks."""
        times: Counter[Any] = Counter()
        for block in (each for each in blocks if each.nbytes or not each.below):
            value = value_of(*block.value)
            assert value is not None, block
            held = _workspace(program, value[0], block) if value[1] == WORKSPACE else nbytes(program.local_type(*value))
            times[held] += 1
        return sum(expression * n for expression, n in times.items())

    every = (node for node in final.graph.nodes if node.op != "output")
    if any(value_of(node, i) is None for node in every for i in range(len(final.types(node)))):
        final = lowered  # cuts are uneven: a value of the final program is padded or cut short
    ledger = max(ledgers_of(final), key=lambda each: memory_on(final, each)["peak"])
    return memory_on(program, ledger, count)


def _workspace(program: Program, node: fx.Node, block: Block) -> Any:
    """The workspace of a call as an expression, or as a number at this point if it takes a comparison of tile sizes."""
    try:
        return workspace(program, node)
    except TypeError:  # sympy cannot compare the expressions
        return block.nbytes


def fullest(program: Program) -> int:
    """The rank of a pipeline with the largest peak of memory, which is reported as the program's."""
    peaks = [memory["peak"] for memory in memory_by_rank(program)]
    return peaks.index(max(peaks))


def along(name: str, several: Sequence[tuple[int, StepCost]], here: StepCost) -> StepCost:
    """The cost for any number of modules, which the symbol ``name`` counts, from the costs for three numbers of them.

    An entry that does not grow by the same amount with each module stays as it is ``here``.
    """
    import sympy

    symbol, counts = symbols_of([name])[name], [count for count, _ in several]

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
            field: line([getattr(other, field) if other else 0 for other in same], getattr(each, field))
            for field in ("values", "bytes", "wire_bytes")
        }
        traffic.append(replace(each, **fields))
    memory = {part: line([cost.memory[part] for _, cost in several], size) for part, size in here.memory.items()}
    return StepCost(tuple(traffic), memory, line([cost.flops for _, cost in several], here.flops))
