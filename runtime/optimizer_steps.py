"""Who wants to know when an optimizer has stepped: torch calls one hook after every step of every optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Watcher(Protocol):
    """Is told of steps of the optimizers that hold one of its parameters."""

    def watched(self) -> Iterable[Tensor]: ...
    def note_step(self) -> None: ...


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch_steps(watcher: Watcher) -> None:
    """Tell it, for as long as it lives."""
    _watchers.add(watcher)


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for watcher in _watchers:
        if any(id(tensor) in stepped for tensor in watcher.watched()):
            watcher.note_step()


register_optimizer_step_post_hook(_tell)
