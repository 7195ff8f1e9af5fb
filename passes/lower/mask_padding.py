"""mask_padding: lowered -> lowered. An op that would see padding reads neutral values in its place.

A dim that the axes cutting it do not divide ends in padding on some ranks, which may have any value. Ops that keep the
dim turn padding into padding. An op that reduces the dim must not see padding, nor may an op that reads indices::

    s: f32[] {sum dp} = sum(x)     # x: f32[5@dp]
        ->
    m: f32[5@dp] = mask_padding(x, ("dp",), 0, 5, 1, 0);  s: f32[] {sum dp} = sum(m)

A mask is an identity on global values. Invariant: every operand with an unevenly cut factor that is reduced is masked,
unless zeros suffice and it is known to have them there, as parameters do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.language.mesh import Axes
from shardc.language.rule import Rule
from shardc.language.sharding import ceil_div, num_shards
from shardc.ops.piece import neutral
from shardc.ops.pointwise import is_pointwise
from shardc.program.collective import COLLECTIVES
from shardc.program.collective import mask_padding as mask
from shardc.program.node import is_getitem, operands, set_operands
from shardc.program.program import Program

ZEROED = ("parameter", "buffer", "input", "tangent")  # inputs that are padded with zeros


def mask_padding(program: Program) -> Program:
    """The program with masks; the program itself if every cut divides."""
    read = {value for node in program.calls for value in node.all_input_nodes}
    pairs = {(program.sharding(node), program.value_type(program.value(node)).shape) for node in read}
    if all(sharding.is_even(shape) for sharding, shape in pairs):
        return program
    program = program.edited()
    masker = _Masker(program, {node for (kind, _), node in program.named_inputs.items() if kind in ZEROED})
    for node in list(program.calls):
        if node.target not in COLLECTIVES:
            unmasked = list(operands(node))
            masked = [operand and masker.masked(node, i, operand) for i, operand in enumerate(unmasked)]
            if masked != unmasked:
                set_operands(node, masked)
    return program


@dataclass(frozen=True, slots=True)
class Row:
    """A sub-dim of ``dim`` that ``axes`` cut unevenly: ``size`` units, each of ``inner`` elements on one rank."""

    dim: int
    size: int
    inner: int
    axes: Axes


def uneven_rows(program: Program, node: fx.Node) -> list[Row]:
    """The sub-dims of a value that are cut unevenly."""
    rows, shape = list[Row](), program.value_type(program.value(node)).shape
    for dim, (cut, size) in enumerate(zip(program.sharding(node).dims, shape, strict=True)):
        subdims = cut.subdims(size)
        for i, (sub, axes) in enumerate(subdims):
            if sub % num_shards(axes):
                inner = math.prod(ceil_div(minor, num_shards(cuts)) for minor, cuts in subdims[i + 1 :])
                rows.append(Row(dim, sub, inner, axes))
    return rows


@dataclass(slots=True)
class _Masker:
    """``zeroed``: inputs padded with zeros. ``masks``: by node, row and fill. ``zeros``: whether padding is 0."""

    program: Program
    zeroed: set[fx.Node]
    masks: dict[tuple[fx.Node, Row, float], fx.Node] = field(default_factory=dict)
    zeros: dict[tuple[fx.Node, Row], bool] = field(default_factory=dict)

    def masked(self, node: fx.Node, index: int, operand: fx.Node) -> fx.Node:
        """The operand, with any padding masked that the op must not see."""
        rule = self.program.rule(node)
        dims = rule.operands[index]
        if dims is None:
            return operand
        for row in uneven_rows(self.program, operand):
            fill = self._fill(node, rule, operand, dims[row.dim])
            if fill is None or (fill == 0 and self._is_zero(operand, row)):
                continue
            if (operand, row, fill) not in self.masks:
                type_ = self.program.value_type(self.program.value(operand))
                with self.program.graph.inserting_before(node):
                    new = self.program.insert(mask, (operand, *self._args(row, fill)), type_, operand)
                self.program.set_sharding(new, self.program.sharding(operand))
                self.program.set_origins(new, (self.program.origin(operand),))
                self.masks[operand, row, fill] = new
            operand = self.masks[operand, row, fill]
        return operand

    def _fill(self, node: fx.Node, rule: Rule, operand: fx.Node, factors: tuple[str, ...]) -> float | None:
        """The value that the padding of a dim must have; None if it does not matter."""
        dtype = self.program.value_type(self.program.value(operand)).dtype
        if any(map(rule.leaves_partial, factors)):
            return neutral(rule.reduce, dtype)
        is_index = not dtype.is_floating_point and dtype != torch.bool and len(rule.operands) > 1
        return 0 if is_index and not is_pointwise(node.target) else None

    def _is_zero(self, node: fx.Node, row: Row) -> bool:
        """Whether the row's padding is zero: that of an input, of a mask, or of an op linear in its only operand."""
        if (node, row) not in self.zeros:
            self.zeros[node, row] = self._find_zero(node, row)
        return self.zeros[node, row]

    def _find_zero(self, node: fx.Node, row: Row) -> bool:
        if node.op == "placeholder":
            return node in self.zeroed
        if is_getitem(node) or node.target in COLLECTIVES:
            return node.target is mask and node.args[1:] == self._args(row, 0)
        rule, sources = self.program.rule(node), operands(node)
        if len(sources) != 1 or frozenset({0}) not in rule.linear or self.program.has_many(node):
            return False
        (source,), (src_dims,), dst_dims = sources, rule.operands, rule.results[0]
        if source is None or src_dims is None or dst_dims is None:
            return False
        rows = [
            origin for origin in uneven_rows(self.program, source) if set(src_dims[origin.dim]) & set(dst_dims[row.dim])
        ]
        is_same = [(origin.size, origin.axes) for origin in rows] == [(row.size, row.axes)]
        return is_same and self._is_zero(source, rows[0])

    def _args(self, row: Row, fill: float) -> tuple[tuple[str, ...], int, int, int, float]:
        assert self.program.mesh is not None
        return tuple(map(self.program.mesh.print_part, row.axes)), row.dim, row.size, row.inner, fill
