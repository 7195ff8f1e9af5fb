"""A pointwise function of scores before the mask is added, such as Gemma 2's cap by tanh, and its derivative."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from .mask import REFERENCE, Step, op_named


@dataclass(frozen=True, slots=True)
class ScoreMod:
    """Steps from a score to the changed score, and from a score and the changed one's gradient to its own gradient."""

    steps: tuple[Step, ...]
    derivative: tuple[Step, ...]

    def __str__(self) -> str:
        """The function as an expression, such as ``mul(tanh(div(score, 20.0)), 20.0)``."""
        texts = ["score"]
        for step in self.steps:
            texts.append(f"{step.op.partition('.')[0]}({', '.join(map(str, step.filled(texts)))})")
        return texts[-1]

    @property
    def text(self) -> str:
        """The function as a text, for an argument of an op."""
        return json.dumps([[[step.op, step.args] for step in steps] for steps in (self.steps, self.derivative)])

    def changed(self, scores: Tensor) -> Tensor:
        """The changed scores."""
        return run_steps(self.steps, [scores])

    def gradients(self, scores: Tensor, of_changed: Tensor) -> Tensor:
        """The gradients of scores, from those of the changed ones."""
        return run_steps(self.derivative, [scores, of_changed])


def run_steps(steps: Sequence[Step], values: list[Tensor]) -> Tensor:
    """Append the value of each step to ``values``, and return the last one."""
    for step in steps:
        values.append(op_named(step.op)(*step.filled(values)))
    return values[-1]


@lru_cache(maxsize=256)
def score_mod_of(text: str) -> ScoreMod:
    """The ScoreMod of a ``ScoreMod.text``."""
    steps, derivative = ([Step(op, tuple(map(_argument, args))) for op, args in each] for each in json.loads(text))
    return ScoreMod(tuple(steps), tuple(derivative))


def _argument(arg: Any) -> Any:
    return (REFERENCE, arg[1]) if isinstance(arg, list) else arg
