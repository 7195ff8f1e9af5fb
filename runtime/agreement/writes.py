"""Detects whether parameters were written since the last call, and with that a rank that skips an optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from torch import Tensor

from .entry import Flag

_version, _version_of_piece = attrgetter("_version"), attrgetter("_local_tensor._version")


class Writes:
    """The versions of a module's trained parameters after its last call; frozen ones may be written by one rank."""

    def __init__(self) -> None:
        self._noted, self._found = -1, -1

    def since(self, parameters: Iterable[Tensor]) -> Flag:
        """Whether parameters were written since the last call; unknown if none is trained."""
        self._found = _versions(parameters)
        return Flag.UNKNOWN if self._found < 0 else Flag(self._found != self._noted)

    def note(self, parameters: Iterable[Tensor] | None) -> None:
        """Note the end of a call. ``parameters``: those that the call may have written itself, placing or gathering."""
        self._noted = self._found if parameters is None else _versions(parameters)


def _versions(parameters: Iterable[Tensor]) -> int:
    """The sum of the versions of all trained DTensors and of their pieces on this rank; -1 without any."""
    trained = [each for each in parameters if each.requires_grad]
    try:
        return sum(map(_version, trained)) + sum(map(_version_of_piece, trained)) if trained else -1
    except RuntimeError:  # tensors made in inference mode have no version
        return -1
