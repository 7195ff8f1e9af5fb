"""order_positions: canonical -> canonical. Positions that the user annotates as zigzag are put in that order.

``P("dp", "cp:zigzag")`` on an input says that each rank has an early and a late stretch of its positions. The pass puts
the values computed from them in that order, so that any later pass may cut the dim in chunks::

    # ids: P("dp", "cp:zigzag")                     # ids: P("dp")
    embedding(weight, ids)                   ->     z = annotate(zigzag(ids), "?,cp");  embedding(weight, z)
    add(embedding, cos(arange(8)))           ->     add(embedding, cos(zigzag(arange(8))))

An op computes the same in either order along a factor of its rule that may be cut into single elements, since all ranks
run one program. Attention becomes a ring that knows the order. Before other ops, values are put back in order. Values
made of data alone, such as token ids and masks, stay in order. Where an op needs one in zigzag, the values that it is
made of are reordered, so that positions and random numbers are those of the whole sequence.

Invariant: a value in zigzag and the same value in order differ only in the order of their elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from shardc.language.errors import ShardingError
from shardc.language.partition import P
from shardc.language.rule import Dims, Rule
from shardc.language.sharding import WHOLE, ceil_div
from shardc.language.size import slice_bounds
from shardc.ops.attention.mask import has_rows
from shardc.ops.attention.ring import POSITIONS
from shardc.ops.attention.rules import FORWARD, is_attention
from shardc.ops.attention.tiled import TILED_MASK_BACKWARD
from shardc.ops.pointwise import ANNOTATE
from shardc.ops.zigzag import in_order, zigzag
from shardc.options import ULYSSES
from shardc.program.node import arguments, is_annotation, operands, set_operands
from shardc.program.program import Pin, Program, Value

from ..decompose.along import Along
from ..decompose.attention import as_ring, learned_masks, with_own_kernels
from ..decompose.group_heads import group_heads, repeating
from ..emitter import Emitter

aten = torch.ops.aten


def order_positions(program: Program) -> Program:
    """The program with positions in zigzag where the user asks for it."""
    is_asked = any(pin.zigzags for pin in program.pins)
    if not is_asked and not any(_spec(node).zigzags for node in program.calls if is_annotation(node)):
        return program
    program = program.edited()
    group_heads(program, repeating(program))
    order = _Order(with_own_kernels(program, learned_masks(program)))
    for node in list(program.calls):
        with program.graph.inserting_before(node):
            order.enter(node)
    order.leave()
    program.pins = tuple(map(_in_order, program.pins))
    program.remove_dead()
    return program


def _in_order(pin: Pin) -> Pin:
    """The pin of an input, with its zigzag positions whole and in order."""
    sharding = pin.sharding
    for dim, _ in pin.zigzags:
        sharding = sharding.with_dim(dim, WHOLE)
    return replace(pin, sharding=sharding)


def _spec(annotation: fx.Node) -> P:
    given = arguments(annotation)
    return P.parse(given["spec"], tuple(given["priorities"]))


@dataclass(frozen=True, slots=True)
class Fold:
    """A dim of ``[outer, length, inner]`` whose ``length`` positions are in zigzag over an axis of ``count`` ranks."""

    axis: str
    count: int
    outer: int
    length: int
    inner: int

    def inside(self, before: int, size: int, after: int) -> Fold | None:
        """The same positions in one factor of the dim; None if the factor does not have them all."""
        if self.outer % before or self.inner % after:
            return None
        outer, inner = self.outer // before, self.inner // after
        is_all = outer * self.length * inner == size
        return replace(self, outer=outer, inner=inner) if is_all else None

    def around(self, before: int, after: int) -> Fold:
        """The same positions in a dim that has them as one factor."""
        return replace(self, outer=before * self.outer, inner=self.inner * after)

    def keeps_places(self, length: int) -> bool:
        """Whether positions keep their places in zigzag if there are ``length`` of them."""
        shorter, longer = sorted((self.length, length))
        chunk = ceil_div(longer, self.count)
        early = (self.count - 1) * chunk + ceil_div(chunk, 2)  # start of the last rank's late stretch
        return ceil_div(shorter, self.count) == chunk and shorter >= early


Folds = dict[int, Fold]  # by dim of a value


class _Order:
    """The order of values while the graph is walked.

    State. ``folds``: of values in zigzag; ``marks``: folds of values that are in order, but made of positions that the
    user wants in zigzag; ``forms``: copies of values in an order other than their own; ``factors``: the factors along
    which an op computes in zigzag.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.folds, self.marks = dict[Value, Folds](), dict[Value, Folds]()
        self.forms = dict[tuple[Value, tuple[tuple[int, Fold], ...]], fx.Node]()
        self.factors = dict[fx.Node, dict[str, Fold]]()
        self.is_data = dict[fx.Node, bool]()  # values made of token ids, masks and the like alone
        self.are_cut = set[Value]()  # tangents, which arrive cut as the model's results are
        pins = {pin.name: pin for pin in program.pins if pin.kind == "input"}
        for entry, node in zip(program.inputs, program.placeholders, strict=True):
            is_number = not entry.type.dtype.is_floating_point
            self.is_data[node] = is_number and entry.kind in ("input", "buffer")
            if entry.kind == "tangent":
                self.are_cut.add((node, 0))
            if entry.kind == "input" and (pin := pins.get(entry.name)):
                self.marks[node, 0] = self._folds(entry.type.shape, pin.zigzags)

    def _folds(self, shape: Sequence[int], zigzags: Iterable[tuple[int, str]]) -> Folds:
        assert self.program.mesh is not None
        axes = [(dim, axis, self.program.mesh.axis_size(axis)) for dim, axis in zigzags]
        return {dim: Fold(axis, count, 1, shape[dim], 1) for dim, axis, count in axes if count > 1}

    def enter(self, node: fx.Node) -> None:
        """Bring the operands of a call into the order that it computes in, and record the order of its results."""
        values, rule = self.program.operand_values(node), self.program.rule(node)
        self.is_data[node] = all(self.is_data[value[0]] for value in values if value)
        own = [self._own(value) for value in values]
        if is_attention(node.target):
            self._enter_attention(node)
        elif ends := self._with_other_ends(node, own):
            if self.is_data[node]:
                self.marks[node, 0] = ends
            else:
                set_operands(node, [operand and self.get(operand, own[0]) for operand in operands(node)])
                self.folds[node, 0] = ends
        else:
            self._enter(node, rule, own)

    def _enter(self, node: fx.Node, rule: Rule, own: Sequence[Folds]) -> None:
        wanted = self._wanted(rule, own)
        if is_annotation(node) and (spec := _spec(node)).zigzags:
            node.args = (node.args[0], str(spec.in_order()), *node.args[2:])
            folds = self._folds(self.program.type(node).shape, spec.zigzags.items())
            wanted |= _of_factors(rule, rule.results[0], folds)
        elif self.is_data[node]:
            self.marks |= {value: folds for value, folds in self._results(node, rule, wanted) if folds}
            return
        set_operands(node, self._operands(node, rule, wanted))
        self.factors[node] = wanted
        self.folds |= {value: folds for value, folds in self._results(node, rule, wanted) if folds}

    def _own(self, value: Value | None) -> Folds:
        """The positions of a value that the user wants in zigzag."""
        return {} if value is None else self.folds.get(value) or self.marks.get(value, {})

    def _wanted(self, rule: Rule, folds: Sequence[Folds]) -> dict[str, Fold]:
        """The factors along which an op computes in zigzag."""
        wanted = dict[str, Fold]()
        for dims, own in zip(rule.operands, folds, strict=True):
            wanted = _of_factors(rule, dims, own) | wanted
        tensors = (*rule.operands, *rule.results)
        is_one_each = all(len(wanted.keys() & set(factors)) <= 1 for dims in tensors for factors in dims or ())
        return wanted if is_one_each else {}

    def _with_other_ends(self, node: fx.Node, own: Sequence[Folds]) -> Folds | None:
        """The positions of the result of a slice or a pad that drops or adds a few at an end; None for other ops.

        The other positions must keep their places in zigzag, except in data, which every rank has whole.
        """
        if len(own) != 1 or len(own[0]) != 1:
            return None
        ((dim, fold),) = own[0].items()
        start = _start(self.program, node, dim)
        if start is None or not _is_plain(fold):
            return None
        length = self.program.type(node).shape[dim]
        if abs(length - fold.length) >= ceil_div(fold.length, fold.count):
            return None
        is_like_it = self.is_data[node] or (start == 0 and fold.keeps_places(length))
        return {dim: replace(fold, length=length)} if is_like_it else None

    def _operands(self, node: fx.Node, rule: Rule, wanted: Mapping[str, Fold]) -> list[fx.Node | None]:
        """The operands of a call with these factors in zigzag."""
        pairs = zip(operands(node), rule.operands, strict=True)
        return [operand and self.get(operand, _of_dims(rule, dims, wanted)) for operand, dims in pairs]

    def _results(self, node: fx.Node, rule: Rule, wanted: Mapping[str, Fold]) -> Iterator[tuple[Value, Folds]]:
        for index, dims in enumerate(rule.results):
            yield (node, index), _of_dims(rule, dims, wanted)

    # Values in another order.

    def get(self, node: fx.Node, wanted: Folds) -> fx.Node:
        """A value with exactly these positions in zigzag."""
        value = self.program.value(node)
        own, key = self.folds.get(value, {}), (value, tuple(sorted(wanted.items())))
        if own == wanted:
            return node
        if key not in self.forms:
            form = self.forms[key] = (None if own else self._copied(value, wanted)) or self._moved(node, own, wanted)
            if self.program.value(form) != value:
                self.folds[self.program.value(form)] = wanted
        return self.forms[key]

    def _copied(self, value: Value, wanted: Folds) -> fx.Node | None:
        """A value computed again from operands in zigzag; None if that does not give the wanted order."""
        node, index = value
        is_fixed = is_annotation(node) or is_attention(node.target) or node.target in (zigzag, in_order)
        if node.op != "call_function" or is_fixed:
            return None
        rule = self.program.rule(node)
        factors = self.factors.get(node, {}) | _of_factors(rule, rule.results[index], wanted)
        if _of_dims(rule, rule.results[index], factors) != wanted:
            return None
        again, new = node, self._operands(node, rule, factors)
        if any(fresh is not old for fresh, old in zip(new, operands(node), strict=True)):
            again = self.program.copy_of(node, {})
            set_operands(again, new)
        many = self.program.has_many(node)
        return Emitter(self.program, again).item(again, index) if many else again

    def _moved(self, node: fx.Node, own: Folds, wanted: Folds) -> fx.Node:
        emit, value = Emitter(self.program, node), self.program.value(node)
        is_placeholder = value[0].op == "placeholder" and value not in self.are_cut
        is_whole = is_placeholder or self.is_data.get(value[0], False)
        for op, folds, others in ((in_order, own, wanted), (zigzag, wanted, own)):
            for dim, fold in folds.items():
                if others.get(dim) != fold:
                    node = emit(op, node, dim, fold.outer, fold.inner, fold.count, is_whole)
        return self._annotated(node, wanted) if value in self.marks else node

    def _annotated(self, node: fx.Node, folds: Folds) -> fx.Node:
        """A value with positions now in zigzag, annotated with the axes that the user named for them."""
        axes = {dim: fold.axis for dim, fold in folds.items() if _is_plain(fold)}
        spec = P(*(axes.get(dim, P.OPEN) for dim in range(len(self.program.type(node).shape))))
        text = next((pin.text for pin in self.program.pins if pin.zigzags), "")
        return Emitter(self.program, node)(ANNOTATE, node, str(spec), [], text=text) if axes else node

    # Attention, and the end of the graph.

    def _enter_attention(self, node: fx.Node) -> None:
        """Replace attention by a ring that knows the order; keys and values have one order."""
        given, program = arguments(node), self.program
        q, k, v = (given[name] for name in ("query", "key", "value"))
        orders = [self._own(program.value(x)) for x in (q, k)]
        folds = [fold for own in orders for dim, fold in own.items() if dim == POSITIONS and _is_plain(fold)]
        learns_mask = given.get("grad_input_mask", [False])[-1]  # by a kernel of torch, which cannot run as a ring
        is_ring = folds and all(dim == POSITIONS for own in orders for dim in own) and not learns_mask
        if is_ring and program.options.attention == ULYSSES:
            raise _whole_positions(program, node, folds[0])
        of_queries, of_keys = (self._in_ring(own, folds[0]) if is_ring else {} for own in orders)
        wanted = {q: of_queries, k: of_keys, v: of_keys}
        of_each = ("grad_out", "grad_out_", "out", "logsumexp", "first")
        wanted |= {given[name]: of_queries for name in of_each if name in given}
        for operand in filter(None, operands(node)):
            node.replace_input_with(operand, self.get(operand, wanted.get(operand, {})))
        if not is_ring:
            return
        along = Along(Emitter(program, node), POSITIONS, folds[0].count)
        results = as_ring(along, (bool(of_queries), bool(of_keys)), order=partial(self._with_rows, of_queries))
        assert isinstance(results, list)
        program.replace(node, results)
        in_rows = self._of_rows(node, of_queries)
        of_results = (of_queries,) * 2 if node.target in FORWARD else (of_queries, of_keys, of_keys, in_rows)
        for result, own in zip(results, of_results, strict=False):
            if result is not None and own:
                self.folds[program.value(result)] = own
        for result in filter(None, results):
            self.is_data.setdefault(program.value(result)[0], False)

    def _with_rows(self, of_queries: Folds, leaf: fx.Node) -> fx.Node:
        """A value that a mask is made of, with its rows in the order of queries."""
        type_ = self.program.type(leaf)
        if not of_queries or not has_rows(type_.shape):
            return leaf
        if type_.dtype.is_floating_point and type_.shape[-1] > 1:
            return self.get(leaf, of_queries)
        return Emitter(self.program, leaf)(zigzag, leaf, POSITIONS, 1, 1, of_queries[POSITIONS].count, True)

    def _of_rows(self, node: fx.Node, of_queries: Folds) -> Folds:
        """The order of the gradient of a mask whose rows are in the order of queries."""
        type_ = self.program.types(node)[3] if node.target is TILED_MASK_BACKWARD else None
        shape = () if type_ is None else type_.shape
        return {len(shape) - 2: fold for fold in of_queries.values()} if has_rows(shape) else {}

    @staticmethod
    def _in_ring(own: Folds, fold: Fold) -> Folds:
        """The order of queries or keys in a ring over ranks that hold positions as ``fold`` says."""
        is_like_it = own and replace(own[POSITIONS], length=fold.length) == fold
        return own if is_like_it else {}

    def leave(self) -> None:
        """Put the results of the graph back in order."""
        end = self.program.output_node
        with self.program.graph.inserting_before(end):
            for result in dict.fromkeys(filter(None, self.program.results)):
                if (found := self.get(result, {})) is not result:
                    end.replace_input_with(result, found)


def _whole_positions(program: Program, node: fx.Node, fold: Fold) -> ShardingError:
    what, problem = program.source(node).place, f"{fold.axis} cuts heads there, so that all ranks do the same work"
    remedy = f"write P(None, {fold.axis!r}) for the positions, in order, or say attention='ring'"
    return ShardingError(f"attention={ULYSSES!r}", f"positions in zigzag, {what}", problem, remedy)


def _start(program: Program, node: fx.Node, dim: int) -> int | None:
    """The position of the operand that is first in the result; None for ops that do not only drop or add positions."""
    if node.target not in (aten.constant_pad_nd.default, aten.slice.Tensor, aten.slice_backward.default):
        return None
    given, ndim = arguments(node), len(program.type(node).shape)
    if node.target is aten.constant_pad_nd.default:
        at = 2 * (ndim - 1 - dim)
        return -given["pad"][at] if at < len(given["pad"]) else None
    if given["dim"] % ndim != dim:
        return None
    is_slice = node.target is aten.slice.Tensor
    size = (program.type(given["self"]).shape if is_slice else given["input_sizes"])[dim]
    start, _, step = slice_bounds(given["start"], given["end"], given["step"], size)
    return None if step != 1 else start if is_slice else -start


def _is_plain(fold: Fold) -> bool:
    return fold.outer == fold.inner == 1


def _of_factors(rule: Rule, dims: Dims | None, folds: Folds) -> dict[str, Fold]:
    """The factors that hold the positions of some dims, if the op computes the same in any order along the factor."""
    found = dict[str, Fold]()
    for dim, fold in folds.items():
        factors = dims[dim] if dims else ()
        for factor, (before, after) in _places(rule, factors).items():
            inner = fold.inside(before, rule.sizes[factor], after) if _may_be_in_any_order(rule, factor) else None
            if inner is not None:
                found[factor] = inner
    return found


def _of_dims(rule: Rule, dims: Dims | None, wanted: Mapping[str, Fold]) -> Folds:
    """The dims of a tensor that hold the positions of some factors."""
    return {
        dim: wanted[factor].around(*place)
        for dim, factors in enumerate(dims or ())
        for factor, place in _places(rule, factors).items()
        if factor in wanted
    }


def _places(rule: Rule, factors: Sequence[str]) -> dict[str, tuple[int, int]]:
    """For each factor of a dim, the product of the sizes of all factors before it, and of all after it."""
    found, before = dict[str, tuple[int, int]](), 1
    after = 1
    for factor in factors:
        after *= rule.sizes[factor]
    for factor in factors:
        after //= max(1, rule.sizes[factor])
        found[factor] = before, after
        before *= rule.sizes[factor]
    return found


def _may_be_in_any_order(rule: Rule, factor: str) -> bool:
    return not rule.is_fallback and not any(factor in each for each in (rule.whole, rule.chunks, rule.contiguous))
