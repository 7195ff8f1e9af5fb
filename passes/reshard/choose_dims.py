"""Choose for an op that needs a cut dim whole whether the axis cuts another of its dims instead, or none.

A sort needs its dim whole, and its other dims are free. Gathered, the whole sort runs on every rank::

    y, i = sort(x, 0)        # x: f32[64@dp, 16]
        ->
    by all_gather x is f32[64, 16], and so are y and i; or by all_to_all x is f32[64, 16@dp], and so are y and i

The cuts of y and i decide those of other values, so each way is a plan of the whole program. The plan of fewest bytes
is taken, among equals the one that divides the work.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from itertools import chain

from torch import fx

from shardc.language.cut import dims_sharding, factor_cuts
from shardc.language.mesh import MICROBATCH
from shardc.language.rule import Dims, Rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding
from shardc.ops.attention.rules import is_attention
from shardc.program.node import ancestors, arguments, is_getitem
from shardc.program.program import Program, Value
from shardc.program.provenance import Origin, Shardings

from ..propagate.propagate import spread
from .choose_cuts import CutPlan, StandIns, choose_cuts

Way = tuple[str, DimSharding]  # a factor and its cut
Moved = dict[Value, tuple[Sharding, Mapping[str, Origin]]]


def with_moved_axes(plan: CutPlan) -> CutPlan:
    """The plan, with axes moved from a dim that an op needs whole to another of its dims if that sends no more.

    Equal calls, such as those of every layer, are cut alike.
    """
    alike: dict[Hashable, list[fx.Node]] = {}
    for node in plan.program.calls:
        if next(_ways(plan, node), None) is not None:
            alike.setdefault(_kind(plan, node), []).append(node)
    for nodes in alike.values():
        plan = _cheapest(plan, nodes)
    return plan


def _cheapest(plan: CutPlan, nodes: list[fx.Node]) -> CutPlan:
    """The plan, or the one of fewest bytes that cuts these ops in another way. Sets the program's shardings to it.

    Attention is always cut if it can be: gathered, every rank would compute all of it.
    """
    program, start = plan.program, plan
    before = facts = _facts(program)
    for way in dict.fromkeys(_ways(start, nodes[0])):
        stand_ins, results = _moved(start, [node for node in nodes if way in _ways(start, node)], way)
        spread(program, results)
        other = choose_cuts(program, {**start.arrivals.stand_ins, **stand_ins})
        is_first = plan is start and (other.wire_bytes == plan.wire_bytes or is_attention(nodes[0].target))
        if is_first or other.wire_bytes < plan.wire_bytes:
            plan, facts = other, _facts(program)
        set_facts(program, before)
    set_facts(program, facts)
    return plan


Facts = tuple[Shardings, tuple[Mapping[str, Origin], ...]]  # a node's shardings and origins


def _facts(program: Program) -> dict[fx.Node, Facts]:
    nodes = [node for node in program.graph.nodes if any(program.shardings(node)) and not is_getitem(node)]
    return {node: (program.shardings(node), program.origins(node)) for node in nodes}


def set_facts(program: Program, facts: Mapping[fx.Node, Facts]) -> None:
    """Set the shardings and origins of nodes."""
    for node, (shardings, origins) in facts.items():
        program.set_sharding(node, shardings if program.has_many(node) else shardings[0])
        program.set_origins(node, origins)


def _kind(plan: CutPlan, node: fx.Node) -> Hashable:
    program = plan.program
    if is_attention(node.target):  # forward and backward read the same values, so that one way serves both
        read = (program.value(arguments(node)[name]) for name in ("query", "key", "value"))
        return tuple((program.value_type(value), plan.arrivals.shardings[value]) for value in read)
    values = [value and (program.value_type(value), plan.arrivals.shardings[value])
              for value in program.operand_values(node)]  # fmt: skip
    fixed = [str(value) for value in (*node.args, *node.kwargs.values()) if not isinstance(value, (fx.Node, list))]
    return node.target, tuple(values), tuple(fixed), tuple(node.kwargs)


def _ways(plan: CutPlan, node: fx.Node) -> Iterator[Way]:
    """The factors, with their new cuts, that can take the axes of a whole factor. These cut nothing of the op yet."""
    program, rule, op = plan.program, plan.program.rule(node), plan.ops[node]
    kept = rule.whole | {factor for factor, count in rule.chunks.items() if count == 1}
    if not kept:
        return
    used = {part for sharding in (*op.operands, *op.results) if sharding for part in sharding.used_parts}
    for value, dims in zip(program.operand_values(node), rule.operands, strict=True):
        if value is None or dims is None:
            continue
        sharding, shape = plan.arrivals.shardings[value], program.value_type(value).shape
        for factor, cut in factor_cuts(dims, sharding.dims, shape, rule.sizes).items():
            if factor not in kept or cut.minor or any(part.overlaps(own) for part in cut.axes for own in used):
                continue
            if any(part.name == MICROBATCH for part in cut.axes):
                continue  # microbatches run one after another
            for other in rule.sizes:
                further = _further(plan, node, rule, other, cut)
                if further and rule.may_cut(other, further) and further.is_even(rule.sizes[other]):
                    yield other, further


def _further(plan: CutPlan, node: fx.Node, rule: Rule, factor: str, cut: DimSharding) -> DimSharding | None:
    """``cut`` for a factor that all tensors of an op have, a mask of attention aside, and that its plan leaves whole.

    A factor of attention may be cut already, as heads are by ``tp``, and is then cut further. None for other factors.
    """
    operands = () if is_attention(node.target) else rule.operands
    if not all(rule.has(factor, dims) for dims in (*operands, *rule.results) if dims is not None):
        return None
    results = zip(plan.ops[node].results, rule.results, plan.program.types(node), strict=True)
    before = {
        factor_cuts(dims, sharding.dims, type_.shape, rule.sizes).get(factor, WHOLE)
        for sharding, dims, type_ in results
        if sharding is not None and dims is not None and type_ is not None
    }
    if before <= {WHOLE}:
        return cut
    own = before.pop()
    return None if before or own.minor or not is_attention(node.target) else DimSharding(own.axes + cut.axes)


def _moved(plan: CutPlan, nodes: list[fx.Node], way: Way) -> tuple[StandIns, Moved]:
    """The shardings by which the operands of these ops claim the factor's cut, and the new ones of their results."""
    program, (factor, cut) = plan.program, way
    stand_ins: dict[tuple[fx.Node, Value], Sharding] = {}
    moved: Moved = {}
    for node in nodes:
        rule, op, values = program.rule(node), plan.ops[node], program.operand_values(node)

        def with_cut(value: Value, dims: Dims, sharding: Sharding, rule: Rule = rule) -> Sharding:
            cuts = factor_cuts(dims, sharding.dims, program.value_type(value).shape, rule.sizes)
            return Sharding(sharding.mesh, dims_sharding(dims, {**cuts, factor: cut}, rule.sizes), sharding.partial)

        origins: dict[str, Origin] = {}
        for value, dims, sharding in zip(values, rule.operands, op.operands, strict=True):
            if value is not None and dims is not None and sharding is not None:
                stand_ins[node, value] = with_cut(value, dims, sharding)
                origins |= {part.name: _origin(program, node, value, part.name) for part in cut.axes}
        for i, (dims, sharding) in enumerate(zip(rule.results, op.results, strict=True)):
            if dims is not None and sharding is not None:
                through = {axis: origin.through(node.name, (node.name, i)) for axis, origin in origins.items()}
                moved[node, i] = with_cut((node, i), dims, sharding), through
    return stand_ins, moved


def _origin(program: Program, op: fx.Node, value: Value, axis: str) -> Origin:
    """The origin of an axis on an operand; if it does not cut that value, on the nearest value before that it cuts."""
    node, index = value
    near = (origins for each in sorted(ancestors(op), reverse=True) for origins in program.origins(each))
    return next(each[axis] for each in chain((program.origins(node)[index],), near) if axis in each)
