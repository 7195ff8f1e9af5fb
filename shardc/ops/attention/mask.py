"""Attention masks that are made tile by tile, by a few pointwise ops on rows and columns such as positions or padding.

A model makes its mask from vectors of positions and of the batch::

    mask[b, 0, i, j] = 0 if row[i] >= column[j] and kept[b, j] else -inf

Each tile of attention makes its own part, so that nothing of the size of positions by positions is made. If the vectors
are positions, interval arithmetic tells whether a tile sees everything, and needs no mask, or nothing, and is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor

Interval = tuple[float, float]  # the least and the greatest possible value; False is 0 and True is 1
LARGEST = 1e4  # the largest number that leaves a logsumexp enough digits
REFERENCE = "value"  # a pair of this and an index, in the arguments of a step, refers to an earlier value


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of a mask. ``along``: the dim of the mask along which it varies, ``row`` or ``column``, or neither.

    ``start``: its elements count up from this number; None if they do not. ``is_bool``: they are True or False.
    ``is_float``: they are floats.
    """

    along: str = ""
    start: int | None = None
    is_bool: bool = False
    is_float: bool = False

    def text(self, index: int) -> str:
        """The leaf in an expression: ``row``, ``column - 8``, or the number of the leaf."""
        if self.start is None:
            return f"given {index}"
        return self.along + (f" {'+-'[self.start < 0]} {abs(self.start)}" if self.start else "")

    def interval(self, rows: range, columns: range) -> Interval:
        """The interval of its elements at these positions."""
        positions = rows if self.along == "row" else columns
        if self.start is None or not positions:
            return (0, 1) if self.is_bool else UNKNOWN
        return self.start + positions[0], self.start + positions[-1]


@dataclass(frozen=True, slots=True)
class Step:
    """A call of an op, whose arguments may refer to earlier values: the leaves, then the results of earlier steps."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def filled(self, values: Sequence[Any], constant: Callable[[Any], Any] = lambda arg: arg) -> list[Any]:
        """The arguments, with values in place of references; all others become ``constant(argument)``."""
        return [
            values[arg[1]] if isinstance(arg, tuple) and arg[:1] == (REFERENCE,) else constant(arg) for arg in self.args
        ]


@dataclass(frozen=True, slots=True)
class Mask:
    """The steps that make a mask of its leaves; the value of the last step, or of the only leaf, is added to scores."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        """The mask as an expression, such as ``where(le(column, row), 0.0, -inf)``."""
        texts = [leaf.text(i) for i, leaf in enumerate(self.leaves)]
        for step in self.steps:
            name, args = step.op.partition(".")[0], [str(arg) for arg in step.filled(texts)]
            texts.append(args[-1] if step.op in CONSTANTS else f"{name}({', '.join(args)})")
        return texts[-1]

    @property
    def may_lower(self) -> bool:
        """Whether a finite number, such as ``finfo.min``, may hide all keys of a query.

        Attention is then the mean of all values. The logsumexp of a tile is that number, regardless of the number of
        its keys, so that tiles cannot be joined in proportion to their keys.
        """
        numbers = (abs(arg) for step in self.steps for arg in step.args if isinstance(arg, (int, float)))
        return any(leaf.is_float for leaf in self.leaves) or any(LARGEST < number < inf for number in numbers)

    def make(self, leaves: Sequence[Tensor]) -> Tensor:
        """Make the mask from its leaves, or a piece of it from pieces of them."""
        *_, values = self._made(leaves)
        made: Tensor = values[-1]
        return made

    def workspace(self, leaves: Sequence[Tensor]) -> int:
        """The most bytes that ``make`` holds at a time besides the leaves, which may be on torch's meta device."""
        made = (values[len(leaves) :] for values in self._made(leaves))
        return max(sum(x.nbytes for x in values if x is not None) for values in made)

    def _made(self, leaves: Sequence[Tensor]) -> Iterator[list[Any]]:
        """The values after each step, without those that no later step reads."""
        values: list[Any] = list(leaves)
        last = {
            arg[1]: i
            for i, step in enumerate(self.steps)
            for arg in step.args
            if isinstance(arg, tuple) and arg[:1] == (REFERENCE,)
        }
        yield values
        for i, step in enumerate(self.steps):
            device = {"device": leaves[0].device} if step.op in CONSTANTS else {}
            values.append(op_named(step.op)(*step.filled(values), **dict(step.kwargs), **device))
            yield values
            values[:-1] = [None if last.get(j, i) <= i else value for j, value in enumerate(values[:-1])]

    def shows(self, rows: range, columns: range) -> bool | None:
        """True if each row sees all these columns, False if none sees any, None if neither holds or it is not known."""
        values = [leaf.interval(rows, columns) for leaf in self.leaves]
        for step in self.steps:
            name, kwargs = step.op.partition(".")[0], dict(step.kwargs)
            is_plain = not kwargs or (name in OF_DTYPE and kwargs.keys() == {"dtype"})
            infer = INTERVALS.get(name) if is_plain else None
            values.append(UNKNOWN if infer is None else infer(*step.filled(values, _interval), **kwargs))
        return True if values[-1] == (0, 0) else False if values[-1][1] == -inf else None


AS_IT_IS = Mask((Leaf("both", is_float=True),))  # a mask that is passed as a tensor, not made


def has_rows(shape: Sequence[int]) -> bool:
    """Whether a leaf of this shape has a row for each query."""
    return len(shape) > 1 and shape[-2] > 1


def op_named(name: str) -> Any:
    """The op of aten that a step names."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


# Interval arithmetic: the interval of the result of an op, from those of its arguments.


UNKNOWN: Interval = (-inf, inf)


def _interval(constant: Any) -> Any:
    return (constant, constant) if isinstance(constant, (bool, int, float)) else constant


def _difference(a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _sum(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _compared(holds: Callable[[float, float], bool]) -> Callable[..., Interval]:
    """A comparison that favours a larger first and a smaller second argument."""
    return lambda a, b: (int(holds(a[0], b[1])), int(holds(a[1], b[0])))


def _swapped(infer: Callable[..., Interval]) -> Callable[..., Interval]:
    return lambda a, b: infer(b, a)


def _truth(a: Interval) -> Interval:
    """Whether a number is not 0."""
    return int(a[0] > 0 or a[1] < 0), int(a != (0, 0))


def _chosen(condition: Interval, a: Interval, b: Interval) -> Interval:
    is_true, may_be_true = _truth(condition)
    if is_true:
        return a
    return (min(a[0], b[0]), max(a[1], b[1])) if may_be_true else b


def _both(a: Interval, b: Interval) -> Interval:
    a, b = _truth(a), _truth(b)
    return min(a[0], b[0]), min(a[1], b[1])


def _either(a: Interval, b: Interval) -> Interval:
    a, b = _truth(a), _truth(b)
    return max(a[0], b[0]), max(a[1], b[1])


def _negated(a: Interval) -> Interval:
    a = _truth(a)
    return 1 - a[1], 1 - a[0]


def _distance(a: Interval) -> Interval:
    ends = sorted(map(abs, a))
    return (0 if a[0] <= 0 <= a[1] else ends[0]), ends[1]


def _cast(a: Interval, dtype: Any = None) -> Interval:
    """The interval is known only for values that every dtype has."""
    if dtype == torch.bool:
        return _truth(a)
    return a if dtype is not None and dtype.is_floating_point and set(a) <= {0, 1, inf, -inf} else UNKNOWN


def _equal(a: Interval, b: Interval) -> Interval:
    return int(a[0] == a[1] == b[0] == b[1]), int(a[0] <= b[1] and b[0] <= a[1])


INTERVALS: Mapping[str, Callable[..., Interval]] = {
    "abs": _distance, "add": _sum, "sub": _difference,
    "ge": _compared(operator.ge), "gt": _compared(operator.gt),
    "le": _swapped(_compared(operator.ge)), "lt": _swapped(_compared(operator.gt)),
    "eq": _equal, "ne": lambda a, b: _negated(_equal(a, b)),
    "logical_and": _both, "logical_or": _either, "logical_not": _negated,
    "bitwise_and": _both, "bitwise_or": _either, "bitwise_not": _negated,  # of bools alone
    "where": _chosen, "masked_fill": lambda x, condition, value: _chosen(condition, value, x),
    "full": lambda shape, value, dtype=None: value, "scalar_tensor": lambda value, dtype=None: value,
    "_to_copy": _cast,
}  # fmt: skip
OF_DTYPE = ("_to_copy", "full", "scalar_tensor")  # ops that may be given a dtype
CONSTANTS = ("full.default", "scalar_tensor.default")  # ops that make a number


@lru_cache(maxsize=256)
def mask_of(values: tuple[Any, ...]) -> Mask:
    """The mask whose fields are these, as ``dataclasses.astuple`` gives them."""
    leaves, steps = values
    return Mask(tuple(Leaf(*each) for each in leaves), tuple(Step(*each) for each in steps))
