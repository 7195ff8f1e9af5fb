"""Sizes that follow from sizes of inputs, so that one program serves calls of many sizes.

Where a dim of an input may have other sizes, a symbol of torch stands for it during capture. Every number that follows
from it is a ``Size`` or a ``Ratio``: an int or a float that knows its expression. Passes compute with it as with any
number, and what they compare is recorded by torch as a guard: the program holds where all guards hold.

Python gives a plain number for ``float()`` and ``range()`` of a size, for functions of ``math``, and where a float
stands on the left of an operator: a program is compared at several sizes before it is used, which finds it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any


class Symbolic:
    """A number with ``symbolic``, the torch.SymInt or torch.SymFloat that it is the value of."""

    symbolic: Any

    @property
    def expression(self) -> Any:
        """How it follows from symbols, in sympy."""
        return self.symbolic.node.expr

    @property
    def environment(self) -> Any:
        """The ShapeEnv of torch that its symbols and guards are of."""
        return self.symbolic.node.shape_env

    def __hash__(self) -> int:
        return hash((id(self.environment), self.expression))  # tables tell it from the number that it equals now

    def __eq__(self, other: object) -> bool:
        is_foreign = isinstance(other, Symbolic) and other.environment is not self.environment
        return isinstance(other, (int, float)) and not is_foreign and bool(self.symbolic == symbolic_of(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    def __str__(self) -> str:
        return str(self.expression)

    def __repr__(self) -> str:
        return str(self.expression)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _computing(compute: Callable[..., Any], is_reflected: bool = False) -> Callable[..., Any]:
    """A method that computes with symbolic numbers, which record what is compared."""

    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        operands = [self.symbolic, *map(symbolic_of, others)]
        return number_of(compute(*(reversed(operands) if is_reflected else operands)))

    return method


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(Symbolic, f"__{_name}__", _computing(getattr(operator, _name)))
    setattr(Symbolic, f"__r{_name}__", _computing(getattr(operator, _name), is_reflected=True))
for _name in ("neg", "pos", "abs", "lt", "le", "gt", "ge"):
    setattr(Symbolic, f"__{_name}__", _computing(getattr(operator, _name)))


class Size(Symbolic, int):
    """An int that follows from sizes of inputs."""


class Ratio(Symbolic, float):
    """A float that follows from sizes of inputs."""


def number_of(value: Any) -> Any:
    """A symbolic number of torch as a Size or a Ratio, as a plain number where it is constant; others as they are.

    A comparison becomes a bool, by a guard.
    """
    if type(value) in (int, float, bool):
        return value
    import torch  # the command line prints its help without

    if isinstance(value, torch.SymBool):
        return bool(value)
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    is_int, node = isinstance(value, torch.SymInt), value.node
    constant = node.maybe_as_int() if is_int else node.maybe_as_float()
    if constant is not None:
        return constant
    number: Any = (Size if is_int else Ratio)(node.hint)
    number.symbolic = value
    return number


def symbolic_of(value: Any) -> Any:
    """A Size or a Ratio as torch's symbolic number; others as they are."""
    return value.symbolic if isinstance(value, Symbolic) else value


def plain(number: Any) -> Any:
    """A Size as a plain int, others as they are: prices are those of the present sizes, and guard nothing."""
    return int(number) if isinstance(number, Size) else number


def at_most(most: int, number: Any) -> Any:
    """The number, or ``most`` where it is more; of an expression in sympy the expression of that."""
    if not hasattr(number, "free_symbols"):
        return min(most, number)
    import sympy

    return sympy.Min(most, number)


def common_divisor(one: int, other: int) -> int:
    """The greatest common divisor; of a Size the greatest that it has whatever the sizes are."""
    if not isinstance(one, Symbolic) and not isinstance(other, Symbolic):
        return math.gcd(one, other)
    import sympy

    environment = next(each.environment for each in (one, other) if isinstance(each, Symbolic))
    divisor = sympy.gcd(*(each.expression if isinstance(each, Symbolic) else each for each in (one, other)))
    if divisor.is_number:
        return int(divisor)
    hint = environment.guarding_hint_or_throw(divisor)
    result: int = number_of(environment.create_symintnode(divisor, hint=hint))
    return result


def slice_bounds(start: int | None, end: int | None, step: int | None, size: int) -> tuple[int, int, int]:
    """``slice(start, end, step).indices(size)`` for a step forward, where numbers may be sizes."""

    def within(at: int) -> int:
        return max(0, min(at + size if at < 0 else at, size))

    return 0 if start is None else within(start), size if end is None else within(end), 1 if step is None else step
