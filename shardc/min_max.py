"""The exact min-max walk: a number of steps through ordered states, so that the greatest load of a step is least.

A state is how much of a model lies behind a cut; a step is a stage. For a chain of n units the states are 0 to n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Best = dict[int, tuple[int, int, int]]  # for a state: the sum of squares, the bytes, the state after


@dataclass(frozen=True, slots=True)
class Walk:
    """From state 0 to ``last`` in ``num_steps`` steps.

    ``after``: the states that a step from a state may lead to. ``load``: of a step, by its number and its two states;
    None where the step is not allowed. ``received``: bytes that come into a step. ``rises``: loads do not fall along
    ``after``, so that what follows a step that is too heavy need not be looked at.
    """

    num_steps: int
    last: int
    after: Callable[[int], Sequence[int]]
    load: Callable[[int, int, int], int | None]
    received: Callable[[int, int], int] = lambda start, end: 0
    rises: bool = True

    def least(self) -> int | None:
        """The least greatest load of a step; None where no walk is allowed.

        ``row``: for each state the least greatest load of the steps that are still to go.
        """
        row = {self.last: 0}
        for step in reversed(range(self.num_steps)):
            row = {state: found for state in self._starts(step) if (found := self._least_from(step, state, row)) >= 0}
        return row.get(0)

    def best(self) -> tuple[int, ...] | None:
        """The states between the steps of the walk of least load, then most even, then of fewest bytes, then first.

        Most even is the least sum of squares of loads. First is by the order of ``after``.
        """
        bound = self.least()
        if bound is None:
            return None
        rows: list[Best] = [{self.last: (0, 0, 0)}]
        for step in reversed(range(self.num_steps)):
            found = ((state, self._best_from(step, state, rows[-1], bound)) for state in self._starts(step))
            rows.append({state: best for state, best in found if best is not None})
        states = [0]
        for row in rows[:0:-1]:
            states.append(row[states[-1]][2])
        return tuple(states[1:-1])

    def _starts(self, step: int) -> range:
        return range(self.last) if step else range(1)

    def _least_from(self, step: int, state: int, row: dict[int, int]) -> int:
        """Minus one where no walk is allowed."""
        best = -1
        for end in self.after(state):
            rest = row.get(end)
            load = None if rest is None else self.load(step, state, end)
            if rest is None or load is None:
                continue
            if self.rises and 0 <= best <= load:
                break
            best = max(load, rest) if best < 0 else min(best, max(load, rest))
        return best

    def _best_from(self, step: int, state: int, row: Best, bound: int) -> tuple[int, int, int] | None:
        best: tuple[int, int, int] | None = None
        for end in self.after(state):
            rest = row.get(end)
            load = None if rest is None else self.load(step, state, end)
            if rest is None or load is None:
                continue
            if load > bound:
                if self.rises:
                    break
                continue
            squares, nbytes = load * load + rest[0], self.received(state, end) + rest[1]
            if best is None or (squares, nbytes) < best[:2]:
                best = squares, nbytes, end
        return best
