"""How the time of a run is shared out among its rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

UNTIMED = 3  # steps of everyone in a row beside the rounds: the first, one that is weighed, and one profiled


class Budget:
    """Seconds for all rows, by weight: what one leaves goes to those after it.

    State: ``_next``, the row that is asked for; ``_start``, when it was; ``_rate``, the most seconds that the least
    number of rounds took so far, a unit of weight.
    """

    def __init__(
        self, seconds: float, weights: Sequence[float], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock, self._weights, self._next = clock, weights, -1
        self._begin = self._start = clock()
        self._end, self._rate = self._begin + seconds, 0.0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._begin

    @property
    def left(self) -> float:
        """To the end."""
        return self._end - self._clock()

    def share(self) -> float | None:
        """Seconds for the next row; None where it would not end in time."""
        self._next += 1
        self._start = self._clock()
        left, weight = self.left, self._weights[self._next]
        return None if self._rate * weight > left else left * weight / sum(self._weights[self._next :])

    def note(self, rounds: int, least: int) -> None:
        """The row is done, with so many rounds where so many are the least."""
        taken = (self._clock() - self._start) * (least + UNTIMED) / (rounds + UNTIMED)
        self._rate = max(self._rate, taken / self._weights[self._next])
