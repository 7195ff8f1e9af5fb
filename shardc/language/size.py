"""Symbolic sizes: numbers computed from sizes of inputs, so that one program serves calls of many sizes.

During capture a torch symbol stands for each dim of an input whose size may vary. Every number computed from it is a
``Size`` or a ``Ratio``: an int or a float that carries its expression. Passes compute with it as with any number. torch
records each comparison as a guard, and the program is valid for all sizes that satisfy the guards.

Python returns a plain number for ``float()`` and ``range()`` of a size, for functions of ``math``, and for an operator
whose left operand is a float. Comparing a program at several sizes before it is used finds such losses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any


class Symbolic:
    """A number that carries its symbolic form, the torch.SymInt or torch.SymFloat ``symbolic``."""

    symbolic: Any

    @property
    def expression(self) -> Any:
        """The sympy expression of the number."""
        return self.symbolic.node.expr

    @property
    def environment(self) -> Any:
        """The torch ShapeEnv of its symbols and guards."""
        return self.symbolic.node.shape_env

    def __hash__(self) -> int:
        return hash((id(self.environment), self.expression))  # differs from that of the plain number

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
    """A method that applies ``compute`` to the symbolic forms, so that torch records comparisons."""

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
    """An int computed from sizes of inputs."""


class Ratio(Symbolic, float):
    """A float computed from sizes of inputs."""


def number_of(value: Any) -> Any:
    """Convert a symbolic number of torch to a Size or a Ratio, or to a plain number if it is constant.

    A symbolic bool becomes a bool and adds a guard. Other values are returned unchanged.
    """
    if type(value) in (int, float, bool):
        return value
    import torch  # the command line prints its help without torch

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
    """The symbolic number of torch behind a Size or a Ratio; other values unchanged."""
    return value.symbolic if isinstance(value, Symbolic) else value


def plain(number: Any) -> Any:
    """A Size as a plain int, other values unchanged: costs are those of the present sizes and add no guards."""
    return int(number) if isinstance(number, Size) else number


def at_most(most: int, number: Any) -> Any:
    """The smaller of ``most`` and the number; for a sympy expression, the expression of that."""
    if not hasattr(number, "free_symbols"):
        return min(most, number)
    import sympy

    return sympy.Min(most, number)


def common_divisor(one: int, other: int) -> int:
    """The greatest common divisor; with a Size, the greatest one that holds for all sizes."""
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
    """``slice(start, end, step).indices(size)`` for a positive step; any of the numbers may be a Size."""

    def within(at: int) -> int:
        return max(0, min(at + size if at < 0 else at, size))

    return 0 if start is None else within(start), size if end is None else within(end), 1 if step is None else step
