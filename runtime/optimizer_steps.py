"""Who wants to know when an optimizer has stepped: torch calls one hook after every step of every optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class StepWatcher:
    """Is told of steps of the optimizers that hold one of the parameters that it watches, for as long as it lives.

    State: ``_watched``, the parameters.
    """

    def __init__(self) -> None:
        self._watched: list[weakref.ref[Tensor]] = []
        _watchers.add(self)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch these, and no others."""
        self._watched = [weakref.ref(parameter) for parameter in parameters]

    def watched(self) -> list[Tensor]:
        """Those of the parameters that are alive."""
        return [tensor for tensor in (reference() for reference in self._watched) if tensor is not None]

    def note_step(self) -> None:
        """An optimizer has written parameters."""
        raise NotImplementedError


_watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watching = [(watcher, tensors) for watcher in _watchers if (tensors := watcher.watched())]
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]} if watching else ()
    for watcher, tensors in watching:
        if any(id(tensor) in stepped for tensor in tensors):
            watcher.note_step()


register_optimizer_step_post_hook(_tell)
