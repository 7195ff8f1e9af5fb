"""Budgets of recomputation: a plan fills the memory that there is, after few compiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from shardc import Remat
from shardc.search.pricing.whole import Cost, WholePlans
from shardc.search.space.plan import Axis, Plan
from shardc.search.variants import FULL, recompute_less

BLOCKS, ALL = 100, 2000  # saved bytes when blocks are computed again, and when nothing is
PLAN = Plan((Axis("dp", 2),), remat=Remat("blocks.*"))


@dataclass
class Task0:
    """What a search asks for."""

    memory: float
    may_recompute: bool = True


@dataclass
class Plans:
    """Plans whose peak grows with what they save, not quite in a line; ``too_slow``: those that save less than this."""

    task: Task0
    bend: float
    too_slow: int = 0
    costs: dict[Plan, Cost] = field(default_factory=dict)

    def compile(self, plans: Iterable[Plan]) -> None:
        """Cost of plans."""
        for plan in plans:
            budget = ALL if plan.remat is None else plan.remat.budget or BLOCKS
            memory = {"saved": budget, "peak": round(500 + budget * (1 - self.bend * budget / ALL))}
            self.costs[plan] = Cost(1.0 - budget / 1e4, 0.0, 0.0, 0.0, memory, 0, 0, 0)

    def fits(self, plan: Plan) -> bool:
        """Whether the peak is within the memory."""
        return self.costs[plan].memory["peak"] <= self.task.memory

    def may_surpass(self, plan: Plan) -> bool:
        """Whether it is fast enough."""
        return self.costs[plan].memory["saved"] >= self.too_slow


def tried(memory: float, bend: float, **further: Any) -> list[tuple[int, int]]:
    """Saved bytes and peak of the plans that were compiled beside the first two."""
    plans = Plans(Task0(memory, **further), bend)
    plans.compile([PLAN])
    recompute_less(cast(WholePlans, plans), PLAN)
    return [(cost.memory["saved"], cost.memory["peak"]) for cost in plans.costs.values()][2:]


@pytest.mark.parametrize("bend", [0.0, 0.1, 0.3, -0.3])
@pytest.mark.parametrize("memory", [700, 1000, 1400, 1700])
def test_a_plan_fills_the_memory_that_there_is(memory: int, bend: float) -> None:
    found = tried(memory, bend)
    assert FULL * memory < found[-1][1] <= memory
    assert len(found) <= 3


def test_a_straight_line_is_met_at_once() -> None:
    assert len(tried(1234, 0.0)) == 1


def test_nothing_is_tried_where_all_fits_or_nothing_may_be_computed_again() -> None:
    assert tried(3000, 0.1) == [] == tried(1000, 0.1, may_recompute=False)


def test_no_budget_is_tried_below_one_that_is_too_slow() -> None:
    plans = Plans(Task0(1000), -0.3, too_slow=ALL + 1)
    plans.compile([PLAN])
    recompute_less(cast(WholePlans, plans), PLAN)
    assert len(plans.costs) == 2
