"""The programs of one signature of calls: they differ in values that the model's code has read, such as a mask's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardc.capture.guards import GuardError
from shardc.language.errors import CaptureError

from .compiled_call import CompiledCall

MAX_VARIANTS = 8
REMEDY = (
    "let no shape depend on values: torch.where(mask, new, old) for what a mask selects, ignore_index for rows "
    "that no loss counts, padding to one length; or compute it outside of the model and pass the result"
)


class Variants:
    """Compiled calls that differ in what their guards check, the latest used first; without guards there is one."""

    def __init__(self, call: CompiledCall) -> None:
        self.calls = [call]

    @property
    def latest(self) -> CompiledCall:
        """The compiled call that ran last."""
        return self.calls[0]

    def run(self, run: Callable[[CompiledCall], Any], compile: Callable[[], CompiledCall]) -> Any:
        """The result of the first compiled call whose guards all hold; a new one is compiled if there is none.

        A program whose guard does not hold ends there, on every rank alike, and has changed nothing. CaptureError if
        too many were compiled already; GuardError if even a new program finds other values than it was captured with.
        """
        for i, call in enumerate(self.calls):
            try:
                result = run(call)
            except GuardError as error:
                latest = error
                continue
            self.calls.insert(0, self.calls.pop(i))
            return result
        if len(self.calls) == MAX_VARIANTS:
            what = f"its program depends on values, and {MAX_VARIANTS} programs were compiled already"
            raise CaptureError(latest.who, f"{what}; now {latest.finding}", REMEDY) from latest
        self.calls.insert(0, compile())
        return run(self.calls[0])
