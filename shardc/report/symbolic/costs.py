"""Memory of a rank as expressions: the ledgers of numbers, run on sizes that are numbers at a point and expressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.costs.flops import flops_of, flops_of_call
from shardc.costs.memory import MEMORY_CLASSES, bytes_alive, is_gathered, memory_by_rank
from shardc.costs.parameter_bytes import persistent_bytes, stored_bytes
from shardc.costs.pipeline_memory import rank_bytes
from shardc.costs.stage_schedule import schedule_of
from shardc.costs.step import StepCost
from shardc.language.sharding import TensorType
from shardc.program.communication import members, results
from shardc.program.lifetime import Storage, owners_of, storages
from shardc.program.program import Program, Value, parameters_of
from shardc.program.stages import TIMED, has_stages, stages_of
from shardc.program.traffic import collectives_of, traffic_of
from shardc.report.symbolic.expression import Symbolic, count_rows, named
from shardc.report.symbolic.form import Size, expression_of


def expressed_memory(program: Program, lowered: Program, final: Program) -> dict[str, Any]:
    """Bytes by class. ``program`` has expressions for sizes; at a point it is ``lowered``, and ``final`` in the end.

    ``gathered`` and ``peak`` are what lives where most does at that point; of a pipeline on the rank that is the
    fullest there, and ``saved`` as well.
    """
    sizes = _Sizes(program)
    if not sizes.has_all(final):  # made longer or cut short, where cuts are uneven
        final = lowered
    if has_stages(final):
        return _of_pipeline(program, sizes, final)
    live = [sizes.of_storage(each) for each in storages(final)]
    parameters = parameters_of(final)
    gathered = [each for each in live if is_gathered(final, each.value[0], parameters)]
    found = {
        "saved": sum(each.nbytes for each in live if each.is_saved),
        "gathered": max(bytes_alive(gathered).values(), default=0),
        "peak": max(bytes_alive(live).values(), default=0),
    }
    return {**persistent_bytes(program), **{name: expression_of(size) for name, size in found.items()}}


def fullest(program: Program) -> int:
    """The rank of a pipeline whose memory is that of the program."""
    peaks = [memory["peak"] for memory in memory_by_rank(program)]
    return peaks.index(max(peaks))


class _Sizes:
    """The values of a program whose sizes are expressions, for those of a later program by the names of nodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = {node.name: node for node in program.graph.nodes}

    def has_all(self, program: Program) -> bool:
        """Whether the values of a program are ours, some of them in buckets."""
        nodes = (node for node in program.graph.nodes if node.op != "output")
        return all(self._ours(node, i) is not None for node in nodes for i in range(len(program.types(node))))

    def of_storage(self, storage: Storage) -> Storage:
        """The same of a size that has an expression."""
        size: Any = Size(storage.nbytes, {self._type(*storage.value).nbytes: 1})
        return replace(storage, nbytes=size)

    def sized(self, program: Program) -> Program:
        """The program, every value as one dim of its size."""
        made = program.copy()
        for node, there in zip(made.graph.nodes, program.graph.nodes, strict=True):
            if node.op != "output":
                types = tuple(self._sized(program, there, i) for i in range(len(program.types(there))))
                made.set_type(node, types if program.has_many(there) else types[0])
        return made

    def _sized(self, program: Program, node: fx.Node, index: int) -> TensorType | None:
        type_ = program.local_type(node, index)
        if type_ is None:
            return None
        size: Any = Size(type_.numel, {self._type(node, index).numel: 1})
        return TensorType((size,), type_.dtype)

    def _type(self, node: fx.Node, index: int) -> TensorType:
        ours = self._ours(node, index)
        assert ours is not None, node
        type_ = self.program.local_type(*ours)
        assert type_ is not None, node
        return type_

    def _ours(self, node: fx.Node, index: int) -> Value | None:
        parts = members(node)
        if node.name not in self.nodes and index < len(parts):
            node, index = next(results(node, parts[index]), node), 0
        return (self.nodes[node.name], index) if node.name in self.nodes else None


def _of_pipeline(program: Program, sizes: _Sizes, final: Program) -> dict[str, Any]:
    sized, schedule, rank = sizes.sized(final), schedule_of(final), fullest(final)
    nodes = dict(zip(final.graph.nodes, sized.graph.nodes, strict=True))
    calls = (node for node in final.graph.nodes if node.op == "call_function")
    owners = {
        (nodes[value[0]], value[1]): (nodes[owner[0]], owner[1]) for value, owner in owners_of(final, calls).items()
    }
    stages = stages_of(sized)
    here = [stages.stages[stage] for stage, at in enumerate(schedule.place) if at == rank]
    saved, peak = list(rank_bytes(stages, schedule, owners))[rank]
    once, parameters = [set(stage.parts["once"]) for stage in here], parameters_of(final)
    gathered = [each for each in storages(final) if is_gathered(final, each.value[0], parameters)]
    gathered = [sizes.of_storage(each) for calls in once for each in gathered if nodes[each.value[0]] in calls]
    found: dict[str, Any] = {
        **stored_bytes(program, {name for stage in here for name in stage.parameters}),
        "saved": saved,
        "gathered": sum(each.nbytes for each in gathered),
        "peak": peak,
    }
    return {name: expression_of(found[name]) for name in MEMORY_CLASSES}


def expressed_cost(symbolic: Symbolic, lowered: Program, final: Program) -> StepCost:
    """Of a plan before its collectives go in buckets; ``lowered``, ``final``: its program at a point, as it ends too.

    Bytes on the wire are not yet rounded down. What lives is what does where most lives at that point.
    """
    program, _ = symbolic.expressed
    traffic = tuple(replace(each, count=None) for each in traffic_of(collectives_of(program, count_rows)))
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
