"""What a step costs as expressions: the functions that count bytes and operations, given expressions for sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardc.announcement import collectives_of, moves_edges
from shardc.bucket import members
from shardc.collective import Collective
from shardc.cost import alive, flops_of, held
from shardc.error import ShardingError
from shardc.lifetime import Storage, storages
from shardc.mesh import Mesh
from shardc.partition import parse_part
from shardc.program import Program
from shardc.step_cost import StepCost
from shardc.symbol_expression import Symbolic, named
from shardc.traffic import traffic_of

if TYPE_CHECKING:
    from torch import fx


WHOLE_PAYLOAD = ("collective_permute", "send", "recv")  # is what a rank sends


def expressed_cost(symbolic: Symbolic, lowered: Program, localized: Program) -> StepCost:
    """Of a plan before its collectives go in buckets; ``lowered``, ``localized``: its program at a point.

    Bytes on the wire are not rounded down to whole ones, as they are of each collective. ``peak`` is what lives where
    most does at that point.
    """
    _check(symbolic.reference)
    program, _ = symbolic.expressed()
    by_name = {node.name: node for node in program.graph.nodes}
    live = list(storages(localized))
    if any(each.value[0].name not in by_name for each in live):  # made longer or cut short, where cuts are uneven
        live = list(storages(lowered))
    assert program.mesh is not None
    traffic = tuple(traffic_of(_unrounded(each, program.mesh) for each in collectives_of(program)))
    memory: dict[str, Any] = {
        **held(program),
        "saved": sum(_nbytes(program, by_name, each) for each in live if each.is_saved),
        "peak": sum(_nbytes(program, by_name, each) for each in _fullest(live)),
    }
    return StepCost(traffic, memory, flops_of(program, of_rank=True))


def _check(program: Program) -> None:
    found = [
        node.name for node in program.calls if moves_edges(node) or any(p.kind == "rechunk" for p in members(node))
    ]
    if found:
        raise ShardingError(
            f"{', '.join(found)}",
            "what neighbours exchange of their chunks' edges",
            "how many rows that are goes by steps, and has no expression",
            "count without --symbolic",
        )


def _nbytes(program: Program, by_name: Mapping[str, fx.Node], storage: Storage) -> Any:
    node, index = storage.value
    type_ = program.types(by_name[node.name])[index]
    assert type_ is not None, storage
    return type_.nbytes


def _fullest(live: Sequence[Storage]) -> list[Storage]:
    """What lives at the place where most bytes do."""
    sums = alive(live)
    place = max(sums, key=sums.__getitem__)
    return [each for each in live if each.born <= place <= each.last]


def _unrounded(found: Collective, mesh: Mesh) -> Collective:
    """With its share of the payload on the wire as it is, not rounded down to whole bytes."""
    if found.kind in WHOLE_PAYLOAD:
        return found
    ranks: Any = math.prod(parse_part(axis, mesh).size for axis in found.axes)
    wire: Any = (2 if found.kind == "all_reduce" else 1) * found.bytes * (ranks - 1) / ranks
    return replace(found, wire_bytes=wire)


def along(name: str, start: int, several: Sequence[StepCost], here: StepCost) -> StepCost:
    """The cost for any number of modules, from those of ``start``, one and two more.

    What does not grow evenly is as it is ``here``.
    """
    count = named([name])[name] - start

    def line(values: Sequence[Any], otherwise: Any) -> Any:
        import sympy

        first, second, third = map(sympy.sympify, values)
        is_even = sympy.expand(third - 2 * second + first) == 0
        return first + count * (second - first) if is_even else otherwise

    rows = [{each.key: each for each in cost.traffic} for cost in several]
    traffic = []
    for each in here.traffic:
        same = [row.get(each.key) for row in rows]
        fields = {
            part: line([getattr(found, part) if found else 0 for found in same], getattr(each, part))
            for part in ("count", "bytes", "wire_bytes")
        }
        traffic.append(replace(each, **fields))
    memory = {part: line([cost.memory[part] for cost in several], held_) for part, held_ in here.memory.items()}
    return StepCost(tuple(traffic), memory, line([cost.flops for cost in several], here.flops))
