"""The values of numbers that follow from sizes, at given sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from shardc.language.size import Size, Symbolic

Sizes = Mapping[str, int]  # the values of torch's symbols, by name


def value_at(value: Any, sizes: Sizes | None) -> Any:
    """The plain number that a Size or a Ratio is at some sizes, or without them now; others as they are."""
    if not isinstance(value, Symbolic):
        return value
    if sizes is None:
        return value.symbolic.node.hint
    symbols = {symbol: sizes[symbol.name] for symbol in value.expression.free_symbols}
    kind = int if isinstance(value, Size) else float
    return kind(evaluated(value.expression, symbols))


def evaluated(expression: Any, symbols: dict[Any, int]) -> Any:
    """An expression or a condition of torch, with values for its symbols."""
    return sympy_interp(PythonReferenceAnalysis, symbols, expression)
