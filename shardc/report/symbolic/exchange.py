"""Rows that neighbours exchange, as expressions, and the conditions under which these hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from shardc.language.errors import ShardingError
from shardc.language.windows import AROUND, FILLED, Windows, most_rows_sent
from shardc.program.collective import EXCHANGES
from shardc.program.communication import members
from shardc.report.symbolic.condition import Condition, CutCondition, LengthCondition, value
from shardc.report.symbolic.form import Point
from shardc.report.symbolic.symbolic_program import SymbolicProgram


def count_rows(values: tuple[Any, ...]) -> tuple[Any, Any]:
    """The rows that the busiest rank gives and takes in an exchange, of windows in numbers or in expressions.

    Asserts that windows in expressions have a row count: ``exchange_conditions`` raises for those that have none.
    """
    if all(isinstance(number, int) for number in values):
        return most_rows_sent(values)
    rows = _rows(Windows(*values))
    assert rows is not None, f"{values} have no row count"
    return rows, rows


def exchange_conditions(symbolic: SymbolicProgram) -> Iterator[Condition]:
    """The conditions under which neighbours exchange as many rows as their expressions say.

    Raises a ShardingError for an exchange that has none: chunks of several lengths, windows that move against them.
    """
    for node, here in zip(symbolic.expressed.graph.nodes, symbolic.reference.graph.nodes, strict=True):
        if any(part.kind == "rechunk" for part in members(node)):
            raise _no_expression(symbolic, here)
        expressed: tuple[Any, ...] = node.args
        numbers: tuple[Any, ...] = here.args
        if node.target in EXCHANGES and numbers[1]:
            conditions = _conditions(Windows(*expressed[3]), Windows(*numbers[3]), symbolic.point)
            if conditions is None:
                raise _no_expression(symbolic, here)
            yield from conditions


def _conditions(window: Windows, here: Windows, point: Point) -> list[Condition] | None:
    """The conditions of windows, given in expressions and in numbers at a point; None where they have no row count."""
    import sympy

    step = abs(here.stride)
    if all(isinstance(number, int) for number in window.values):  # as on a mesh that is fixed
        return []
    if window == Windows(window.count, window.length, window.length, 0):  # chunks as they are
        return []
    left_over = sympy.expand(window.length - step * window.total)
    is_aligned = here.length % here.count == 0 and here.chunk * step * here.count == here.length
    is_fixed = isinstance(window.span, int) and getattr(left_over, "is_number", True) and left_over < 2 * step
    is_known = here.beyond == FILLED or (here.beyond == AROUND and here.span == here.stride == 1)
    if not is_aligned or not is_fixed or here.fixed_shard_size or not is_known:
        return None
    rows = _rows(window)
    if rows is None or value(rows, point) != most_rows_sent(here.values)[0]:
        return None
    conditions: list[Condition] = [CutCondition(window.length, step * window.count, is_even=True)]
    margins = _margins(window) if here.stride > 0 else None
    if margins and max(margins) > 1:
        conditions.append(LengthCondition(window.length, window.count, max(margins)))
    return conditions


def _rows(window: Windows) -> Any | None:
    """Rows that the busiest rank gives to others; None where windows start at no fixed distance from their chunks.

    An end rank has one neighbour alone, so that of two ranks none gives to both sides.
    """
    import sympy

    if window.stride < 0:
        return window.length / window.count
    margins = _margins(window)
    if margins is None:
        return None
    left, right = margins
    if window.beyond == AROUND or not left or not right:
        return left + right
    if left == right:
        return left * sympy.Min(2, window.count - 1)
    return max(left, right) + min(left, right) * sympy.Min(1, window.count - 2)


def _margins(window: Windows) -> tuple[int, int] | None:
    """Elements before a chunk and behind it that its window has; None where these are no fixed numbers.

    Around the ends of a dim they are counted on the side where they are fewer.
    """
    import sympy

    is_around = window.beyond == AROUND
    before = sympy.expand(window.length - window.start) if is_around else -window.start
    behind = sympy.expand(window.start + window.span - window.stride)
    fixed = [int(each) if getattr(each, "is_number", True) else None for each in (before, behind)]
    if fixed.count(None) > is_around:
        return None
    left, right = (max(0, each or 0) for each in fixed)
    if is_around and None not in fixed:
        return (left, 0) if left < right else (0, right)
    return left, right


def _no_expression(symbolic: SymbolicProgram, node: fx.Node) -> ShardingError:
    source = symbolic.reference.source(node)
    where = ", ".join(word for word in (source.module, source.location) if word) or "the model"
    what = f"neighbours exchange the edges of their chunks of {symbolic.reference.type(node)}"
    problem = "the chunks are not alike or not moved by whole steps, and how many rows that are has no expression"
    remedy = "start from sizes that the mesh divides, or count at sizes: --at ... --recompile"
    return ShardingError(f"{node.name} in {where}", what, problem, remedy)
