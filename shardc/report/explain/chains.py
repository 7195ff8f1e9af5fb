"""The chain from an annotation to a value: each value that an axis came through, and the op that led there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from torch import fx

from shardc.program.collective import COLLECTIVES
from shardc.program.node import is_getitem
from shardc.program.program import Program
from shardc.program.provenance import Origin
from shardc.program.text import op_names, type_text, value_names
from shardc.report.explain.explanation import Chain, Role, Step


class Chains:
    """The chains of one program. ``names``: what nodes are called in print; ``nodes``: them by their own names.

    A chain that was recorded in an early pass may name a node in whose place another stands by now.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = value_names(program)
        self.nodes = {node.name: node for node in program.graph.nodes if node.op != "output"}
        former = ((name, node) for node in program.graph.nodes for name in program.former_names(node))
        self._known = {**dict(reversed(list(former))), **self.nodes}
        self._called = op_names(program)
        self._steps: dict[tuple[int, str], Step] = {}

    def standing(self, name: str) -> fx.Node | None:
        """The node of a name, or that which stands in the place of one that is gone; None where there was none."""
        return self._known.get(name)

    def of(self, node: fx.Node) -> Iterator[Chain]:
        """One for each axis that cuts a node's value, or over which a sum is open."""
        producer, index = self.program.value(node)
        indices = range(len(self.program.types(node))) if producer is node else [index]
        shardings, origins = self.program.shardings(producer), self.program.origins(producer)
        found: dict[str, Chain] = {}
        for i in indices if shardings else ():
            sharding = shardings[i]
            for part in () if sharding is None else (*sharding.partial_axes, *sharding.cut_axes):
                if part.name in origins[i]:
                    found.setdefault(part.name, self.chain(part.name, origins[i][part.name], node))
                    for other in origins[i][part.name].further_annotations:
                        found.setdefault(other.annotation, self.chain(part.name, other))
        yield from found.values()

    def chain(self, axis: str, origin: Origin, to: fx.Node | None = None) -> Chain:
        """How an axis came to where its origin says, and from there to a node that holds the same, or is made of it."""
        steps = list(map(self._step, origin.chain, repeat(axis)))
        if to is not None and steps[-1].value != self.names[to] and self.program.value(to)[0].name != origin.value[0]:
            steps.append(self._last(to, origin))
        return Chain(axis, origin.annotation, tuple(steps))

    def _step(self, origin: Origin, axis: str) -> Step:
        """A step of a chain; many chains share their first ones."""
        key = id(origin), axis
        if key not in self._steps:
            self._steps[key] = self._made_step(origin, axis)
        return self._steps[key]

    def _made_step(self, origin: Origin, axis: str) -> Step:
        holder, via = self._holder(*origin.value), self._known.get(origin.via)
        value = origin.value[0] if holder is None else self.names[holder]
        type_ = "" if holder is None else type_text(self.program, holder)
        if origin.previous is None:
            return Step(value, type_, "annotated")
        if via is None:
            return Step(value, type_, "tied" if " " in origin.via else "read", origin.via)
        role = self._role(holder, axis, origin.value[0] == origin.via)
        if role == "summed" and self._is_open(self._holder(*origin.previous.value), axis):
            role = "made"  # of a sum that was open already
        return self._by(via, Step(value, type_, role))

    def _is_open(self, node: fx.Node | None, axis: str) -> bool:
        """Whether a sum over an axis is open in a value."""
        if node is None or self.program.has_many(node):
            return False
        return axis in {part.name for part in self.program.sharding(node).partial_axes}

    def _role(self, holder: fx.Node | None, axis: str, is_result: bool) -> Role:
        """What an op has to do with one of its tensors that an axis came to."""
        sharding = None if holder is None or self.program.has_many(holder) else self.program.sharding(holder)
        is_cut = sharding is None or axis in {part.name for part in sharding.cut_axes}
        if is_result:
            return "made" if is_cut else "summed" if self._is_open(holder, axis) else "passed"
        return "read" if is_cut else "wanted"

    def _last(self, node: fx.Node, origin: Origin) -> Step:
        before, maker = self._known.get(origin.value[0]), self.program.value(node)[0]
        is_sent = maker.target in COLLECTIVES or bool(self.program.causes(maker))  # a view in a reshard has causes too
        is_same = before is not None and before.target == maker.target and maker.op == "call_function"
        role: Role = "moved" if is_sent else "repeated" if is_same else "made"
        return self._by(maker, Step(self.names[node], type_text(self.program, node), role))

    def _by(self, node: fx.Node, step: Step) -> Step:
        source = self.program.source(node)
        op = self.op(node)
        return Step(step.value, step.type, step.role, op, node.name, source.module, source.location)

    def op(self, node: fx.Node) -> str:
        """What a node calls, as the dump says it."""
        return self._called.get(node.target, "")

    def _holder(self, name: str, index: int) -> fx.Node | None:
        """The node that the dump prints for a value."""
        node = self._known.get(name)
        if node is None or not self.program.has_many(node):
            return node
        return next((user for user in node.users if is_getitem(user) and user.args[1] == index), node)
