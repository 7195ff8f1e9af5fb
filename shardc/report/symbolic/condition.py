"""Conditions under which a plan holds: which sizes divide which, and which chunks are long enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardc.report.symbolic.form import Point

if TYPE_CHECKING:
    import sympy


def symbols_of(names: Iterable[str]) -> dict[str, sympy.Symbol]:
    """A sympy symbol by each name: a positive whole number."""
    import sympy

    return {name: sympy.Symbol(name, positive=True, integer=True) for name in names}


def names_in(expression: object) -> set[str]:
    """The names of the symbols in an expression; none in a number."""
    return {symbol.name for symbol in getattr(expression, "free_symbols", ())}


def value(expression: Any, point: Point) -> Any:
    """An expression's value where its symbols are numbers: exact, an int where it is whole."""
    import sympy

    symbols = getattr(expression, "free_symbols", ())
    result = sympy.sympify(expression).subs({symbol: point[symbol.name] for symbol in sorted(symbols, key=str)})
    return int(result) if result.is_integer else result


@dataclass(frozen=True, slots=True)
class CutCondition:
    """The size of a dim, cut in ``shards`` pieces, is or is not a multiple of them; both are expressions."""

    size: Any
    shards: Any
    is_even: bool

    def holds(self, point: Point) -> bool:
        """Whether it is so at a point."""
        return (value(self.size, point) % value(self.shards, point) == 0) == self.is_even

    def missing_factor(self, point: Point) -> int:
        """How many times as large the size must be at a point to be cut evenly."""
        import sympy

        return int(sympy.Rational(value(self.size, point), value(self.shards, point)).q)

    def text(self) -> str:
        """``B is a multiple of 4*dp``."""
        import sympy

        whole, parts = sympy.fraction(sympy.together(sympy.sympify(self.size) / self.shards))
        return f"{whole} is {'a' if self.is_even else 'no'} multiple of {parts}"


@dataclass(frozen=True, slots=True)
class LengthCondition:
    """Each of ``shards`` chunks of a dim has at least the ``rows`` elements that its neighbours take of it."""

    size: Any
    shards: Any
    rows: int

    def holds(self, point: Point) -> bool:
        """Whether it is so at a point."""
        return bool(value(self.size, point) >= self.rows * value(self.shards, point))

    def text(self) -> str:
        """``H is 2*tp or more``."""
        return f"{self.size} is {self.rows}*{self.shards} or more"


Condition = CutCondition | LengthCondition


def independent(cuts: Sequence[CutCondition]) -> list[CutCondition]:
    """The conditions that no others imply, in their shortest form."""
    from sympy import expand, sympify

    shortest = [_without_multiples(cut) for cut in _joined_numbers(cuts)]
    conditions = [cut for cut in shortest if not expand(sympify(cut.size) / cut.shards).is_integer]
    even = {cut: sympify(cut.size) / cut.shards for cut in conditions if cut.is_even}
    symbols = {cut.size: cut.shards for cut in even if getattr(cut.size, "is_Symbol", False)}

    def is_implied(cut: CutCondition) -> bool:
        if not cut.is_even or not names_in(cut.size):
            return False
        if any((even[cut] / other).is_integer for other in even.values() if other != even[cut]):
            return True
        quotient = even[cut]
        for symbol, shards in symbols.items():
            if symbol != cut.size and quotient.has(symbol):
                quotient = quotient.subs(symbol, symbol * shards)
        return bool(expand(quotient).is_integer)

    return [cut for cut in dict.fromkeys(conditions) if not is_implied(cut)]


def _without_multiples(cut: CutCondition) -> CutCondition:
    """An even cut of a sum without the summands that are multiples: of ``H + 2*n`` by ``n`` that of ``H``."""
    from sympy import Add, expand, fraction, sympify, together

    if not cut.is_even or not names_in(cut.size):
        return cut
    summands = Add.make_args(expand(sympify(cut.size) / cut.shards))
    size, shards = fraction(together(Add(*(each for each in summands if not each.is_integer))))
    return CutCondition(size, shards, is_even=True)


def _joined_numbers(cuts: Sequence[CutCondition]) -> list[CutCondition]:
    """The conditions; those of sizes that are numbers, cut by the same axes, as one of their common divisor."""
    divisors: dict[Any, int] = {}
    for cut in cuts:
        if cut.is_even and not names_in(cut.size):
            divisors[cut.shards] = math.gcd(divisors.get(cut.shards, 0), int(cut.size))
    others = [cut for cut in cuts if not cut.is_even or names_in(cut.size)]
    return [*others, *(CutCondition(size, shards, is_even=True) for shards, size in divisors.items())]
