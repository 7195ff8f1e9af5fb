"""Finds out how a model makes a mask of attention from rows and columns, so that each tile can make its own part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardc.ops.mask import CONSTANTS, REFERENCE, Leaf, Mask, Step
from shardc.ops.pointwise import is_pointwise
from shardc.program.node import is_cast, operand
from shardc.program.program import Program

aten = torch.ops.aten
MOST_STEPS = 64
VIEWS = (aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.squeeze.default)


def mask_program(program: Program, mask: fx.Node) -> tuple[Mask, list[fx.Node]]:
    """How a mask is made, and the values that it is made of; the mask itself where it is not made of vectors."""
    finder = _Finder(program, tuple(program.type(mask).shape[-2:]))
    finder.reference(mask)
    is_found = finder.steps and len(finder.steps) <= MOST_STEPS and all(map(finder.is_vector, finder.leaves))
    if not is_found:
        return Mask((Leaf("both"),)), [mask]
    leaves = list(finder.leaves)
    places = {node: i for i, node in enumerate(leaves)}
    places |= {node: len(leaves) + i for i, node in enumerate(finder.steps)}

    def placed(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return REFERENCE, places[finder.same.get(arg, arg)]
        return tuple(arg) if isinstance(arg, (list, tuple)) else arg

    steps = [
        Step(_name(node), tuple(map(placed, node.args)), tuple((key, placed(arg)) for key, arg in node.kwargs.items()))
        for node in finder.steps
    ]
    return Mask(tuple(map(finder.leaf, leaves)), tuple(steps)), leaves


class _Finder:
    """Walks from a mask to the vectors that it is made of.

    State: ``leaves`` and ``steps``, each in the order of the graph; ``same``: expanded values and what they show.
    """

    def __init__(self, program: Program, shape: tuple[int, ...]) -> None:
        self.program, self.shape = program, shape
        self.leaves, self.steps, self.same = dict[fx.Node, None](), dict[fx.Node, None](), dict[fx.Node, fx.Node]()

    def reference(self, node: fx.Node) -> None:
        """Enter a value and all that it is made of."""
        if node in self.leaves or node in self.steps or node in self.same:
            return
        if node.target is aten.expand.default and self._is_wide(node):
            source = operand(node)
            if len(self.program.type(source).shape) == len(self.program.type(node).shape):
                self.reference(source)
                self.same[node] = self.same.get(source, source)
                return
        is_number = node.op == "call_function" and _name(node) in CONSTANTS and not self.program.type(node).shape
        is_step = is_number or (self._is_wide(node) and self._is_step(node))
        if is_step and len(self.steps) <= MOST_STEPS:
            for read in node.all_input_nodes:
                self.reference(read)
            self.steps[node] = None
        else:
            self.leaves[node] = None

    def is_vector(self, node: fx.Node) -> bool:
        """Whether a leaf is small: it lacks rows or columns. One of 3 dims has them where a logsumexp has others."""
        return not self._is_wide(node) and len(self.program.type(node).shape) != 3

    def leaf(self, node: fx.Node) -> Leaf:
        """What is known of a leaf."""
        type_ = self.program.type(node)
        rows, columns = (1, 1, *type_.shape)[-2:]
        along = "row" if rows > 1 else "column" if columns > 1 else ""
        is_one_row = type_.numel == rows * columns
        return Leaf(along, self._start(node) if along and is_one_row else None, type_.dtype == torch.bool)

    def _is_wide(self, node: fx.Node) -> bool:
        """Whether a value has a row for each query and a column for each key."""
        shape = self.program.type(node).shape
        return len(shape) > 1 and 1 not in shape[-2:]

    def _is_step(self, node: fx.Node) -> bool:
        target: Any = node.target
        is_ours = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
        is_whole = all(isinstance(arg, (fx.Node, bool, int, float)) for arg in node.args)
        return node.op == "call_function" and is_ours and is_pointwise(target) and is_whole

    def _start(self, node: fx.Node) -> int | None:
        """Where a vector that counts positions starts."""
        if is_cast(node) and not self.program.type(node).dtype.is_floating_point:
            return self._start(operand(node))
        if node.target in VIEWS:
            return self._start(operand(node))
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs and isinstance(node.args[1], int):
            start, by = self._start(operand(node)), node.args[1]
            return None if start is None else start + by if node.target is aten.add.Tensor else start - by
        return _start_of_range(node.target, node.args)


def _start_of_range(target: Any, args: Sequence[Any]) -> int | None:
    if target is aten.arange.default:
        return 0
    is_counted = target is aten.arange.start or (target is aten.arange.start_step and args[2:3] in ((), (1,)))
    return args[0] if is_counted and isinstance(args[0], int) else None


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.")
