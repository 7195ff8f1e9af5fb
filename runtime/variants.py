"""The programs of one signature: one for each set of values that guards were captured with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardc.error import CaptureError
from shardc.guard import GuardError

from .step import Step

MAX_VARIANTS = 8


class Variants:
    """Steps that differ in what their guards must find; without guards there is one.

    State: ``steps``, the latest used first.
    """

    def __init__(self, step: Step) -> None:
        self.steps = [step]

    @property
    def latest(self) -> Step:
        """The step that ran last."""
        return self.steps[0]

    def run(self, run: Callable[[Step], Any], compile: Callable[[], Step]) -> Any:
        """What the first step gives whose guards all hold, a new one if need be.

        A step whose guard does not hold ends there, on every rank alike, and has changed nothing. CaptureError where
        too many were compiled already, GuardError where not even a new one finds what it was captured with.
        """
        for i, step in enumerate(self.steps):
            try:
                result = run(step)
            except GuardError as error:
                latest = error
                continue
            self.steps.insert(0, self.steps.pop(i))
            return result
        if len(self.steps) == MAX_VARIANTS:
            raise _too_many(latest) from latest
        self.steps.insert(0, compile())
        return run(self.steps[0])


def _too_many(error: GuardError) -> CaptureError:
    return CaptureError(
        error.who,
        f"what it finds in values is part of a program, and {MAX_VARIANTS} were compiled already; now {error.finding}",
        "let no shape depend on values: torch.where(mask, new, old) for what a mask selects, ignore_index for rows "
        "that no loss counts, padding to one length; or do it outside of the model and pass what is found",
    )
