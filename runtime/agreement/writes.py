"""Whether parameters were written since the last call: a rank that skips an optimizer's step is seen by it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor

from .entry import Flag


class Writes:
    """The versions of a module's trained parameters after its last call; frozen ones may be written by one rank."""

    def __init__(self) -> None:
        self._noted = -1

    def note(self, parameters: Iterable[Tensor]) -> None:
        """The parameters are those of the last call."""
        self._noted = _versions(parameters)

    def since(self, parameters: Iterable[Tensor]) -> Flag:
        """Whether parameters were written since the last call; unknown where none is trained."""
        versions = _versions(parameters)
        return Flag.UNKNOWN if versions < 0 else Flag(versions != self._noted)


def _versions(parameters: Iterable[Tensor]) -> int:
    """The sum of the versions of all trained parameters, and of their pieces on this rank; -1 without any."""
    total, is_any = 0, False
    for each in parameters:
        if each.requires_grad and not each.is_inference():
            is_any = True
            total += each._version + (each._local_tensor._version if isinstance(each, DTensor) else 0)
    return total if is_any else -1
