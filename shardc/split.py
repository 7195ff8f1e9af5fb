"""What every way to balance stages gives: the stage of each unit, and how good that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Split:
    """The stage of each unit, and what the heaviest stage, or rank with several, weighs: ``heaviest``.

    No split that was looked for is lighter than ``bound``; ``is_exact``: none is lighter than this one.
    """

    stages: tuple[int, ...]
    heaviest: Any
    bound: Any

    @property
    def is_exact(self) -> bool:
        """Whether the bound is met."""
        return bool(self.heaviest == self.bound)


def stages_between(cuts: Sequence[int], num_units: int) -> tuple[int, ...]:
    """The stage of each unit of a chain, cut at these indices."""
    return tuple(sum(unit >= cut for cut in cuts) for unit in range(num_units))
