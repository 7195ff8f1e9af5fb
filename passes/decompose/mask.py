"""Find how a model makes a mask of attention from rows and columns, so that each tile can make its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.ops.attention.mask import AS_IT_IS, CONSTANTS, REFERENCE, Leaf, Mask, Step
from shardc.ops.pointwise import is_pointwise
from shardc.program.node import is_cast, operand
from shardc.program.program import Program

from ..emitter import Emitter

aten = torch.ops.aten
MOST_STEPS = 64
VIEWS = (aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.squeeze.default)
NDIM, ROWS, COLUMNS = 4, 2, 3  # dims of a mask: samples, heads, rows and columns

Placed = tuple[fx.Node, tuple[int | None, ...]]  # a value, and the mask's dim for each of its dims, None if of size 1


def mask_program(program: Program, mask: fx.Node, has_bias: bool = False) -> tuple[Mask, list[Placed]]:
    """The steps that make a mask, and the values that it is made of; the mask itself if it is not made of vectors.

    ``has_bias``: one value may hold numbers of all rows and columns, such as a bias that padding and the like hide in
    part. A mask that is 0 everywhere, such as one that a model makes by default, is made of no values.
    """
    finder, place = _Finder(program), tuple(range(NDIM))[NDIM - len(program.type(mask).shape) :]
    finder.enter(mask, place)
    wide = [node for node, dims in finder.leaves if finder.is_wide(node, dims)]
    num_biases = sum(program.type(node).dtype != torch.bool for node in wide)
    as_it_is: tuple[Mask, list[Placed]] = AS_IT_IS, [(mask, place)]
    if len(finder.steps) > MOST_STEPS or num_biases > has_bias:
        return as_it_is
    places = {each: i for i, each in enumerate((*finder.leaves, *finder.steps))}
    steps = tuple(finder.step(*each, places) for each in finder.steps)
    made = Mask(tuple(finder.leaf(*each) for each in finder.leaves), steps)
    if not finder.leaves and not made.shows(range(1), range(1)):  # a number other than 0
        return as_it_is
    return made, list(finder.leaves)


def as_wide(emit: Emitter, leaf: Leaf, node: fx.Node, place: Sequence[int | None]) -> fx.Node:
    """A leaf in the dims of a mask; a number as it is. Positions come from a new arange, so that no rank sends them."""
    shape = [1] * NDIM
    for dim, size in zip(place, emit.shape(node), strict=True):
        if dim is not None:
            shape[dim] = size
    if leaf.start is not None:
        end, dtype = leaf.start + emit.type(node).numel, emit.type(node).dtype
        node = emit(aten.arange.start, leaf.start, end, dtype=dtype)
    is_as_it_is = emit.shape(node) in ((), tuple(shape))
    return node if is_as_it_is else emit(aten.reshape.default, node, shape)


class _Finder:
    """Walks from a mask to the vectors that it is made of.

    State: ``leaves`` and ``steps``, in the order in which they are made; ``same``: views, and the values they show.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.leaves, self.steps, self.same = dict[Placed, None](), dict[Placed, None](), dict[Placed, Placed]()

    def enter(self, node: fx.Node, place: tuple[int | None, ...]) -> None:
        """Enter a value and all values that it is made of."""
        key = node, place
        if key in self.leaves or key in self.steps or key in self.same:
            return
        is_call, type_ = node.op == "call_function", self.program.type(node)
        if is_call and _name(node) in CONSTANTS and (not type_.shape or self.is_wide(node, place)):
            self.steps[key] = None
            return
        if not self.is_wide(node, place) and not type_.dtype.is_floating_point:
            self.leaves[key] = None
            return
        if (shown := self._shown(node, place)) is not None:
            self.enter(*shown)
            self.same[key] = shown
        elif self._is_step(node) and len(self.steps) <= MOST_STEPS:
            for read in node.all_input_nodes:
                self.enter(*self._operand(read, place))
            self.steps[key] = None
        else:
            self.leaves[key] = None

    def is_wide(self, node: fx.Node, place: Sequence[int | None]) -> bool:
        """Whether a value has a row for each query and a column for each key."""
        sizes = dict(zip(place, self.program.type(node).shape, strict=True))
        return sizes.get(ROWS, 1) > 1 and sizes.get(COLUMNS, 1) > 1

    def leaf(self, node: fx.Node, place: Sequence[int | None]) -> Leaf:
        """The description of a leaf."""
        type_ = self.program.type(node)
        along = [dim for dim, size in zip(place, type_.shape, strict=True) if size > 1]
        name = "both" if self.is_wide(node, place) else "row" if ROWS in along else "column" if COLUMNS in along else ""
        start = self._start(node) if name and len(along) == 1 else None
        return Leaf(name, start, type_.dtype == torch.bool, type_.dtype.is_floating_point)

    def step(self, node: fx.Node, place: tuple[int | None, ...], places: Mapping[Placed, int]) -> Step:
        """A step, whose arguments refer to leaves and to steps before it by their ``places``."""

        def refer(arg: Any) -> Any:
            if not isinstance(arg, fx.Node):
                return tuple(arg) if isinstance(arg, (list, tuple)) else arg
            read = self._operand(arg, place)
            while read in self.same:
                read = self.same[read]
            return REFERENCE, places[read]

        kwargs = tuple((key, refer(arg)) for key, arg in node.kwargs.items())
        args = ((), *node.args[1:]) if node.target is aten.full.default else node.args  # one number, however wide
        return Step(_name(node), tuple(map(refer, args)), kwargs)

    def _operand(self, node: fx.Node, place: tuple[int | None, ...]) -> Placed:
        """An operand of a pointwise op, with its dims aligned from the right; a dim of one element has no place."""
        shape = self.program.type(node).shape
        own = place[len(place) - len(shape) :]
        return node, tuple(None if size == 1 else dim for dim, size in zip(own, shape, strict=True))

    def _shown(self, node: fx.Node, place: tuple[int | None, ...]) -> Placed | None:
        """The source of a view that differs from it only in dims of one element; None for other ops."""
        if node.target is aten.expand.default:
            return self._operand(operand(node), place)
        if node.target not in VIEWS:
            return None
        source, shape = operand(node), self.program.type(node).shape
        left = [(dim, size) for dim, size in zip(place, shape, strict=True) if size != 1]
        own = self.program.type(source).shape
        if [size for size in own if size != 1] != [size for _, size in left]:
            return None
        dims = iter(left)
        return source, tuple(None if size == 1 else next(dims)[0] for size in own)

    def _is_step(self, node: fx.Node) -> bool:
        target: Any = node.target
        is_ours = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
        is_plain = all(isinstance(arg, (fx.Node, bool, int, float)) for arg in node.args)
        is_bitwise = is_ours and target._schema.name.startswith("aten::bitwise")
        has_bits = is_bitwise and self.program.type(node).dtype != torch.bool
        is_op = is_ours and (is_pointwise(target) or is_cast(node))
        return node.op == "call_function" and is_op and is_plain and not has_bits

    def _start(self, node: fx.Node) -> int | None:
        """The first number of a vector of consecutive positions in int32 or int64; None for other vectors."""
        if self.program.type(node).dtype not in (torch.int64, torch.int32):
            return None
        if is_cast(node) or node.target in VIEWS:
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
