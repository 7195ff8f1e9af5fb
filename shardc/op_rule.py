"""The rule of an op: what the table holds, or what torch says of pointwise ops."""

from __future__ import annotations

from typing import Any

from shardc.node import is_pointwise
from shardc.rule import RULES, OpRule, pointwise_rule


def op_rule(target: Any) -> OpRule | None:
    """The table's entry for an op; every pointwise op has one."""
    found = RULES.get(target)
    if found is None and is_pointwise(target):
        found = RULES[target] = OpRule(pointwise_rule)
    return found
