"""What neighbours exchange of a cut dim's edges where sizes are expressions, and where that is so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardc.bucket import members
from shardc.collective import EXCHANGES
from shardc.error import ShardingError
from shardc.symbol_expression import Cut, Symbolic, value
from shardc.symbol_form import Point
from shardc.window import AROUND, FILLED, Windows, most_sent

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, slots=True)
class Reach:
    """Each of ``shards`` chunks of a dim has as many elements as its neighbours take of it: ``rows`` or more."""

    size: Any
    shards: Any
    rows: int

    def holds(self, point: Point) -> bool:
        """Whether it is so at a point."""
        return bool(value(self.size, point) >= self.rows * value(self.shards, point))

    def text(self) -> str:
        """As one says it."""
        return f"{self.size} is {self.rows}*{self.shards} or more"


def rows_expressed(window: Windows) -> Any:
    """Elements that the rank gives that gives most, in windows that start where chunks do but for a fixed number.

    An end rank has one neighbour alone, so that of two ranks none gives to both sides.
    """
    import sympy

    if window.stride < 0:
        return window.length / window.count
    left, right = _reach(window)
    if window.beyond == AROUND or not left or not right:
        return left + right
    if left == right:
        return left * sympy.Min(2, window.count - 1)
    return max(left, right) + min(left, right) * sympy.Min(1, window.count - 2)


def _reach(window: Windows) -> tuple[int, int]:
    """Elements before a chunk and behind it that its window has; around, on the side where they are fewer."""
    import sympy

    fixed = [
        int(each) if getattr(each, "is_number", True) else None
        for each in (
            sympy.expand(window.length - window.start) if window.beyond == AROUND else -window.start,
            sympy.expand(window.start + window.span - window.stride),
        )
    ]
    known = [each for each in fixed if each is not None]
    assert known and (window.beyond == AROUND or len(known) == 2), f"{window} starts at no fixed distance"
    before, behind = (max(0, each or 0) for each in fixed)
    if window.beyond == AROUND and len(known) == 2:
        return (before, 0) if before < behind else (0, behind)
    return before, behind


def reaches(symbolic: Symbolic) -> Iterator[Cut | Reach]:
    """Where what neighbours exchange is as its expression says.

    Raises a ShardingError for what has none: chunks of several lengths, windows that move against the chunks.
    """
    program, _ = symbolic.expressed
    for node, here in zip(program.graph.nodes, symbolic.reference.graph.nodes, strict=True):
        if any(part.kind == "rechunk" for part in members(node)):
            raise _no_expression(symbolic, here)
        expressed: tuple[Any, ...] = node.args
        numbers: tuple[Any, ...] = here.args
        if node.target in EXCHANGES and numbers[1]:
            found = _conditions(Windows(*expressed[3]), Windows(*numbers[3]), symbolic.point)
            if found is None:
                raise _no_expression(symbolic, here)
            yield from found


def _conditions(window: Windows, here: Windows, point: Point) -> list[Cut | Reach] | None:
    """Of windows given as expressions and as numbers at a point; None where they have no expression."""
    import sympy

    most, step = most_sent(here.values)[0], abs(here.stride)
    if all(isinstance(number, int) for number in window.values):  # as on a mesh that is held
        return []
    if window == Windows(window.count, window.length, window.length, 0):  # chunks as they are
        return []
    left_over = sympy.expand(window.length - step * window.total)
    is_aligned = here.length % here.count == 0 and here.chunk * step * here.count == here.length
    is_fixed = isinstance(window.span, int) and getattr(left_over, "is_number", True) and left_over < 2 * step
    is_known = here.beyond == FILLED or (here.beyond == AROUND and here.span == here.stride == 1)
    if not is_aligned or not is_fixed or here.of or not is_known:
        return None
    try:
        rows = rows_expressed(window)
    except AssertionError:
        return None
    if value(rows, point) != most:
        return None
    found: list[Cut | Reach] = [Cut(window.length, step * window.count, is_even=True)]
    if here.stride > 0 and max(_reach(window)) > 1:
        found.append(Reach(window.length, window.count, max(_reach(window))))
    return found


def _no_expression(symbolic: Symbolic, node: fx.Node) -> ShardingError:
    source = symbolic.reference.source(node)
    where = ", ".join(word for word in (source.module, source.location) if word) or "the model"
    return ShardingError(
        f"{node.name} in {where}",
        f"neighbours exchange the edges of their chunks of {symbolic.reference.type(node)}",
        "the chunks are not alike or not moved by whole steps, and how many rows that are has no expression",
        "start from sizes that the mesh divides, or count at sizes: --at ... --recompile",
    )
