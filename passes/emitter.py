"""Insert the calls that a node is taken apart into; and when to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.node import arguments
from shardc.program import Program
from shardc.sharding import TensorType


@dataclass(frozen=True, slots=True)
class Emitter:
    """``op(...)`` inserts a call in place of a node; ``given`` are the node's arguments."""

    program: Program
    node: fx.Node

    @property
    def given(self) -> dict[str, Any]:
        """The node's arguments by name, defaults included."""
        return arguments(self.node)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call."""
        return self.program.emit(op, *args, like=self.node, **kwargs)

    def results(self, node: fx.Node) -> list[fx.Node | None]:
        """The results of a call that has several, None for what is none."""
        return [None if type_ is None else self._item(node, i) for i, type_ in enumerate(self.program.types(node))]

    def type(self, node: fx.Node) -> TensorType:
        """The type of a value."""
        return self.program.value_type(self.program.value(node))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a value."""
        return self.type(node).shape

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        type_ = self.program.types(node)[index]
        return self.program.insert(operator.getitem, (node, index), type_, self.node, name="getitem")


Form = Callable[[Emitter], fx.Node | list[fx.Node | None]]  # emits what stands in an op's place
NEVER = 2**63  # more bytes than anything


@dataclass(frozen=True, slots=True)
class Decomposition:
    """How an op is taken apart, and the bytes that its reductions move, in whole tensors.

    ``moved(program, node, factors)``: these are whole in the op as it is, and arrive cut.
    """

    expand: Form
    moved: Callable[[Program, fx.Node, Collection[str]], int]
