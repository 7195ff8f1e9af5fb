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

from dataclasses import dataclass, field

from torch import fx

from shardc.collective import EXCHANGES, reshard
from shardc.fact import Origin
from shardc.node import is_getitem, operand, operands, set_operands
from shardc.program import Program, Value
from shardc.sharding import Sharding
from shardc.window import moves_rows

from .choose_cuts import Plan
from .choose_sides import cheapest_plan


def insert_reshards(program: Program) -> Program:
    """The program with a reshard between every producer and consumer that differ."""
    program = program.copy(level="agreed")
    _Rewriter(program, cheapest_plan(program)).run()
    return program


@dataclass(slots=True)
class _Rewriter:
    """Inserts the reshards of a plan. ``holder``: the node that holds a value now, where its sum is reduced at once."""

    program: Program
    plan: Plan
    holder: dict[Value, fx.Node] = field(default_factory=dict)
    done: dict[tuple[fx.Node, Sharding], fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        for node in list(self.program.graph.nodes):
            if node.op == "output":
                self._output(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._operands(node)
                made = self.plan.made[node]
                self.program.set_sharding(node, made if self.program.has_many(node) else made[0])
                self._explain_partial(node)
                if node.target in EXCHANGES and moves_rows(node.args[3]):
                    self._explain_exchange(node)
            if node.op != "output" and not self.program.has_many(node):
                self._reduce(node)

    def _explain_partial(self, node: fx.Node) -> None:
        """A sum is open over an axis because an operand was cut by it, or was such a sum."""
        came: dict[str, Origin] = {}
        for taken in filter(None, operands(node)):
            for axis, origin in self.program.origin(taken).items():
                came.setdefault(axis, origin)
        results = enumerate(zip(self.plan.made[node], self.program.origins(node), strict=True))
        self.program.set_origins(
            node,
            tuple(
                {
                    part.name: came[part.name].through(node.name, (node.name, i))
                    for part in made.partial_axes
                    if part.name in came
                }
                | dict(known)
                if made
                else {}
                for i, (made, known) in results
            ),
        )

    def _explain_exchange(self, node: fx.Node) -> None:
        """Neighbours' edges are needed because the dim is cut."""
        moved = operand(node)
        lies = self.program.sharding(moved).text(self.program.value_type(self.program.value(moved)))
        why = f"{_name(self.program, moved)} is {lies}, {_name(self.program, node)} reach into neighbours' chunks"
        self.program.set_cause(node, "; ".join([why, *_origins(self.program, node)]))

    def _operands(self, node: fx.Node) -> None:
        new = [
            taken if taken is None or wanted is None else self._resharded(taken, wanted, node)
            for taken, wanted in zip(operands(node), self.plan.wanted[node], strict=True)
        ]
        set_operands(node, new)

    def _reduce(self, node: fx.Node) -> None:
        """Right after a value whose sum may not ride on, its reduction."""
        value = self.program.value(node)
        lies = self.plan.lies[value]
        self.holder[value] = node
        if self.program.sharding(node) != lies:
            with self.program.graph.inserting_after(node):
                self.holder[value] = self._insert(node, lies, _name(self.program, next(iter(node.users))))

    def _resharded(self, taken: fx.Node, wanted: Sharding, user: fx.Node) -> fx.Node:
        held = self.holder[self.program.value(taken)]
        if self.program.sharding(held) == wanted:
            return held
        if (held, wanted) not in self.done:
            with self.program.graph.inserting_before(user):
                self.done[held, wanted] = self._insert(held, wanted, _name(self.program, user))
        return self.done[held, wanted]

    def _insert(self, node: fx.Node, wanted: Sharding, user: str) -> fx.Node:
        """A reshard of the node for a user."""
        type_ = self.program.value_type(self.program.value(node))
        lies = self.program.sharding(node)
        why = f"{_name(self.program, node)} is {lies.text(type_)}, {user} wants {wanted.text(type_)}"
        return inserted(self.program, node, wanted, node, "; ".join([why, *_origins(self.program, node)]))

    def _output(self, node: fx.Node) -> None:
        ends = zip(self.program.outputs, self.program.results, self.plan.returned(), strict=True)
        results = [
            self._result(result, wanted, f"the {output.kind} {output.name}") if result and wanted else None
            for output, result, wanted in ends
        ]
        node.args = (tuple(results),)

    def _result(self, result: fx.Node, wanted: Sharding, what: str) -> fx.Node:
        """What the program returns, resharded as soon as it is known."""
        held = self.holder[self.program.value(result)]
        if self.program.sharding(held) == wanted:
            return held
        if (held, wanted) not in self.done:
            with self.program.graph.inserting_after(held):
                self.done[held, wanted] = self._insert(held, wanted, what)
        return self.done[held, wanted]


def inserted(program: Program, node: fx.Node, wanted: Sharding, like: fx.Node, why: str) -> fx.Node:
    """A reshard of a node's value, with the source of ``like``, put at the graph's insertion point."""
    new = program.insert(reshard, (node,), program.value_type(program.value(node)), like)
    program.set_sharding(new, wanted)
    program.set_origins(new, (program.origin(node),))
    program.set_cause(new, why)
    return new


def _name(program: Program, node: fx.Node) -> str:
    module = program.source(node).module
    return f"{node.name} ({module})" if module else node.name


def _origins(program: Program, node: fx.Node) -> list[str]:
    """Which annotation each axis of a value came from."""
    return [f"{axis} from {origin.annotation}" for axis, origin in program.origin(node).items()]
