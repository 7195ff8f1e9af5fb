"""insert_reshards: annotated -> agreed. A visible reshard wherever a value's sharding is not what an op needs.

Each op gives its axes to its factors, so that one axis cuts one factor on all of its tensors (choose_cuts.py). An
operand in another sharding is resharded, and a result is partial over the cuts of factors that it does not have::

    y: f32[8@dp, 64] = dot(x, w, "a b, b c -> a c")      # x: f32[8@dp, 256@tp], w: f32[256@tp, 64]
        ->
    y: f32[8@dp, 64]{sum tp} = dot(x, w, "a b, b c -> a c")
    r: f32[8@dp, 64] = reshard(y)

A partial sum is not reduced where it is made but where an op needs it, if every op up to there is linear in it, none
makes it larger, and no value on the way has a second reader.

Invariants: every operand of every op is cut as its factors are; only a reshard changes a sharding; a value is resharded
to one target once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from shardc.language.cut import factor_cuts
from shardc.language.mesh import AxisPart
from shardc.language.rule import Dims
from shardc.language.sharding import DimSharding, Sharding
from shardc.language.windows import moves_rows
from shardc.program.collective import EXCHANGES, reshard
from shardc.program.communication import goes_round, ring_of
from shardc.program.node import is_annotation, is_getitem, operand, operands, set_operands
from shardc.program.program import Output, Program, Value, ends_of
from shardc.program.provenance import (
    Cause,
    Endpoint,
    Need,
    NeedKind,
    NeighbourEdges,
    Origin,
    RoundOfKeys,
    ShardingChange,
)
from shardc.program.text import value_name

from .choose_cuts import CutPlan
from .choose_sides import cheapest_plan


def insert_reshards(program: Program) -> Program:
    """The program with a reshard between every producer and consumer whose shardings differ."""
    program = program.edited("agreed")
    plan = cheapest_plan(program)
    program.sides = plan.sides
    rewriter = _Rewriter(program, plan)
    for node in list(program.graph.nodes)[:-1]:  # all but the output
        if node.op == "call_function" and not is_getitem(node):
            rewriter.call(node)
        if not program.has_many(node):
            rewriter.reduce(node)
    results = [
        rewriter.result(result, target, output, owner) if result and target else None
        for (output, owner, result), target in zip(ends_of(program), plan.outputs, strict=True)
    ]
    program.output_node.args = (tuple(results),)
    return program


def insert_reshard(program: Program, node: fx.Node, target: Sharding, like: fx.Node, *causes: Cause) -> fx.Node:
    """Insert a reshard of a node's value, with the source of ``like``, at the graph's insertion point."""
    new = program.insert(reshard, (node,), program.value_type(program.value(node)), like)
    changes = (cause for cause in causes if isinstance(cause, ShardingChange))
    cuts = {need.axis: need.origin for cause in changes for need in cause.needs if need.kind == "cut" and need.origin}
    program.set_sharding(new, target)
    program.set_origins(new, ({**program.origin(node), **cuts},))
    program.set_causes(new, causes)
    return new


def endpoint(program: Program, node: fx.Node) -> Endpoint:
    """The name of a node, or the user's name of an input, and its place in the user's model."""
    source = program.source(node)
    return Endpoint(value_name(program, node), source.module, source.location)


@dataclass(slots=True)
class _Rewriter:
    """Inserts the reshards of a plan.

    ``holder``: the node that holds a value for its readers; it is a reshard if the value's sum is reduced at once.
    ``resharded``: the reshards by node and target. ``propagated``: the origins that propagate gave a call's results.
    """

    program: Program
    plan: CutPlan
    holder: dict[Value, fx.Node] = field(default_factory=dict)
    resharded: dict[tuple[fx.Node, Sharding], fx.Node] = field(default_factory=dict)
    propagated: dict[fx.Node, tuple[Mapping[str, Origin], ...]] = field(default_factory=dict)

    def call(self, node: fx.Node) -> None:
        """Bring the operands of a call to the plan's shardings, and set those of its results."""
        program, op, reasons = self.program, self.plan.ops[node], OpReasons(self.plan, node)
        given, new = operands(node), list[fx.Node | None]()
        for i, (value, target) in enumerate(zip(given, op.operands, strict=True)):
            new.append(self._operand(value, target, node, i, reasons) if value and target else value)
        if any(one is not other for one, other in zip(new, given, strict=True)):
            set_operands(node, new)
        program.set_cut_choice(node, op)
        self.propagated[node] = program.origins(node)
        program.set_origins(node, reasons.result_origins())
        program.set_sharding(node, op.results if program.has_many(node) else op.results[0])
        ring = ring_of(node)
        if ring.steps if ring else node.target in EXCHANGES and moves_rows(node.args[3]):  # type: ignore[arg-type]
            moved = goes_round(node)[0] if ring else operand(node)
            type_, sharding = program.value_type(program.value(moved)), program.sharding(moved)
            ends = endpoint(program, moved), type_, sharding, endpoint(program, node)
            origin = program.origin(node)
            cause = RoundOfKeys(*ends, origin, ring.steps) if ring else NeighbourEdges(*ends, origin)
            program.set_causes(node, (cause,))

    def _operand(self, value: fx.Node, target: Sharding, user: fx.Node, index: int, reasons: OpReasons) -> fx.Node:
        """The node that holds a value in the sharding that its user needs."""
        source = self.holder[self.program.value(value)]
        current = self.program.sharding(source)
        if current != target and (source, target) not in self.resharded:
            with self.program.graph.inserting_before(user):
                why = self._change(source, target, endpoint(self.program, user), reasons.needs(index, current), index)
                self.resharded[source, target] = insert_reshard(self.program, source, target, source, why)
        return source if current == target else self.resharded[source, target]

    def _change(
        self, node: fx.Node, target: Sharding, user: Endpoint, needs: tuple[Need, ...], index: int | None = None
    ) -> ShardingChange:
        program = self.program
        type_, current = program.value_type(program.value(node)), program.sharding(node)
        return ShardingChange(endpoint(program, node), type_, current, user, target, index, program.origin(node), needs)

    def reduce(self, node: fx.Node) -> None:
        """Reduce a value right after it is made, if its partial sum is not carried on."""
        program, value = self.program, self.program.value(node)
        current, target = program.sharding(node), self.plan.arrivals.shardings[value]
        self.holder[value] = node
        if current != target:
            kind: NeedKind = "readers" if len(node.users) > 1 else "sum"
            reasons = needs(
                current, target, lambda axis, dim: Need(axis, kind if dim is None else "fewest", dim),
                self.propagated[value[0]][value[1]].get,
            )  # fmt: skip
            why = self._change(node, target, endpoint(program, min(node.users)), reasons)
            with program.graph.inserting_after(node):
                self.holder[value] = insert_reshard(program, node, target, node, why)

    def result(self, result: fx.Node, target: Sharding, output: Output, owner: fx.Node | None) -> fx.Node:
        """A result of the program in its target sharding, resharded as soon as it is computed.

        The axes of a gradient or buffer have the origins of its owner, those of other results the propagated origins.
        """
        program = self.program
        source = self.holder[program.value(result)]
        current, (producer, index) = program.sharding(source), program.value(result if owner is None else source)
        if current != target and (source, target) not in self.resharded:
            end = Endpoint(f"the {output.kind} {output.name}")
            text = next((pin.text for pin in program.pins if (pin.kind, pin.name) == ("output", output.name)), "")
            if owner is None:
                origins = self.propagated.get(producer, program.origins(producer))[index]
            else:
                known = program.origin(owner).items()
                origins = {axis: origin.through(end.name, (producer.name, index)) for axis, origin in known}
            reasons = needs(
                current, target, lambda axis, dim: Need(axis, "sum" if dim is None else "end", dim, None, text),
                origins.get,
            )  # fmt: skip
            with program.graph.inserting_after(source):
                why = self._change(source, target, end, reasons)
                self.resharded[source, target] = insert_reshard(program, source, target, source, why)
        return source if current == target else self.resharded[source, target]


Tensor = tuple[Value, Dims, Sharding]  # of an op: a value, its factors and its sharding


class OpReasons:
    """The reasons for one op's reshards. Make it before the op's shardings in the program become the plan's."""

    def __init__(self, plan: CutPlan, node: fx.Node) -> None:
        self.program, self.node, self.rule = plan.program, node, plan.program.rule(node)
        self.op, self.propagated = plan.ops[node], plan.program.shardings(node)
        self.values = plan.program.operand_values(node)
        self.arriving = [None if value is None else plan.arrivals.sharding(node, value) for value in self.values]

    def result_origins(self) -> tuple[Mapping[str, Origin], ...]:
        """For each result, the origin of each axis that cuts it or over which a sum is open.

        An axis that cuts the dim it was propagated to keeps its propagated origin.
        """
        origins: list[Mapping[str, Origin]] = []
        for i, (result, known) in enumerate(zip(self.op.results, self.program.origins(self.node), strict=True)):
            propagated, new = self.propagated[i], dict[str, Origin]()
            if result is None:
                origins.append(new)
                continue
            if result == propagated and all(part.name in known for part in result.cut_axes):
                origins.append(known)
                continue
            for part in result.partial_axes:
                new |= self._through(part.name, i, is_sum=True)
            for part in result.cut_axes:
                is_same = propagated is not None and dim_of(propagated, part.name) == dim_of(result, part.name)
                if not (is_same and part.name in known):
                    new |= self._through(part.name, i, is_sum=False)
            origins.append(new | {**known, **new})
        return tuple(origins)

    def _through(self, axis: str, index: int, is_sum: bool) -> dict[str, Origin]:
        """The origin of an axis on a result; if the op adds several open sums, with the others' origins as addends."""
        claims = self._claims(axis, of_operands=is_sum)
        if not claims:
            return {}
        value = (self.node.name, index)
        first = claims[0][0].through(self.node.name, value)
        others = (origin.through(self.node.name, value) for origin, is_open in claims[1:] if is_sum and is_open)
        beside = {each.annotation: each for each in others if each.annotation != first.annotation}
        return {axis: replace(first, addends=tuple(beside.values()))}

    def needs(self, index: int, current: Sharding) -> tuple[Need, ...]:
        """Why an operand may not stay in its current sharding, for each axis that changes."""
        target, value = self.op.operands[index], self.values[index]
        assert target is not None and value is not None

        def origin(axis: str) -> Origin | None:
            known = self._origin(axis)
            return known and known.through(self.node.name, (value[0].name, value[1]))

        return needs(current, target, lambda axis, dim: self._need(index, current, axis, dim), origin)

    def _need(self, index: int, current: Sharding, axis: str, dim: int | None) -> Need:
        """Why an axis may not stay on a dim of an operand, or a sum open."""
        if dim is None:
            return Need(axis, "sum")
        if is_annotation(self.node):
            pins = (pin.text for pin in self.program.pins if (pin.kind, pin.name) == ("value", self.node.name))
            return Need(axis, "placed", dim, stated=next(pins, ""))
        dims = self.rule.operands[index]
        factors = () if dims is None else dims[dim]
        if self.rule.is_fallback:
            return Need(axis, "fallback", dim)
        if not factors or set(factors) & self.rule.whole:
            return Need(axis, "whole", dim)
        rival = self._origin(axis) if self._cuts.get(axis, set()) - set(factors) else None
        if rival is not None:
            return Need(axis, "taken", dim, rival)
        is_fit = all(self.rule.may_cut(factor, current.dims[dim]) for factor in factors)
        return Need(axis, "fewest" if is_fit else "unfit", dim)

    @cached_property
    def _cuts(self) -> Mapping[str, set[str]]:
        """The factors that each axis cuts in the plan."""
        factors: dict[str, set[str]] = {}
        for _, cuts in self._factor_cuts(self.op.operands, self.op.results):
            for factor, cut in cuts.items():
                for part in cut.all_axes:
                    factors.setdefault(part.name, set()).add(factor)
        return factors

    def _origin(self, axis: str) -> Origin | None:
        """The origin of an axis on the factor that it cuts."""
        return next((origin for origin, _ in self._claims(axis)), None)

    def _claims(self, axis: str, of_operands: bool = False) -> list[tuple[Origin, bool]]:
        """The origins of the axis on the op's tensors that have the factor it cuts, the lowest rank first.

        Each comes with whether a sum is open there. Results count as propagated, and not at all with ``of_operands``.
        """
        claims = []
        for (value, _, sharding), cuts in self._factor_cuts(self.arriving, () if of_operands else self.propagated):
            origin = self.program.origins(value[0])[value[1]].get(axis)
            is_open = axis in _names(sharding.partial_axes)
            factors = self._cuts.get(axis, set()) & cuts.keys()
            if origin is not None and (is_open or any(axis in _names(cuts[factor].all_axes) for factor in factors)):
                claims.append((origin, is_open))
        return sorted(claims, key=lambda claim: claim[0].rank)

    def _factor_cuts(
        self, operands: Iterable[Sharding | None], results: Iterable[Sharding | None]
    ) -> Iterator[tuple[Tensor, dict[str, DimSharding]]]:
        """The op's tensors in these shardings, and the cut of each factor in each."""
        tensors = [*zip(self.values, self.rule.operands, operands, strict=True)]
        tensors += (((self.node, i), *pair) for i, pair in enumerate(zip(self.rule.results, results, strict=False)))
        for value, dims, sharding in tensors:
            if value is not None and dims is not None and sharding is not None:
                shape = self.program.value_type(value).shape
                yield (value, dims, sharding), factor_cuts(dims, sharding.dims, shape, self.rule.sizes)


def _names(parts: Iterable[AxisPart]) -> set[str]:
    return {part.name for part in parts}


def needs(
    src: Sharding,
    dst: Sharding,
    reason: Callable[[str, int | None], Need],
    origin: Callable[[str], Origin | None],
) -> tuple[Need, ...]:
    """For each axis in which two shardings differ: why it may not stay on its dim, and the origin of a new cut."""
    gone = [
        reason(part.name, dim_of(src, part.name))
        for part in src.used_parts
        if dim_of(src, part.name) != dim_of(dst, part.name) or part in src.partial_axes
        if part not in dst.partial_axes
    ]
    new = [
        Need(part.name, "cut", dim_of(dst, part.name), origin(part.name))
        for part in dst.cut_axes
        if dim_of(src, part.name) != dim_of(dst, part.name)
    ]
    return tuple({(need.axis, need.kind): need for need in (*gone, *new)}.values())


def dim_of(sharding: Sharding, axis: str) -> int | None:
    """The dim that an axis cuts; None if it cuts none."""
    return next((i for i, cut in enumerate(sharding.dims) if axis in _names(cut.all_axes)), None)
