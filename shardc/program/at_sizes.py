"""A program at other sizes: numbers that follow from the sizes of inputs take the values that they have there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from shardc.language.mesh import Mesh
from shardc.language.size import Sizes, Symbolic, value_at
from shardc.program.program import Program
from shardc.program.provenance import Origin, Source

BOUND = ("rule", "is_fallback", "checked")  # facts of a call that follow from its sizes
WITHOUT_SIZES = (type, Mesh, Origin, Source)


class AtSizes:
    """Gives values of any kind with numbers in place of what follows from sizes; others are given back themselves."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity: a value, which is kept alive, and what it is here

    def program(self, program: Program) -> Program:
        """A copy of a program, whose rules are not bound yet."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in program.graph.nodes:
            new = copies[node] = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
            new.args, new.kwargs = fx.map_arg((self(node.args), self(node.kwargs)), copies.__getitem__)
            new.meta.update({key: self(fact) for key, fact in node.meta.items() if key not in BOUND})
        given = {each.name: self(getattr(program, each.name)) for each in fields(program) if each.init}
        return Program(**given | {"graph": graph})

    def __call__(self, value: Any) -> Any:
        """A value here."""
        if isinstance(value, Symbolic):
            return value_at(value, self._sizes)
        if type(value) in (tuple, list, immutable_list):
            return self._once(value, lambda: self._mapped(value))
        if type(value) in (dict, immutable_dict):
            return self._once(value, lambda: {self(key): self(entry) for key, entry in value.items()})
        if is_dataclass(value) and not isinstance(value, WITHOUT_SIZES):
            return self._once(value, lambda: self._replaced(value))
        return value

    def _mapped(self, value: Any) -> Any:
        """A tuple or list with its entries as they are here."""
        entries = [self(entry) for entry in value]
        is_same = all(entry is before for entry, before in zip(entries, value, strict=True))
        return value if is_same else type(value)(entries)

    def _once(self, value: Any, make: Callable[[], Any]) -> Any:
        if id(value) not in self._known:
            self._known[id(value)] = value, make()
        return self._known[id(value)][1]

    def _replaced(self, value: Any) -> Any:
        """A dataclass with its fields as they are here."""
        before = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        after = {name: self(entry) for name, entry in before.items()}
        changed = {name: entry for name, entry in after.items() if entry is not before[name]}
        return replace(value, **changed) if changed else value


def is_same_program(one: Program, other: Program) -> bool:
    """Whether two programs compute and send the same, node by node, whatever the names of nodes are."""
    if (one.inputs, one.outputs) != (other.inputs, other.outputs):
        return False
    return _described(one) == _described(other)


def _described(program: Program) -> list[Any]:
    places = {node: f"%{i}" for i, node in enumerate(program.graph.nodes)}
    return [
        (node.op, node.target if node.op == "call_function" else "", fx.map_arg((node.args, node.kwargs), places.get),
         program.types(node), program.shardings(node))
        for node in places
    ]  # fmt: skip
