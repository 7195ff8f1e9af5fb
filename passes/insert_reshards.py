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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from shardc.cause import Cause, Edges, Moved, Need, NeedKind, Place
from shardc.collective import EXCHANGES, reshard
from shardc.ends import ends_of
from shardc.fact import Origin, Output
from shardc.node import is_getitem, operand, operands, set_operands
from shardc.program import Program, Value
from shardc.sharding import Sharding
from shardc.text import value_name
from shardc.window import moves_rows

from .choose_cuts import Plan
from .choose_sides import cheapest_plan
from .trace_origins import OpOrigins, needs


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
        self.program.set_causes(node, (Edges(*ends, self.program.origin(node)),))

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
        self, node: fx.Node, wanted: Sharding, user: Place, found: tuple[Need, ...], operand: int | None = None
    ) -> fx.Node:
        """A reshard of the node for a user."""
        type_ = self.program.value_type(self.program.value(node))
        has, came = self.program.sharding(node), self.program.origin(node)
        why = Moved(place(self.program, node), type_, has, user, wanted, operand, came, found)
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
            what = Place(f"the {output.kind} {output.name}")
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
        if isinstance(why, Moved)
        for need in why.needs
        if need.kind == "cut" and need.by is not None
    }
    program.set_sharding(new, wanted)
    program.set_origins(new, ({**program.origin(node), **come},))
    program.set_causes(new, causes)
    return new


def place(program: Program, node: fx.Node) -> Place:
    """What a node is called, an input by the user's name, and where it is in the user's model."""
    source = program.source(node)
    return Place(value_name(program, node), source.module, source.location)
