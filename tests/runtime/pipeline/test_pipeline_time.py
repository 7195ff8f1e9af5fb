"""A pipeline on gloo ranks idles as long as its schedule does in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.bubbles import CASES, NEAR, Case, measured

FEW = [CASES[0], pytest.param(CASES[5], marks=pytest.mark.sweep)]  # all of them: tests.conformance


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_schedule_idles_as_long_as_simulated(gloo: Any, case: Case) -> None:
    wanted = case.wanted().bubble
    assert measured(gloo.run, case, wanted) == pytest.approx(wanted, rel=NEAR)
