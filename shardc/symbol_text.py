"""How expressions, the plan that they are of, and the region where it holds are printed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardc.step_cost import StepCost
from shardc.symbol_form import Point
from shardc.symbol_probe import FEW, point_text
from shardc.text import table

if TYPE_CHECKING:
    from shardc.symbol_plan import SymbolicPlan

POWERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
ROOM = 6  # letters that a product of what is sent may have more than a sum, for (n - 1)/n
PEAK = "where most lives at these sizes, buckets apart"


Numbers = Sequence[tuple[Point, StepCost]]


def plan_text(plan: SymbolicPlan, numbers: Numbers = ()) -> str:
    """Expressions, the region, and the numbers at points."""
    parts = [f"plan {digest(plan)} of {point_text(plan.reference)}\n", costs_text(plan), region_text(plan)]
    parts += [f"at {point_text(point)}\n\n{cost.text()}" for point, cost in numbers]
    return "\n".join(parts)


def digest(plan: SymbolicPlan) -> str:
    """What two plans that are one have in common: ops, shardings and collectives without their sizes."""
    lines = plan.learned.outlines["rematerialize"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def costs_text(plan: SymbolicPlan) -> str:
    """A line for each kind of collective, class of memory, and the operations."""
    cost = plan.cost
    rows = [
        (*each.key, *map(expression_text, (each.count, each.bytes)), expression_text(each.wire_bytes, ROOM))
        for each in cost.traffic
    ]
    header = ("phase", "kind", "axes", "values", "bytes", "bytes that a rank sends")
    memory = [
        (name, f"{expression_text(size)}{f'  ({PEAK})' * (name == 'peak')}") for name, size in cost.memory.items()
    ]
    parts = [
        _columns(header, rows) if rows else "no collectives\n",
        _columns(("memory of one rank", "bytes"), memory),
        _columns(("floating-point operations", "count"), [("one rank", expression_text(cost.flops))]),
    ]
    return "\n".join(parts)


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All to the left, for numbers and expressions alike."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def region_text(plan: SymbolicPlan) -> str:
    """Where the plan holds."""
    region = plan.region
    ranges = [(name, region.low[name], region.high[name]) for name in region.low]
    lines = [cut.text() for cut in region.conditions]
    small = f"{FEW} modules" if plan.repeated else "the model"
    lines.append(f"compiled at {len(region.probes)} points, its ends among them; the passes check each --at on {small}")
    return f"{table(('symbol', 'from', 'to'), ranges)}\n" + "".join(f"{line}\n" for line in lines)


def expression_text(expression: Any, room: int = 0) -> str:
    """``16·B·L·T·d·(tp - 1)/(dp·tp)``: as a product where that is longer than a sum by no more than ``room``."""
    import sympy

    found = sympy.sympify(expression).replace(sympy.floor, lambda inside: -sympy.ceiling(-inside, evaluate=False))
    product, summands = _typed(str(sympy.factor(found))), _typed(str(sympy.expand(found)))
    return product if len(product) <= len(summands) + room else summands


def _typed(text: str) -> str:
    text = re.sub(r"\*\*(\d+)", lambda power: power[1].translate(POWERS), text)
    return text.replace("*", "·")


def plan_record(plan: SymbolicPlan, numbers: Numbers = ()) -> dict[str, Any]:
    """As JSON has it: expressions as python reads them."""
    region = plan.region
    return {
        "version": 1,
        "plan": digest(plan),
        "reference": dict(plan.reference),
        "expressions": _texts(plan.cost.record()),
        "region": {
            "low": dict(region.low),
            "high": dict(region.high),
            "conditions": [cut.text() for cut in region.conditions],
            "compiled": [dict(point) for point in region.probes],
        },
        "at": [{"point": dict(point), **cost.record()} for point, cost in numbers],
    }


def _texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _texts(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_texts(entry) for entry in value]
    return value if isinstance(value, str) else str(value)
