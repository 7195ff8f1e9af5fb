"""insert_reshards: annotated -> agreed. A visible reshard wherever what a value has is not what an op wants.

Each op gives its axes to its factors, so that one axis cuts one factor on all of its tensors; an operand that lies
otherwise is resharded, and a result over whose cut factors nothing was summed yet is partial::

    y: f32[8@dp, 64] = dot(x, w, "a b, b c -> a c")      # x: f32[8@dp, 256@tp], w: f32[256@tp, 64]
        ->
    y: f32[8@dp, 64]{sum tp} = dot(x, w, "a b, b c -> a c")
    r: f32[8@dp, 64] = reshard(y)

A partial sum is not reduced where it is made but where an op needs it, if every op up to there is linear in it, none
makes it larger, and no value on the way has a second user.

Invariants: every operand of every op lies as its factors are cut; only a reshard changes a sharding; a value is
resharded to one target once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from shardc.language.cut import factor_cuts
from shardc.language.rule import Dims
from shardc.language.sharding import DimSharding, Sharding
from shardc.language.windows import moves_rows
from shardc.program.collective import EXCHANGES, reshard
from shardc.program.node import is_annotation, is_getitem, operand, operands, set_operands
from shardc.program.program import Output, Program, Value, ends_of
from shardc.program.provenance import Cause, Endpoint, Need, NeedKind, NeighbourEdges, Origin, ShardingChange
from shardc.program.text import value_name

from .choose_cuts import Plan
from .choose_sides import cheapest_plan


def insert_reshards(program: Program) -> Program:
    """The program with a reshard between every producer and consumer that differ."""
    program = program.copy(level="agreed")
    _Rewriter(program, cheapest_plan(program)).run()
    return program


@dataclass(slots=True)
class _Rewriter:
    """Inserts the reshards of a plan. ``holder``: the node that holds a value now, where its sum is reduced at once.

    ``wished``: where propagate had the axes of a call's results come from.
    """

    program: Program
    plan: Plan
    holder: dict[Value, fx.Node] = field(default_factory=dict)
    done: dict[tuple[fx.Node, Sharding], fx.Node] = field(default_factory=dict)
    wished: dict[fx.Node, tuple[Mapping[str, Origin], ...]] = field(default_factory=dict)

    def run(self) -> None:
        for node in list(self.program.graph.nodes):
            if node.op == "output":
                self._output(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._call(node)
            if node.op != "output" and not self.program.has_many(node):
                self._reduce(node)

    def _call(self, node: fx.Node) -> None:
        origins = OpOrigins(self.program, self.plan, node)
        self._operands(node, origins)
        made = self.plan.made[node]
        self.program.set_sharding(node, made if self.program.has_many(node) else made[0])
        self.wished[node] = self.program.origins(node)
        self.program.set_origins(node, origins.results())
        if node.target in EXCHANGES and moves_rows(node.args[3]):  # type: ignore[arg-type]
            self._explain_exchange(node)

    def _explain_exchange(self, node: fx.Node) -> None:
        """Neighbours' edges are needed because the dim is cut."""
        moved = operand(node)
        type_ = self.program.value_type(self.program.value(moved))
        ends = place(self.program, moved), type_, self.program.sharding(moved), place(self.program, node)
        self.program.set_causes(node, (NeighbourEdges(*ends, self.program.origin(node)),))

    def _operands(self, node: fx.Node, origins: OpOrigins) -> None:
        new = [
            taken if taken is None or wanted is None else self._resharded(taken, wanted, node, i, origins)
            for i, (taken, wanted) in enumerate(zip(operands(node), self.plan.wanted[node], strict=True))
        ]
        set_operands(node, new)

    def _reduce(self, node: fx.Node) -> None:
        """Right after a value whose sum may not ride on, its reduction."""
        value = self.program.value(node)
        lies = self.plan.lies[value]
        self.holder[value] = node
        if self.program.sharding(node) != lies:
            found = needs(
                self.program.sharding(node), lies, self._sum_needed(node), self.wished[value[0]][value[1]].get
            )
            with self.program.graph.inserting_after(node):
                self.holder[value] = self._insert(node, lies, place(self.program, next(iter(node.users))), found)

    def _sum_needed(self, node: fx.Node) -> Callable[[str, int | None], Need]:
        kind: NeedKind = "readers" if len(node.users) > 1 else "sum"
        return lambda axis, dim: Need(axis, kind if dim is None else "fewest", dim)

    def _resharded(self, taken: fx.Node, wanted: Sharding, user: fx.Node, index: int, origins: OpOrigins) -> fx.Node:
        held = self.holder[self.program.value(taken)]
        if self.program.sharding(held) == wanted:
            return held
        if (held, wanted) not in self.done:
            found = origins.needs(index, self.program.sharding(held))
            with self.program.graph.inserting_before(user):
                self.done[held, wanted] = self._insert(held, wanted, place(self.program, user), found, index)
        return self.done[held, wanted]

    def _insert(
        self, node: fx.Node, wanted: Sharding, user: Endpoint, found: tuple[Need, ...], operand: int | None = None
    ) -> fx.Node:
        """A reshard of the node for a user."""
        type_ = self.program.value_type(self.program.value(node))
        has, came = self.program.sharding(node), self.program.origin(node)
        why = ShardingChange(place(self.program, node), type_, has, user, wanted, operand, came, found)
        return inserted(self.program, node, wanted, node, why)

    def _output(self, node: fx.Node) -> None:
        results = [
            self._result(result, wanted, output, owner) if result and wanted else None
            for (output, owner, result), wanted in zip(ends_of(self.program), self.plan.returned(), strict=True)
        ]
        node.args = (tuple(results),)

    def _result(self, result: fx.Node, wanted: Sharding, output: Output, owner: fx.Node | None) -> fx.Node:
        """What the program returns, resharded as soon as it is known."""
        held = self.holder[self.program.value(result)]
        if self.program.sharding(held) == wanted:
            return held
        if (held, wanted) not in self.done:
            what = Endpoint(f"the {output.kind} {output.name}")
            asked = next((pin.text for pin in self.program.pins if (pin.kind, pin.name) == ("output", output.name)), "")
            came = self._of_owner(owner, what.name, held) if owner else self._wished(result)
            found = needs(
                self.program.sharding(held), wanted,
                lambda axis, dim: Need(axis, "sum" if dim is None else "end", dim, None, asked), came.get,
            )  # fmt: skip
            with self.program.graph.inserting_after(held):
                self.done[held, wanted] = self._insert(held, wanted, what, found)
        return self.done[held, wanted]

    def _of_owner(self, owner: fx.Node, what: str, node: fx.Node) -> Mapping[str, Origin]:
        """Where the axes of a gradient or a buffer come from, which lies as what it belongs to."""
        producer, index = self.program.value(node)
        value = (producer.name, index)
        return {axis: origin.through(what, value) for axis, origin in self.program.origin(owner).items()}

    def _wished(self, node: fx.Node) -> Mapping[str, Origin]:
        """Where propagate had the axes of a value come from."""
        producer, index = self.program.value(node)
        return self.wished.get(producer, self.program.origins(producer))[index]


def inserted(program: Program, node: fx.Node, wanted: Sharding, like: fx.Node, *causes: Cause) -> fx.Node:
    """A reshard of a node's value, with the source of ``like``, put at the graph's insertion point."""
    new = program.insert(reshard, (node,), program.value_type(program.value(node)), like)
    come = {
        need.axis: need.by
        for why in causes
        if isinstance(why, ShardingChange)
        for need in why.needs
        if need.kind == "cut" and need.by is not None
    }
    program.set_sharding(new, wanted)
    program.set_origins(new, ({**program.origin(node), **come},))
    program.set_causes(new, causes)
    return new


def place(program: Program, node: fx.Node) -> Endpoint:
    """What a node is called, an input by the user's name, and where it is in the user's model."""
    source = program.source(node)
    return Endpoint(value_name(program, node), source.module, source.location)


Tensor = tuple[Value, Dims, Sharding]  # of an op: a value, its factors and how it lies


class OpOrigins:
    """Of one op: which axes cut which of its factors, and where each of them came from."""

    def __init__(self, program: Program, plan: Plan, node: fx.Node) -> None:
        self.program, self.plan, self.node, self.rule = program, plan, node, program.rule(node)
        self.values = program.operand_values(node)

    @cached_property
    def cuts(self) -> Mapping[str, set[str]]:
        """The factors that each axis cuts."""
        tensors = [*self._operands(self.plan.wanted[self.node]), *self._results(self.plan.made[self.node])]
        found: dict[str, set[str]] = {}
        for _, cuts in self._cuts(tensors):
            for factor, cut in cuts.items():
                for part in cut.all_axes:
                    found.setdefault(part.name, set()).add(factor)
        return found

    def results(self) -> tuple[Mapping[str, Origin], ...]:
        """For each result, for each axis that cuts it or over which a sum is open, why."""
        return tuple(
            {} if made is None else (found := self._result(i, made, known)) | {**known, **found}
            for i, (made, known) in enumerate(
                zip(self.plan.made[self.node], self.program.origins(self.node), strict=True)
            )
        )

    def _result(self, index: int, made: Sharding, known: Mapping[str, Origin]) -> dict[str, Origin]:
        wished = self.plan.wished[self.node][index]
        found: dict[str, Origin] = {}
        for part in made.partial_axes:
            found.update(self._came(part.name, index, from_operands=True))
        for part in made.cut_axes:
            is_as_wished = wished is not None and dim_of(wished, part.name) == dim_of(made, part.name)
            if not (is_as_wished and part.name in known):
                found.update(self._came(part.name, index))
        return found

    def _came(self, axis: str, index: int, from_operands: bool = False) -> dict[str, Origin]:
        claims = self._claims(axis, from_operands)
        if not claims:
            return {}
        value = (self.node.name, index)
        first = claims[0][0].through(self.node.name, value)
        others = (origin.through(self.node.name, value) for origin, is_open in claims[1:] if from_operands and is_open)
        beside = {each.annotation: each for each in others if each.annotation != first.annotation}
        return {axis: replace(first, beside=tuple(beside.values()))}

    def origin(self, axis: str) -> Origin | None:
        """Where an axis came from to the factor that it cuts."""
        return next((origin for origin, _ in self._claims(axis)), None)

    def _claims(self, axis: str, from_operands: bool = False) -> list[tuple[Origin, bool]]:
        """Where an axis came from to the factor that it cuts, by who is heard first; and whether a sum is open there.

        A result's claim is what propagate wished of it. Where a sum only rides through, from what it is open on.
        """
        lies = self.plan.seen_by(self.node)
        taken = list(self._operands([None if value is None else lies(value) for value in self.values]))
        tensors = [*taken, *([] if from_operands else self._results(self.plan.wished[self.node]))]
        claims = [
            (origin, is_open)
            for (value, _, sharding), cuts in self._cuts(tensors)
            if (origin := self._of(value).get(axis)) is not None
            and ((is_open := axis in {part.name for part in sharding.partial_axes}) or self._cuts_alike(axis, cuts))
        ]
        return sorted(claims, key=lambda claim: claim[0].rank)

    def _cuts_alike(self, axis: str, cuts: Mapping[str, DimSharding]) -> bool:
        """Whether a tensor has the axis on a factor that it cuts in the op."""
        return any(axis in {part.name for part in cuts[f].all_axes} for f in self.cuts.get(axis, ()) if f in cuts)

    def _of(self, value: Value) -> Mapping[str, Origin]:
        return self.program.origins(value[0])[value[1]]

    def _cuts(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, dict[str, DimSharding]]]:
        for tensor in tensors:
            value, dims, sharding = tensor
            yield tensor, factor_cuts(dims, sharding.dims, self.program.value_type(value).shape, self.rule.sizes)

    def _operands(self, shardings: Iterable[Sharding | None]) -> Iterator[Tensor]:
        for value, dims, sharding in zip(self.values, self.rule.operands, shardings, strict=True):
            if value is not None and dims is not None and sharding is not None:
                yield value, dims, sharding

    def _results(self, shardings: Iterable[Sharding | None]) -> Iterator[Tensor]:
        for i, (dims, sharding) in enumerate(zip(self.rule.results, shardings, strict=True)):
            if dims is not None and sharding is not None:
                yield (self.node, i), dims, sharding

    def needs(self, index: int, has: Sharding) -> tuple[Need, ...]:
        """Why an operand that lies as ``has`` is wanted otherwise, for each axis that changes."""
        wanted = self.plan.wanted[self.node][index]
        assert wanted is not None
        value = self.values[index]
        assert value is not None

        def come(axis: str) -> Origin | None:
            origin = self.origin(axis)
            return origin and origin.through(self.node.name, (value[0].name, value[1]))

        return needs(has, wanted, lambda axis, dim: self._need(index, has, axis, dim), come)

    def _need(self, index: int, has: Sharding, axis: str, dim: int | None) -> Need:
        """Why an axis may not stay on a dim of an operand, or a sum open."""
        if dim is None:
            return Need(axis, "sum")
        if is_annotation(self.node):
            return Need(axis, "placed", dim, said=self._pin())
        kind = self._kind(index, has, axis, dim)
        return Need(axis, kind, dim, self._rival(index, axis, dim) if kind == "taken" else None)

    def _kind(self, index: int, has: Sharding, axis: str, dim: int) -> NeedKind:
        dims = self.rule.operands[index]
        if self.rule.is_fallback:
            return "fallback"
        if dims is None or not dims[dim] or set(dims[dim]) & self.rule.whole:
            return "whole"
        if self._rival(index, axis, dim) is not None:
            return "taken"
        return "fewest" if all(self.rule.may_cut(factor, has.dims[dim]) for factor in dims[dim]) else "unfit"

    def _rival(self, index: int, axis: str, dim: int) -> Origin | None:
        """Where an axis came from to another factor than those of a dim of an operand."""
        dims = self.rule.operands[index]
        own = set(dims[dim]) if dims is not None else set()
        return self.origin(axis) if self.cuts.get(axis, set()) - own else None

    def _pin(self) -> str:
        return next((pin.text for pin in self.program.pins if (pin.kind, pin.name) == ("value", self.node.name)), "")


def needs(
    has: Sharding,
    wanted: Sharding,
    why: Callable[[str, int | None], Need],
    origin: Callable[[str], Origin | None],
) -> tuple[Need, ...]:
    """For each axis over which two shardings differ: ``why`` it may not stay on its dim, or where it comes from."""
    gone = [
        why(part.name, dim_of(has, part.name))
        for part in has.used_parts
        if dim_of(has, part.name) != dim_of(wanted, part.name) or part in has.partial_axes
        if part not in wanted.partial_axes
    ]
    come = [
        Need(part.name, "cut", dim_of(wanted, part.name), origin(part.name))
        for part in wanted.cut_axes
        if dim_of(has, part.name) != dim_of(wanted, part.name)
    ]
    return tuple({(need.axis, need.kind): need for need in (*gone, *come)}.values())


def dim_of(sharding: Sharding, axis: str) -> int | None:
    """The dim that an axis cuts; None where it cuts none."""
    return next((i for i, cut in enumerate(sharding.dims) if axis in {part.name for part in cut.all_axes}), None)
