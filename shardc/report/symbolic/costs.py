"""The cost of a step as expressions: traffic, memory and operations of a program whose sizes are expressions.

Memory is counted by the same functions as in numbers, on sizes that are a number at a point and an expression both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import total_ordering
from typing import Any

from torch import fx

from shardc.costs.count import flops_of, flops_of_call, persistent_bytes, stored_bytes
from shardc.costs.memory import MEMORY_CLASSES, bytes_alive, is_gathered, memory_by_rank, with_optimizer
from shardc.costs.pipeline_memory import rank_bytes
from shardc.costs.stage_schedule import schedule_of
from shardc.costs.step import StepCost
from shardc.language.sharding import TensorType
from shardc.program.communication import members, results
from shardc.program.lifetime import Storage, owners_of, storages
from shardc.program.program import Program, Value, parameters_of
from shardc.program.stages import TIMED, has_stages, stages_of
from shardc.program.traffic import collectives_of, traffic_of
from shardc.report.symbolic.symbolic_program import SymbolicProgram, count_rows, symbols_of


def expressed_cost(symbolic: SymbolicProgram, lowered: Program, final: Program) -> StepCost:
    """The cost of a plan before its collectives go in buckets, and before bytes on the wire are rounded down.

    ``lowered`` and ``final`` are its program at a point, before and after the last passes. Memory is that of the place
    in the program where most is alive at that point.
    """
    program = symbolic.expressed
    traffic = tuple(replace(each, count=None) for each in traffic_of(collectives_of(program, count_rows)))
    flops = _stage_flops(program) if has_stages(program) else flops_of(program, of_rank=True)
    memory = {name: symbolic.without_rounding(size) for name, size in _memory(program, lowered, final).items()}
    return StepCost(traffic, memory, flops)


def _stage_flops(program: Program) -> Any:
    """The operations of the rank of a pipeline that has most of them."""
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
    """Bytes by class. ``program`` has expressions for sizes; at a point it is ``lowered``, and ``final`` in the end.

    ``gathered`` and ``peak`` are those of the place where most is alive at that point; of a pipeline on the rank that
    is the fullest there, and ``saved`` as well.
    """
    sizes = _Sizes(program)
    nodes = [node for node in final.graph.nodes if node.op != "output"]
    if any(sizes.value_of(node, i) is None for node in nodes for i in range(len(final.types(node)))):
        final = lowered  # a value of the final program is padded or cut short, where cuts are uneven
    if has_stages(final):
        return _pipeline_memory(program, sizes, final)
    live, parameters = [sizes.of_storage(each) for each in storages(final)], parameters_of(final)
    gathered = [each for each in live if is_gathered(final, each.value[0], parameters)]
    at_place = {
        "saved": sum(each.nbytes for each in live if each.is_saved),
        "gathered": max(bytes_alive(gathered).values(), default=0),
        "peak": max(bytes_alive(live).values(), default=0),
    }
    return with_optimizer(
        program, {**persistent_bytes(program), **{name: expression_of(size) for name, size in at_place.items()}}
    )


def _pipeline_memory(program: Program, sizes: _Sizes, final: Program) -> dict[str, Any]:
    sized, schedule, rank = sizes.sized(final), schedule_of(final), fullest(final)
    nodes = dict(zip(final.graph.nodes, sized.graph.nodes, strict=True))
    calls = (node for node in final.graph.nodes if node.op == "call_function")
    owners = {(nodes[node], i): (nodes[owner], j) for (node, i), (owner, j) in owners_of(final, calls).items()}
    stages = stages_of(sized)
    here = [stages.stages[stage] for stage, at in enumerate(schedule.place) if at == rank]
    saved, peak = list(rank_bytes(stages, schedule, owners))[rank]
    parameters, gathered_here = parameters_of(final), {node for stage in here for node in stage.parts["once"]}
    gathered = [storage for storage in storages(final) if is_gathered(final, storage.value[0], parameters)]
    nbytes: dict[str, Any] = {
        **stored_bytes(program, {name for stage in here for name in stage.parameters}),
        "saved": saved,
        "gathered": sum(sizes.of_storage(one).nbytes for one in gathered if nodes[one.value[0]] in gathered_here),
        "peak": peak,
    }
    return with_optimizer(program, {name: expression_of(nbytes[name]) for name in MEMORY_CLASSES})


def fullest(program: Program) -> int:
    """The rank of a pipeline with the largest peak of memory, which is reported as the program's."""
    peaks = [memory["peak"] for memory in memory_by_rank(program)]
    return peaks.index(max(peaks))


class _Sizes:
    """The values of a program with expressions for sizes, by those of a later program with the same node names."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = {node.name: node for node in program.graph.nodes}

    def of_storage(self, storage: Storage) -> Storage:
        """The same storage with a size that has an expression."""
        size: Any = Size(storage.nbytes, {self._type(*storage.value).nbytes: 1})
        return replace(storage, nbytes=size)

    def sized(self, program: Program) -> Program:
        """The program with every value as one dim of its size."""
        copy = program.copy()
        for node, original in zip(copy.graph.nodes, program.graph.nodes, strict=True):
            if node.op == "output":
                continue
            types: list[TensorType | None] = [None] * len(program.types(original))
            for i in range(len(types)):
                type_ = program.local_type(original, i)
                if type_ is not None:
                    size: Any = Size(type_.numel, {self._type(original, i).numel: 1})
                    types[i] = TensorType((size,), type_.dtype)
            copy.set_type(node, tuple(types) if program.has_many(original) else types[0])
        return copy

    def _type(self, node: fx.Node, index: int) -> TensorType:
        value = self.value_of(node, index)
        type_ = value and self.program.local_type(*value)
        assert type_ is not None, node
        return type_

    def value_of(self, node: fx.Node, index: int) -> Value | None:
        """The value of the first program that is one of a later program, perhaps in a bucket; None where none is."""
        parts = members(node)
        if node.name not in self.nodes and index < len(parts):
            node, index = next(results(node, parts[index]), node), 0
        return (self.nodes[node.name], index) if node.name in self.nodes else None


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """A number that is a sum of expressions.

    ``value``: the number at a point, by which sizes are ordered. ``terms``: how often each expression is in the sum.
    """

    value: int
    terms: Mapping[Any, int]

    @property
    def expression(self) -> Any:
        """The sum."""
        return sum(expression * times for expression, times in self.terms.items())

    def __add__(self, other: Size | int) -> Size:
        terms = dict(self.terms)
        more = other.terms if isinstance(other, Size) else {1: other}
        for expression, times in more.items():
            terms[expression] = terms.get(expression, 0) + times
        return Size(self.value + _value(other), {each: times for each, times in terms.items() if times})

    __radd__ = __add__

    def __sub__(self, other: Size | int) -> Size:
        return self + other * -1

    def __rsub__(self, other: int) -> Size:
        return self * -1 + other

    def __mul__(self, times: int) -> Size:
        return Size(self.value * times, {expression: n * times for expression, n in self.terms.items()})

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return bool(self.value == _value(other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __lt__(self, other: Size | int) -> bool:
        return bool(self.value < _value(other))


def _value(size: Any) -> Any:
    return size.value if isinstance(size, Size) else size


def expression_of(size: Any) -> Any:
    """The expression of a size; a number is its own."""
    return size.expression if isinstance(size, Size) else size


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
