"""Values of symbolic numbers, which follow from sizes, at given sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from shardc.language.size import Size, Symbolic

Sizes = Mapping[str, int]  # the values of torch's symbols, by name


def value_at(value: Any, sizes: Sizes | None) -> Any:
    """The plain number of a Size or a Ratio at these sizes, by default those of the capture; other values unchanged."""
    if not isinstance(value, Symbolic):
        return value
    if sizes is None:
        return value.symbolic.node.hint
    symbols = {symbol: sizes[symbol.name] for symbol in value.expression.free_symbols}
    kind = int if isinstance(value, Size) else float
    return kind(evaluated(value.expression, symbols))


def evaluated(expression: Any, symbols: dict[Any, int]) -> Any:
    """The value of an expression or a condition of torch, given values for its symbols."""
    return sympy_interp(PythonReferenceAnalysis, symbols, expression)
