"""Leave rows in place that a model sorts, computes on one by one and puts back, so that no rank needs all of them.

Mixtures of experts sort tokens by expert, so that the tokens of an expert are neighbours. If every op on the sorted
rows, by its rule, gives the same result in any order, they keep their order::

    e = sort(expert);  x = index(tokens, e[1])               e = arange(64);  x = index(tokens, e)
    y = expert_product(x, w, e[0], experts)           ->     y = expert_product(x, w, expert, experts)
    z = index(y, inverse of e[1])                            z = index(y, e)

State of ``_Rows``. ``dims``: the dim of rows of each value that holds sorted rows; ``inverses``: the indices that put
rows back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.language.rule import Rule
from shardc.program.node import arguments, is_getitem, operand
from shardc.program.program import Program, Value

from ..emitter import Results, Rewrite

aten = torch.ops.aten
SORTS = (aten.sort.default, aten.sort.stable)
FINDS = (aten.argmax.default, aten.argmin.default)
FINDS_SECOND = (aten.topk.default, aten.max.dim, aten.min.dim, *SORTS)  # indices are their second result
CASTS = (aten._to_copy.default, aten.reshape.default)


def unsort(program: Program) -> bool:
    """Leave sorted rows in their first order wherever the order does not matter; return whether there were any."""
    is_changed = False
    for node in list(program.calls):
        if node.target in SORTS and len(program.type(operand(node)).shape) == 1:
            _name_experts(program, node)
            rows = _Rows(program, node)
            if rows.may_stay():
                rows.leave()
                is_changed = True
    return is_changed


def _name_experts(program: Program, sort: fx.Node) -> None:
    """Replace the group of each sorted row, searched among the ends of groups, by the key that it was sorted by."""
    keys = _picked(sort, 0)
    if keys is None or not _is_position(operand(sort)):
        return
    for node in [node for node in program.calls if node.target is aten.searchsorted.Tensor]:
        is_count = _is_count(operand(node, 1), program.type(keys).numel)
        if is_count and arguments(node)["right"] and _is_end_of_groups(operand(node), keys):
            program.replace(node, keys)


def _is_position(node: fx.Node) -> bool:
    """Whether a value holds indices that an op found, so that none is negative."""
    if node.target in CASTS:
        return _is_position(operand(node))
    if node.target is aten.cat.default:
        return all(map(_is_position, arguments(node)["tensors"]))
    if is_getitem(node):
        return node.args[1:] == (1,) and operand(node).target in FINDS_SECOND
    return node.target in FINDS


def _is_end_of_groups(node: fx.Node, keys: fx.Node) -> bool:
    """Whether a node holds the end of each run of equal keys: the cumulative sum of the count of each key."""
    if node.target is not aten.cumsum.default or operand(node).target is not aten.histc.default:
        return False
    counts = arguments(operand(node))
    source = counts["self"]
    while source.target is aten._to_copy.default:
        source = operand(source)
    return source is keys and counts["min"] == 0 and counts["max"] == counts["bins"] - 1


def _is_count(node: fx.Node, size: int) -> bool:
    """Whether a node holds 0 to ``size - 1``."""
    return node.target is aten.arange.default and node.args == (size,)


def _picked(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.args[1] == index), None)


@dataclass(slots=True)
class _Rows:
    program: Program
    sort: fx.Node
    dims: dict[Value, int] = field(default_factory=dict)
    inverses: list[fx.Node] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.program.type(operand(self.sort)).numel

    def may_stay(self) -> bool:
        """Whether every op on the sorted rows gives the same result in any order; fills the state."""
        self.dims = {(self.sort, 0): 0, (self.sort, 1): 0}
        for node in self.program.calls:
            if node is not self.sort and any(map(self._is_state, node.all_input_nodes)) and not self._follow(node):
                return False
        return bool(self.inverses) and not any(map(self._is_state, filter(None, self.program.results)))

    def leave(self) -> None:
        """Let rows keep their places: the sorted order and its inverses become the identity."""
        order, keys = _picked(self.sort, 1), _picked(self.sort, 0)
        with self.program.graph.inserting_before(self.sort):
            identity = self.program.emit(aten.arange.default, self.size, like=self.sort, dtype=torch.int64)
        for node in filter(None, (order, *self.inverses)):
            self.program.replace(node, identity)
        if keys is not None:
            self.program.replace(keys, operand(self.sort))

    def _is_state(self, node: fx.Node) -> bool:
        return node in self.inverses or self.program.value(node) in self.dims

    def _follow(self, node: fx.Node) -> bool:
        """Whether an op gives the same result in any order of the rows; records the dim of rows of its results."""
        target, given = node.target, arguments(node) if hasattr(node.target, "_schema") else {}
        if target is aten.index.Tensor and len(given["indices"]) == 1 and given["indices"][0] in self.inverses:
            return self._dim_of(given["self"]) == 0
        if target is aten.index_put.default and self._dim_of(given["self"]) is None:
            return self._follow_put(node, given)
        if any(operand in self.inverses for operand in node.all_input_nodes):
            return False
        return self._follow_rule(node, self.program.rule(node))

    def _dim_of(self, node: Any) -> int | None:
        """The dim of sorted rows of a value; None if it holds none."""
        return self.dims.get(self.program.value(node)) if isinstance(node, fx.Node) else None

    def _follow_put(self, node: fx.Node, given: Mapping[str, Any]) -> bool:
        """Follow a put: of row numbers (an inverse), of rows back or into sums, or of gradients in sorted order."""
        index, values = given["indices"][0] if len(given["indices"]) == 1 else None, given["values"]
        if index is None or given["self"].target is not aten.full.default:
            return False
        if index in self.inverses:
            self.dims[node, 0] = 0
            return self._dim_of(values) is None and self._has_all_rows(values) and self._has_all_rows(node)
        is_order = index is _picked(self.sort, 1)
        if is_order and _is_count(values, self.size) and self._has_all_rows(node):
            self.inverses.append(node)
            return True
        return self._dim_of(index) == 0 and self._dim_of(values) == 0 and (is_order or given["accumulate"])

    def _has_all_rows(self, node: fx.Node) -> bool:
        shape = self.program.type(node).shape
        return bool(shape) and shape[0] == self.size

    def _follow_rule(self, node: fx.Node, rule: Rule) -> bool:
        """Follow an op by its rule: one factor is the rows on all operands that have it, and a whole dim of results."""
        operands = [pair for pair in zip(self.program.operand_values(node), rule.operands, strict=True) if pair[0]]
        row_dims = {dims[self.dims[value]] if dims else () for value, dims in operands if value in self.dims}
        factors = row_dims.pop()
        if row_dims or len(factors) != 1 or factors[0] in rule.whole or factors[0] in rule.chunks:
            return False
        factor = factors[0]
        if any(rule.has(factor, dims) and value not in self.dims for value, dims in operands):
            return False
        for index, dims in enumerate(rule.results):
            if rule.has(factor, dims):
                assert dims is not None
                if (factor,) not in dims:
                    return False
                self.dims[node, index] = dims.index((factor,))
            elif not rule.is_partial(factor, index):
                return False
        return True


# Then an index may name every row in order: it is a view.


def _index_rows(program: Program, node: fx.Node) -> Results:
    """An index of all rows in order is the tensor; one of each row ``n`` times is an expanded view of it."""
    given = arguments(node)
    source, repeats = given["self"], _repeats(program, given)
    if repeats is None:
        return None
    shape = program.type(source).shape
    each = program.emit(aten.unsqueeze.default, source, 1, like=node)
    several = program.emit(aten.expand.default, each, [shape[0], repeats, *shape[1:]], like=node)
    return program.emit(aten.reshape.default, several, [shape[0] * repeats, *shape[1:]], like=node)


def _index_put(program: Program, node: fx.Node) -> Results:
    """The value put on each row, or the row plus the sum of the ``n`` values added to it."""
    given = arguments(node)
    target, values, repeats = given["self"], given["values"], _repeats(program, given)
    shape = program.type(target).shape
    if repeats is None or not (given["accumulate"] or repeats == 1):
        return None
    if program.type(values).shape != (shape[0] * repeats, *shape[1:]):
        return None
    if repeats > 1:
        several = program.emit(aten.reshape.default, values, [shape[0], repeats, *shape[1:]], like=node)
        values = program.emit(aten.sum.dim_IntList, several, [1], like=node)
    if not given["accumulate"] or (target.target is aten.full.default and target.args[1:] == (0,)):
        return values
    return program.emit(aten.add.Tensor, target, values, like=node)


def _repeats(program: Program, given: dict[str, Any]) -> int | None:
    """The number of times that an index names each row of the first dim, in order; None for any other index."""
    indices, size = given["indices"], program.type(given["self"]).shape[0]
    if len(indices) != 1 or not size:
        return None
    index, repeats = indices[0], program.type(indices[0]).numel // size
    if index.target is aten.floor_divide.default and index.args[1] == repeats:
        index = operand(index)
    elif repeats != 1:
        return None
    is_count = index.target is aten.arange.default and program.type(index).shape == (size * repeats,)
    return repeats if is_count else None


KNOWN_PLACES: dict[Any, Rewrite] = {aten.index.Tensor: _index_rows, aten.index_put.default: _index_put}
