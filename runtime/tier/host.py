"""Copies between a device and host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Host:
    """Copies between a device and host memory. On a CPU both are the same memory, but still copied.

    On a device with streams, copies run in order on a stream of their own, concurrently with computation: a copy to the
    device is complete after ``wait``, a copy to the host after ``finish``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.has_streams = device, device.type not in ("cpu", "meta")
        self.module: Any = torch.get_device_module(device if self.has_streams else "cpu")
        self.stream: Any = self.module.Stream(device) if self.has_streams else None

    def copy_out(self, memory: Tensor, into: Tensor | None = None, is_held: bool = False) -> Tensor:
        """A copy in host memory, pinned for a device with streams, or in the tensor ``into``.

        ``is_held``: the caller holds ``memory`` until it has waited for the copy; then it is free at once.
        """
        copy = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=self.has_streams) if into is None else into
        with self._copying(after_computing=True):
            copy.copy_(memory, non_blocking=True)
        if self.has_streams and not is_held:
            memory.record_stream(self.stream)
        return copy

    def copy_back(self, memory: Tensor, into: Tensor | None = None) -> Tensor:
        """A copy on the device, or in the tensor ``into`` there, once earlier computation has finished with it."""
        with self._copying(after_computing=into is not None):
            copy = torch.empty(memory.shape, dtype=memory.dtype, device=self.device) if into is None else into
            copy.copy_(memory, non_blocking=True)
        if self.has_streams:
            copy.record_stream(self.module.current_stream(self.device))
        return copy

    def mark(self) -> Any:
        """An event after all copies so far, for ``wait``."""
        return self.stream.record_event() if self.has_streams else None

    def wait(self, mark: Any) -> None:
        """Let computation wait for the copies before a mark."""
        if mark is not None:
            self.module.current_stream(self.device).wait_event(mark)

    def finish(self) -> None:
        """Wait until all copies are complete."""
        if self.has_streams:
            self.stream.synchronize()

    @contextmanager
    def _copying(self, after_computing: bool = False) -> Iterator[None]:
        if after_computing and self.has_streams:
            self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream) if self.has_streams else nullcontext():
            yield


def stored_on_host(value: Tensor) -> Tensor:
    """The same values in host memory, pinned if they come from a device."""
    return value if value.device.type == "cpu" else value.cpu().pin_memory()
