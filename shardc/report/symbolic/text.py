"""Text and JSON of a symbolic plan: its expressions, the region where it holds, and the numbers at points."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardc.costs.stage_record import StageRecord
from shardc.costs.step import StepCost
from shardc.language.collective_kind import WHOLE_PAYLOAD
from shardc.language.text import table
from shardc.report.symbolic.form import Point, point_text
from shardc.report.symbolic.learn import FEW
from shardc.report.symbolic.plan import SymbolicPlan

POWERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
ROOM = 6  # letters that a product of sent bytes may have more than a sum, for (n - 1)/n
PLACED = ("gathered", "peak")  # classes of memory that are counted at one place of the program
PLACE = "where most lives at these sizes"
ROUNDED = "what a rank sends is rounded down to whole bytes, a row at a time"

Numbers = Sequence[tuple[Point, StepCost]]


def plan_text(plan: SymbolicPlan, numbers: Numbers = ()) -> str:
    """Expressions, the region, and the numbers at points."""
    parts = [f"plan {digest(plan)} of {point_text(plan.reference)}\n", costs_text(plan), region_text(plan)]
    return "\n".join([*parts, *([numbers_text(numbers)] if numbers else [])])


def numbers_text(numbers: Numbers) -> str:
    """The cost of a step at points."""
    return "\n".join(f"at {point_text(point)}\n\n{cost.text()}" for point, cost in numbers)


def digest(plan: SymbolicPlan) -> str:
    """A hash of the plan without its sizes: of its ops, shardings and collectives."""
    lines = plan.learned.outlines["rematerialize"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def costs_text(plan: SymbolicPlan) -> str:
    """A line for each kind of collective, class of memory, and the operations."""
    cost = plan.cost
    rows = []
    for each in cost.traffic:
        sent = expression_text(each.wire_bytes, 0 if each.kind in WHOLE_PAYLOAD else ROOM)
        rows.append((*each.key, expression_text(each.values), expression_text(each.bytes), sent))
    sends, of = "bytes that a rank sends", "one rank"
    if plan.rank is not None:
        sends, of = "bytes that a rank of each stage sends", f"rank {plan.rank} of the pipeline, the fullest"
    header = ("phase", "kind", "axes", "values", "bytes", sends)
    places = {name: f"  ({PLACE})" for name in PLACED if cost.memory.get(name, 0) != 0}
    memory = [(name, f"{expression_text(size)}{places.get(name, '')}") for name, size in cost.memory.items()]
    traffic_text = f"{_columns(header, rows)}{ROUNDED}\n" if rows else "no collectives\n"
    memory_text = _columns((f"memory of {of}", "bytes"), memory)
    flops_text = _columns(("floating-point operations", "count"), [("one rank", expression_text(cost.flops))])
    return "\n".join([traffic_text, memory_text, flops_text])


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, all aligned to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def region_text(plan: SymbolicPlan) -> str:
    """The region where the plan holds: a range for each symbol, and the conditions."""
    region = plan.region
    ranges = [(name, region.low[name], region.high[name]) for name in region.low]
    lines = list(map(_typed, region.conditions))
    small = f"{FEW} modules" if plan.repeated else "the model"
    lines.append(f"compiled at {len(region.probes)} points, its ends among them; the passes check each --at on {small}")
    if plan.rank is not None:  # the stages of a pipeline are a part of the plan
        record = StageRecord(plan.here)
        name, count = record.schedule.name, record.schedule.num_microbatches
        lines += [f"{count} microbatches by {name}, whose order and fullest rank are as here, and so are the stages:"]
        for stage in record.entries():
            modules = " to ".join(filter(None, dict.fromkeys(stage["modules"])))
            lines.append(f"stage {stage['stage']} on rank {stage['rank']}: {modules}")
    return f"{table(('symbol', 'from', 'to'), ranges)}\n" + "".join(f"{line}\n" for line in lines)


def expression_text(expression: Any, room: int = 0) -> str:
    """``16·B·L·T·d·(tp - 1)/(dp·tp)``: as a product where that is longer than a sum by no more than ``room``."""
    import sympy

    ceiled = sympy.sympify(expression).replace(sympy.floor, lambda inside: -sympy.ceiling(-inside, evaluate=False))
    product, summands = _typed(str(sympy.factor(ceiled))), _typed(str(sympy.expand(ceiled)))
    return product if len(product) <= len(summands) + room else summands


def _typed(text: str) -> str:
    text = re.sub(r"\*\*(\d+)", lambda power: power[1].translate(POWERS), text)
    return text.replace("*", "·").replace("Min(", "min(").replace("Max(", "max(")


def plan_record(plan: SymbolicPlan, numbers: Numbers = ()) -> dict[str, Any]:
    """The JSON form, version 1; expressions as Python reads them."""
    region = plan.region
    return {
        "version": 1,
        "plan": digest(plan),
        "reference": dict(plan.reference),
        "expressions": _expressions(plan.cost),
        "region": {
            "low": dict(region.low),
            "high": dict(region.high),
            "conditions": region.conditions,
            "compiled": [dict(point) for point in region.probes],
        },
        "at": [{"point": dict(point), **cost.record()} for point, cost in numbers],
    }


def _expressions(cost: StepCost) -> dict[str, Any]:
    """The record of a cost with bytes on the wire rounded down, and without counts, which depend on buckets."""
    import sympy

    rounded = [replace(each, wire_bytes=sympy.floor(each.wire_bytes)) for each in cost.traffic]
    record = replace(cost, traffic=tuple(rounded)).record()
    for row in record["traffic"]:
        del row["count"]
    texts: dict[str, Any] = _texts(record)
    return texts


def _texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _texts(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_texts(entry) for entry in value]
    return value if isinstance(value, str) else str(value)
