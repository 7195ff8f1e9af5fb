"""Counts the bytes of tensors that calls allocate and have not freed yet."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Counts the bytes of live tensors that are made in the block. ``now``: the current bytes. ``most``: their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            storage = tensor.untyped_storage()
            if not hasattr(storage, "is_counted"):
                storage.is_counted = True
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, nbytes: int) -> None:
        self.now -= nbytes
