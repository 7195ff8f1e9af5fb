"""Which cases of a property make test runs, and which are a sweep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases; those that are not chosen are a sweep."""
    return [pytest.param(each, marks=pytest.mark.slow if each in chosen else pytest.mark.sweep) for each in cases]
