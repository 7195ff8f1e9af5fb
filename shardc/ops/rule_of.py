"""The rule of an op: what the table holds, or what torch says of pointwise ops."""

from __future__ import annotations

from typing import Any

import torch

from shardc.language.rule import RULES, OpRule, pointwise_rule


def op_rule(target: Any) -> OpRule | None:
    """The table's entry for an op; every pointwise op has one."""
    found = RULES.get(target)
    if found is None and is_pointwise(target):
        found = RULES[target] = OpRule(pointwise_rule)
    return found


def is_pointwise(target: Any) -> bool:
    """Whether torch says that an op makes each element of one element of each operand."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
