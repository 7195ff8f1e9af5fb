"""Insert the calls that replace a node, and describe how an op is decomposed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.language.sharding import TensorType
from shardc.ops.reduction import wide_dtype
from shardc.program.node import arguments
from shardc.program.program import Program

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Emitter:
    """``emit(op, ...)`` inserts a call in place of a node; ``given``: the node's arguments."""

    program: Program
    node: fx.Node

    @property
    def given(self) -> dict[str, Any]:
        """The node's arguments by name, defaults included."""
        return arguments(self.node)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call."""
        return self.program.emit(op, *args, like=self.node, **kwargs)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A value cast to a dtype; the value itself if it has that dtype."""
        return x if self.type(x).dtype == dtype else self(aten._to_copy.default, x, dtype=dtype)

    def sum(self, x: fx.Node, dims: Sequence[int], keepdim: bool = False) -> fx.Node:
        """The sum over dims. bfloat16 and float16 are summed in float32, since 2 bytes may not hold the sum."""
        wide = widened(self.type(x).dtype)
        return self(aten.sum.dim_IntList, x, list(dims), *([True] if keepdim else []), **wide)

    def results(self, node: fx.Node) -> list[fx.Node | None]:
        """The results of a call that has several, with None for each that is absent."""
        return [None if type_ is None else self.item(node, i) for i, type_ in enumerate(self.program.types(node))]

    def type(self, node: fx.Node) -> TensorType:
        """The type of a value."""
        return self.program.value_type(self.program.value(node))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a value."""
        return self.type(node).shape

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """One result of a call that has several."""
        type_ = self.program.types(node)[index]
        return self.program.insert(operator.getitem, (node, index), type_, self.node, name="getitem")


def widened(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The ``dtype=`` that makes an op return float32 for a dtype of 2 bytes; empty for other dtypes."""
    return {} if wide_dtype(dtype) == dtype else {"dtype": wide_dtype(dtype)}


def one_along(dim: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with one entry along a dim, counted from 0."""
    return tuple(1 if i == dim else size for i, size in enumerate(shape))


Results = fx.Node | tuple[fx.Node | None, ...] | None  # the replacement of a node; None leaves the node
Rewrite = Callable[[Program, fx.Node], Results]
Form = Callable[[Emitter], fx.Node | list[fx.Node | None]]  # emits the replacement of an op
NEVER = 2**63  # bytes of a choice that is never taken


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The decomposition of an op, and the bytes that its reductions move, in whole tensors.

    ``moved(program, node, factors)``: the op itself needs these factors whole, and they arrive cut.
    """

    expand: Form
    moved: Callable[[Program, fx.Node, Collection[str]], int]
