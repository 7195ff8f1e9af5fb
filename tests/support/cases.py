"""Divides the cases of a property between ``make test`` and ``make sweep``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases as parameters: chosen ones are marked slow, all others sweep."""
    return [pytest.param(each, marks=pytest.mark.slow if each in chosen else pytest.mark.sweep) for each in cases]
