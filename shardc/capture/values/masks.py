"""Selections by a boolean mask, ``x[mask]``. Their number of rows depends on values, which are unknown during capture.

Many losses and assignments do not need that number. They are computed on all rows, of which those in the mask count, so
that one program holds for every mask. For any other use the mask becomes the indices of its elements, under a guard.

``masked_scatter`` becomes a lookup in its source, under a guard on whether each sample reads its own part of it alone.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from shardc.capture.values.refusals import Guards, Unfit, node_of, user_location
from shardc.program.node import ancestors, is_random, last_node, nodes_after

aten = torch.ops.aten


class Masks:
    """Runs functions of torch on selections by masks, during one trace.

    ``guards``: those of the trace. ``by_index``: whether each mask becomes the indices of its elements. If not, a
    selection stays a ``Selection``, and a function that has no rule for it raises a DynamicOutputShapeException.

    State: ``selections``, by the id of the tensor that stands for each in the model, which is one row of meaningless
    values; ``stand_ins``, the nodes of those tensors in the traced graph; ``indices``, those of each mask; ``places``,
    the user's lines that select.
    """

    def __init__(self, guards: Guards, by_index: bool) -> None:
        self.guards, self.by_index = guards, by_index
        self.selections: dict[int, tuple[Tensor, Selection]] = {}
        self.stand_ins: set[fx.Node] = set()
        self.indices: dict[fx.Node, tuple[Tensor, ...]] = {}
        self.places: dict[str, None] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function that reads or writes at a mask, or takes a selection; else NotImplemented."""
        if func in _MASKED_SELECT and len(args) == 2 and is_mask(args[1]):
            func, args = Tensor.__getitem__, tuple(torch.broadcast_tensors(*args))
        if func in _AT_INDEX and any(map(is_mask, _entries(args[1]))):
            return self._at_mask(func, *args)
        if self.by_index and func in _INDEX_PUT and len(args) > 2 and any(map(is_mask, args[1])):
            return func(args[0], self._by_index(tuple(args[1])), *args[2:], **kwargs)
        if func in _MASKED_SCATTER and not self.selections:
            return self._scattered(func, *args, **kwargs)
        if not self.selections:
            return NotImplemented
        leaves, nest = pytree.tree_flatten((args, dict(kwargs)))
        found = [self._selection(leaf) for leaf in leaves]
        first = next(filter(None, found), None)
        if first is None or func in _FACTS:
            return NotImplemented
        is_in_place, func = func in IN_PLACE, IN_PLACE.get(func, func)
        rule, result = RULES.get(func), NotImplemented
        if rule is not None and all(each is None or is_same(each.node, first.node) for each in found):
            new_args, new_kwargs = pytree.tree_unflatten([a or b for a, b in zip(found, leaves, strict=True)], nest)
            result = rule(func, first, *new_args, **new_kwargs)
        if result is NotImplemented:
            raise DynamicOutputShapeException(func)
        if is_in_place:
            self.selections[id(args[0])] = args[0], result
            return args[0]
        return self._shown(result) if isinstance(result, Selection) else result

    def check(self, traced: fx.Graph) -> None:
        """Raise a DynamicOutputShapeException if a result depends on a tensor that only stands for selected rows."""
        if not self.stand_ins.isdisjoint(ancestors(last_node(traced))):
            raise DynamicOutputShapeException(aten.index.Tensor)

    def _selection(self, leaf: Any) -> Selection | None:
        return self.selections[id(leaf)][1] if id(leaf) in self.selections else None

    def _shown(self, selection: Selection) -> Tensor:
        """A tensor of one row, which stands for the rows of a selection in the model."""
        graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        last = last_node(graph)
        result = selection.values.flatten(0, selection.mask.ndim - 1)[:1]
        self.stand_ins.update(nodes_after(last))
        self.selections[id(result)] = result, selection
        return result

    def _at_mask(self, func: Any, x: Tensor, index: Any, *value: Any) -> Any:
        """Get or set the elements of ``x`` at an index that has a mask."""
        is_number = bool(value) and (not isinstance(value[0], Tensor) or value[0].numel() == 1)
        is_lone = is_mask(index) and index.shape == x.shape[: index.ndim]
        if is_lone and value and not is_number and value[0].ndim <= x.ndim - index.ndim and value[0].dtype == x.dtype:
            return x.copy_(torch.where(_spread(index.bool(), x), value[0], x))  # the same value for each row
        if self.by_index:
            return func(x, index if is_number else self._by_index(index), *value)
        if any(self._selection(each) for each in (x, *_entries(index))):
            raise DynamicOutputShapeException(aten.index.Tensor)
        if not value:
            node = node_of(index) if is_lone and x.numel() else None
            if node is None:
                raise DynamicOutputShapeException(aten.index.Tensor)
            self.places[user_location(sys._getframe(2))] = None
            where = index.bool()
            return self._shown(Selection(where, node, zero_outside(where, x)))
        selection = self._selection(value[0])
        if selection is None:
            return func(x, index, *value)
        values, is_own = selection.values, is_lone and is_same(node_of(index), selection.node)
        if not is_own or values.shape != x.shape or values.dtype != x.dtype:
            raise DynamicOutputShapeException(aten.index_put.default)
        return x.copy_(torch.where(_spread(selection.mask, x), values, x))

    def _scattered(self, func: Any, x: Tensor, mask: Tensor, source: Tensor) -> Any:
        """``x.masked_scatter(mask, source)``: the k-th place where the mask is true takes the source's k-th element.

        It becomes a lookup. If all samples have equally many places, each sample looks in its own part of the source,
        and a cut of the samples separates none from its part. Else each looks in all of the source. NotImplemented if
        there is nothing to look up.
        """
        full, mask = torch.broadcast_tensors(x, mask)
        at, shape = len(_own_shape(mask)), full.shape
        row_size = math.prod(shape[at:])
        num_rows = source.numel() // max(1, row_size)
        if x.dtype != source.dtype or mask.dtype != torch.bool or not (full.numel() and at and num_rows):
            return NotImplemented
        mask = mask[(Ellipsis,) + (0,) * (full.ndim - at)]
        if source.numel() != num_rows * row_size:
            source = source.flatten()[: num_rows * row_size]
        places = mask.flatten(1).sum(1) if at > 1 else mask.long()
        numbers = [places.sum()]
        if at > 1 and num_rows % len(places) == 0:
            numbers.append((places != num_rows // len(places)).sum())
        where = user_location(sys._getframe(2))
        found = self.guards.choose("masked_scatter", partial(_parts_found, num_rows), torch.stack(numbers), where)
        if found == _MISSING:
            raise Unfit(f"masked_scatter gives {found}", "give it an element for each place where the mask is true")
        if found == _OWN:
            index = _positions(mask, 1).clamp_min(0).flatten(1)
            index = index.reshape(*index.shape, *(1,) * (full.ndim - at)).expand(*index.shape, *shape[at:])
            rows = source.reshape(len(places), -1, *shape[at:]).gather(1, index)
        else:
            index = _positions(mask, 0).clamp_min(0)
            rows = F.embedding(index, source.reshape(num_rows, -1))
        result = torch.where(_spread(mask, full), rows.reshape(shape), full)
        return x.copy_(result) if func in _IN_PLACE_SCATTER else result

    def _by_index(self, index: Any) -> tuple[Any, ...]:
        """The index with the indices of its elements in place of each mask."""
        result: list[Any] = []
        for entry in _entries(index):
            if not is_mask(entry):
                result.append(entry)
                continue
            node = node_of(entry)
            known = next((columns for other, columns in self.indices.items() if is_same(other, node)), None)
            columns = known or entry.nonzero().unbind(1)
            if node is not None:
                self.indices[node] = columns
            result += columns
        return tuple(result)


def is_mask(index: Any) -> bool:
    """Whether an index selects the elements at which it is true."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and index.ndim > 0


def _own_shape(mask: Tensor) -> tuple[int, ...]:
    """The shape of a mask without the last dims along which it only repeats one value."""
    ndim = mask.ndim
    while ndim > 1 and (mask.shape[ndim - 1] == 1 or mask.stride(ndim - 1) == 0):
        ndim -= 1
    return tuple(mask.shape[:ndim])


def _positions(mask: Tensor, start: int) -> Tensor:
    """For each element of a mask the number of true elements before it; for a false element it is one less.

    Only elements with the same indices in the dims before ``start`` count. The count goes dim by dim, since flattening
    the mask would lose a cut of any dim but the first.
    """
    totals, result = mask.long(), torch.full_like(mask, -1, dtype=torch.long)
    for dim in reversed(range(start, mask.ndim)):
        upto = totals.cumsum(dim)
        before = upto if dim == mask.ndim - 1 else upto - totals
        result = result + _spread(before, mask)
        totals = totals.sum(dim)
    return result


_OWN, _UNEQUAL = "each sample its own part of the source", "samples unequal parts of the source"
_MISSING = "samples more elements than the source has"


def _parts_found(num_rows: int, numbers: Tensor) -> str:
    """The finding on a ``masked_scatter``: which part of the source samples take.

    ``numbers``: the number of places; if the source divides into parts, also the number of samples whose places are
    more or fewer than the rows of a part.
    """
    num_places, *num_others = numbers.tolist()
    return _OWN if num_others == [0] else _UNEQUAL if num_places <= num_rows else _MISSING


def _entries(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def is_same(one: fx.Node | None, other: fx.Node | None) -> bool:
    """Whether two nodes compute the same value: by the same ops, none of them random, on the same inputs."""
    pairs: list[tuple[Any, Any]] = [(one, other)]
    seen = set[tuple[int, int]]()
    while pairs:
        a, b = pairs.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            if a.op != "call_function" or a.target is not b.target or is_random(a):
                return False
            pairs.append(((a.args, a.kwargs), (b.args, b.kwargs)))
        elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
            pairs += zip(a, b, strict=True)
        elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            pairs += ((a[key], b[key]) for key in a)
        elif type(a) is not type(b) or isinstance(a, (fx.Node, list, tuple, dict)) or a != b:
            return False
    return one is not None


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The selection of a mask from a tensor, while the number of its rows is unknown.

    ``mask``: of shape (*m,), computed by ``node``. ``values``: the values of all rows, of shape (*m, *rest). Where the
    mask is false, they and their derivatives are finite.
    """

    mask: Tensor
    node: fx.Node
    values: Tensor

    @property
    def ndim(self) -> int:
        """The number of dims of the selected rows."""
        return 1 + self.num_rest

    @property
    def num_rest(self) -> int:
        """The number of dims that the mask leaves as they are."""
        return self.values.ndim - self.mask.ndim

    def total(self, is_mean: bool, of_rows: bool = False) -> Tensor:
        """The sum or mean of all selected elements; with ``of_rows`` over the rows alone, so that other dims stay."""
        dims = range(self.mask.ndim if of_rows else self.values.ndim)
        total = zero_outside(self.mask, self.values).sum(tuple(dims))
        rest = 1 if of_rows else math.prod(self.values.shape[self.mask.ndim :])
        return total / (self.mask.sum() * rest) if is_mean else total


def zero_outside(mask: Tensor, values: Tensor) -> Tensor:
    """The values, but zero where the mask is false; the mask is over the leading dims."""
    return torch.where(_spread(mask, values), values, torch.zeros((), dtype=values.dtype, device=values.device))


def _spread(mask: Tensor, values: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (values.ndim - mask.ndim))


# Rules take a function, one of the selections among its arguments, and the arguments. They return a result or
# NotImplemented.


def _elementwise(func: Any, first: Selection, *args: Any, **kwargs: Any) -> Any:
    """An elementwise function: a result depends on one element of each selection, and on values shared by all rows."""
    others = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_same_rank = all(each.num_rest == first.num_rest for each in args if isinstance(each, Selection))
    if not is_same_rank or any(other.ndim > first.num_rest for other in others):
        return NotImplemented
    return _all_rows(func, first, args, kwargs)


def _all_rows(func: Any, first: Selection, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The function on all rows."""
    new_args, new_kwargs = pytree.tree_map(_values, (args, dict(kwargs)))
    return replace(first, values=func(*new_args, **new_kwargs))


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, Selection) else leaf


def _quotient(func: Any, first: Selection, x: Any, y: Any, **kwargs: Any) -> Any:
    """A quotient by a number; one by a tensor need not be finite where the mask is false."""
    return NotImplemented if isinstance(y, (Tensor, Selection)) else _elementwise(func, first, x, y, **kwargs)


def _power(func: Any, first: Selection, x: Any, exponent: Any) -> Any:
    is_whole = isinstance(exponent, (int, float)) and exponent >= 1 and exponent == int(exponent)
    return _elementwise(func, first, x, exponent) if is_whole else NotImplemented


def _along_rest(func: Any, first: Selection, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of each row over dims that the mask leaves, with weights that are the same for every row."""
    has_one = isinstance(x, Selection) and not any(isinstance(leaf, Selection) for leaf in pytree.tree_leaves(args))
    if not has_one or not first.num_rest:
        return NotImplemented
    if func in (F.layer_norm, F.rms_norm) and len(args[0] if args else kwargs["normalized_shape"]) > first.num_rest:
        return NotImplemented
    return _all_rows(func, first, (x, *args), kwargs)


def _along_dim(func: Any, first: Selection, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A function over a dim that the mask leaves."""
    if not isinstance(dim, int) or not -first.num_rest <= (last := dim - first.ndim if dim >= 0 else dim) <= -1:
        return NotImplemented
    return _all_rows(func, first, (x, last, *args), kwargs)


def _reduction(func: Any, first: Selection, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The sum or mean of everything, of all rows, or within each row."""
    if dim not in (None, 0, (0,), [0]):
        return _along_dim(func, first, x, dim, *args, **kwargs)
    is_mean = func in _MEAN
    if args or kwargs or (is_mean and not first.values.is_floating_point()):
        return NotImplemented
    return first.total(is_mean, of_rows=dim is not None)


def _part_of_rest(func: Any, first: Selection, x: Any, index: Any) -> Any:
    """``x[:, index]`` and ``x[..., index]`` of numbers and slices, the same for every row."""
    start, *rest = _entries(index)
    is_plain = all(entry is None or isinstance(entry, (int, slice)) for entry in rest)
    is_in_rest = start is ... and sum(entry is not None for entry in rest) <= first.num_rest
    if not is_plain or not (start == slice(None) or is_in_rest):
        return NotImplemented
    before = [...] if start is ... else [slice(None)] * first.mask.ndim
    return _all_rows(func, first, (x, (*before, *rest)), {})


def _loss(func: Any, first: Selection, *args: Any, **kwargs: Any) -> Any:
    """A loss of two selections, element by element."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    reduction = bound.arguments.get("reduction", "mean")
    pair = bound.arguments["input"], bound.arguments["target"]
    is_plain = bound.arguments.get("size_average") is bound.arguments.get("reduce") is None
    if not is_plain or not all(isinstance(each, Selection) for each in pair) or pair[0].ndim != pair[1].ndim:
        return NotImplemented
    bound.arguments["reduction"] = "none"
    result = _elementwise(func, first, *bound.args, **bound.kwargs)
    return result if reduction == "none" or result is NotImplemented else result.total(reduction == "mean")


def _cross_entropy(func: Any, first: Selection, *args: Any, **kwargs: Any) -> Any:
    """A loss of rows with a number for each class, and of their target classes; it ignores rows outside the mask."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    rows, classes = bound.arguments["input"], bound.arguments["target"]
    is_plain = bound.arguments.get("size_average") is bound.arguments.get("reduce") is None
    are_selections = isinstance(rows, Selection) and isinstance(classes, Selection)
    if not is_plain or not are_selections or (rows.ndim, classes.ndim) != (2, 1):
        return NotImplemented
    bound.arguments["input"] = rows.values.flatten(0, first.mask.ndim - 1)
    ignored = bound.arguments.get("ignore_index", -100)
    bound.arguments["target"] = torch.where(first.mask, classes.values, ignored).flatten()
    result = func(*bound.args, **bound.kwargs)
    is_each = bound.arguments.get("reduction", "mean") == "none"
    return replace(first, values=result.reshape(first.mask.shape)) if is_each else result


def _functions(*names: str, reflected: bool = False) -> Iterator[Any]:
    """The functions of these names: of torch, methods of tensors, operators, and of ``torch.nn.functional``."""
    for name in names:
        for holder in (torch, Tensor, F, torch.special):
            for form in (name, f"__{name}__", *([f"__r{name}__"] if reflected else [])):
                if callable(found := getattr(holder, form, None)):
                    yield found


# Finite on finite numbers, and so are their derivatives.
_FINITE = (
    "abs atan bool clamp clamp_max clamp_min clone contiguous cos detach double dropout elu eq erf float ge gelu gt "
    "half bfloat16 hardsigmoid hardswish hardtanh le leaky_relu logical_not logsigmoid long lt maximum minimum mish "
    "ne neg relu relu6 selu sigmoid silu sin softplus softsign square tanh to"
)
_ALONG_DIM = "softmax log_softmax logsumexp cumsum argmax argmin amax amin"
_LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits soft_margin_loss"
_MASKED_SELECT = set(_functions("masked_select"))
_IN_PLACE_SCATTER = set(_functions("masked_scatter_"))
_MASKED_SCATTER = _IN_PLACE_SCATTER | set(_functions("masked_scatter"))
_AT_INDEX = (Tensor.__getitem__, Tensor.__setitem__)
_INDEX_PUT = set(_functions("index_put", "index_put_"))
_MEAN = set(_functions("mean"))
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")),
    *_functions("is_floating_point", "is_complex", "dim", "is_tensor"),
    Tensor.__hash__,
}
# Functions that change a selection, and those that return a new one.
IN_PLACE: dict[Any, Any] = {
    **{getattr(Tensor, f"__i{name}__"): getattr(Tensor, f"__{name}__") for name in ("add", "sub", "mul", "truediv")},
    **{getattr(Tensor, f"{name}_"): getattr(Tensor, name) for name in ("add", "sub", "mul", "div", "clamp", "neg")},
}
RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_functions(*_FINITE.split()), _elementwise),
    **dict.fromkeys(_functions("add", "sub", "mul", reflected=True), _elementwise),
    **dict.fromkeys(_functions("div", "true_divide", "truediv"), _quotient),
    **dict.fromkeys(_functions("pow"), _power),
    **dict.fromkeys((F.linear, F.layer_norm, F.rms_norm), _along_rest),
    **dict.fromkeys(_functions(*_ALONG_DIM.split()), _along_dim),
    **dict.fromkeys(_functions("sum", "mean"), _reduction),
    Tensor.__getitem__: _part_of_rest,
    **dict.fromkeys(_functions(*_LOSSES.split()), _loss),
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _cross_entropy),
}
