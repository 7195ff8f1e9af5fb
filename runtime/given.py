"""What a compiled call was given, as its backward needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import ReferenceType

from torch import Tensor

from shardc.error import OrderError


@dataclass(frozen=True, slots=True)
class Given:
    """The values of a call, parallel to the program's inputs.

    ``held``: what the model holds; None for the arguments, which are ``passed``, by index: their caller may let go of
    them. ``plain``: the arguments that are no DTensors. ``saved``: of inputs whose memory is saved for backward the
    index and the version; ``shown``: outputs of which the same holds, each with its version.
    """

    held: Sequence[Tensor | None]
    passed: Mapping[int, ReferenceType[Tensor]]
    plain: frozenset[int]
    saved: Sequence[tuple[int, int]]
    shown: Sequence[tuple[ReferenceType[Tensor], int]]

    @property
    def values(self) -> list[Tensor | None]:
        """Those that are still there."""
        values = list(self.held)
        for i, reference in self.passed.items():
            values[i] = reference()
        return values

    def check(self, values: Sequence[Tensor | None]) -> None:
        """RuntimeError where a tensor that the backward needs, of these ``values`` or shown, was changed since."""
        for i, version in self.saved:
            _check_version(values[i], version)
        for reference, version in self.shown:
            _check_version(reference(), version)


def _check_version(tensor: Tensor | None, version: int) -> None:
    if tensor is not None and tensor._version != version:
        what, problem = f"it needs a tensor of shape {list(tensor.shape)}", "that was changed in place after forward"
        raise OrderError("backward", what, problem, "call backward before the optimizer's step")
