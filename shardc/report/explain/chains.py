"""Chains from annotations to the values of a program, by the origins that propagation recorded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from shardc.program.collective import COLLECTIVES
from shardc.program.node import is_getitem
from shardc.program.program import Program
from shardc.program.provenance import Origin
from shardc.program.text import op_names, type_text, value_names
from shardc.report.explain.explanation import Chain, ChainStep, Role, Side


class Chains:
    """The chains of one program, from the origins that propagation recorded at its values.

    ``names``: the printed name of each node; ``nodes``: the nodes by their own names. A chain that an early pass
    recorded may name a node that another node has replaced since.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = value_names(program)
        self.nodes = {node.name: node for node in program.graph.nodes if node.op != "output"}
        former = ((name, node) for node in program.graph.nodes for name in program.former_names(node))
        self._known = {**dict(reversed(list(former))), **self.nodes}
        self._ops = op_names(program)
        self._steps: dict[tuple[int, str], ChainStep] = {}  # chains share their first steps

    def node(self, name: str) -> fx.Node | None:
        """The node of a name, or the node that replaced it; None if there was none."""
        return self._known.get(name)

    def op(self, node: fx.Node) -> str:
        """The op that a node calls, as the dump prints it."""
        return self._ops.get(node.target, "")

    def side(self, node: fx.Node) -> Side:
        """A node as the producer of a collective's operand."""
        source = self.program.source(node)
        type_ = type_text(self.program, node)
        return Side(self.names[node], type_, self.op(node), None, source.module, source.location)

    def of(self, node: fx.Node) -> Iterator[Chain]:
        """One chain for each axis that cuts a node's value, or over which a sum is open."""
        producer, index = self.program.value(node)
        indices = range(len(self.program.types(node))) if producer is node else [index]
        shardings, origins = self.program.shardings(producer), self.program.origins(producer)
        chains: dict[str, Chain] = {}
        for i in indices if shardings else ():
            sharding = shardings[i]
            for part in () if sharding is None else (*sharding.partial_axes, *sharding.cut_axes):
                if part.name in origins[i]:
                    chains.setdefault(part.name, self.chain(part.name, origins[i][part.name], node))
                    for other in origins[i][part.name].further_annotations:
                        chains.setdefault(other.annotation, self.chain(part.name, other))
        yield from chains.values()

    def chain(self, axis: str, origin: Origin, to: fx.Node | None = None) -> Chain:
        """The chain to the value of an origin, and on to the node ``to``, which holds or reshards that value."""
        steps = [self._step(each, axis) for each in origin.chain]
        if to is not None and steps[-1].value != self.names[to]:
            before, call = self._known.get(origin.value[0]), self.program.value(to)[0]
            is_reshard = call.target in COLLECTIVES or bool(self.program.causes(call))  # also a view in a reshard
            is_same_op = before is not None and before.target == call.target and call.op == "call_function"
            role: Role = "moved" if is_reshard else "repeated" if is_same_op else "made"
            if call.name != origin.value[0]:
                steps.append(self._step_through(call, self.names[to], type_text(self.program, to), role))
        return Chain(axis, origin.annotation, tuple(steps))

    def _step(self, origin: Origin, axis: str) -> ChainStep:
        key = id(origin), axis
        if key not in self._steps:
            self._steps[key] = self._new_step(origin, axis)
        return self._steps[key]

    def _new_step(self, origin: Origin, axis: str) -> ChainStep:
        holder, via = self._printed_node(*origin.value), self._known.get(origin.via)
        value = origin.value[0] if holder is None else self.names[holder]
        type_ = "" if holder is None else type_text(self.program, holder)
        if origin.previous is None:
            return ChainStep(value, type_, "annotated")
        if via is None:
            return ChainStep(value, type_, "tied" if " " in origin.via else "read", origin.via)
        sharding = None if holder is None or self.program.has_many(holder) else self.program.sharding(holder)
        is_cut = sharding is None or axis in {part.name for part in sharding.cut_axes}
        if origin.value[0] != origin.via:  # an operand of the op
            role: Role = "read" if is_cut else "wanted"
        elif is_cut or not self._is_open(holder, axis):
            role = "made" if is_cut else "passed"
        else:  # a sum that was open already is passed on
            role = "made" if self._is_open(self._printed_node(*origin.previous.value), axis) else "summed"
        return self._step_through(via, value, type_, role)

    def _is_open(self, node: fx.Node | None, axis: str) -> bool:
        """Whether a sum over an axis is open in a node's value."""
        if node is None or self.program.has_many(node):
            return False
        return axis in {part.name for part in self.program.sharding(node).partial_axes}

    def _step_through(self, node: fx.Node, value: str, type_: str, role: Role) -> ChainStep:
        source = self.program.source(node)
        return ChainStep(value, type_, role, self.op(node), node.name, source.module, source.location)

    def _printed_node(self, name: str, index: int) -> fx.Node | None:
        """The node that the dump prints for one result of a node."""
        node = self._known.get(name)
        if node is None or not self.program.has_many(node):
            return node
        return next((user for user in node.users if is_getitem(user) and user.args[1] == index), node)
