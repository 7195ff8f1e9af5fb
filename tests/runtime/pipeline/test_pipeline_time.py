"""On gloo no part of a pipeline waits for what its schedule does not say, and so it idles as long as simulated."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.bubbles import CASES, Case, bubble, lags, measure

FEW = [CASES[0], pytest.param(CASES[5], marks=pytest.mark.sweep)]  # all of them: tests.conformance


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_schedule_idles_as_long_as_simulated(gloo: Any, case: Case) -> None:
    found = measure(gloo.run, case)
    assert found.is_right, found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_simulated_part_starts_when_what_it_waits_for_ends(case: Case) -> None:
    schedule = case.planned()
    timeline = case.simulated(schedule)
    tasks = [[task for task in timeline.on(rank) if task.seconds] for rank in timeline.ranks]
    rows = [[(timeline.starts[task.name], timeline.end(task)) for task in row] for row in tasks]
    assert max(map(abs, lags(schedule, rows))) < 1e-9
    assert bubble(rows) == pytest.approx(timeline.bubble)
