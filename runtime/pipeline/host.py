"""Host memory beside a device: values go there and back whole, as the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OnHost:
    """A value whose ``memory``, bytes that other values may share, is in host memory."""

    memory: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, value: Tensor, memory: Tensor) -> OnHost:
        """A value, of whose memory that is a copy."""
        return cls(memory, value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()))

    def within(self, memory: Tensor) -> Tensor:
        """The value, in a copy of its memory."""
        start = memory.storage_offset() // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), start + self.offset, self.shape, self.stride)


class Host:
    """The host's memory, as seen from a device. On a CPU both are the same memory, and copies are copies all the same.

    On a device that has streams copies run on one of their own, in their order, beside computation: what comes back is
    there after ``wait``, what went out after ``finish``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.has_streams = device, device.type != "cpu"
        self.module: Any = torch.get_device_module(device)
        self.stream: Any = self.module.Stream(device) if self.has_streams else None

    def out(self, memory: Tensor) -> Tensor:
        """A copy in host memory, pinned for a device that has streams."""
        made = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=self.has_streams)
        with self._copying(after_computing=True):
            made.copy_(memory, non_blocking=True)
        if self.has_streams:
            memory.record_stream(self.stream)
        return made

    def back(self, memory: Tensor) -> Tensor:
        """A copy on the device."""
        with self._copying():
            made = torch.empty(memory.shape, dtype=memory.dtype, device=self.device)
            made.copy_(memory, non_blocking=True)
        if self.has_streams:
            made.record_stream(self.module.current_stream(self.device))
        return made

    def mark(self) -> Any:
        """What ``wait`` takes, to wait for all copies so far."""
        return self.stream.record_event() if self.has_streams else None

    def wait(self, mark: Any) -> None:
        """Let computation wait for copies."""
        if mark is not None:
            self.module.current_stream(self.device).wait_event(mark)

    def finish(self) -> None:
        """Wait until everything is there."""
        if self.has_streams:
            self.stream.synchronize()

    @contextmanager
    def _copying(self, after_computing: bool = False) -> Iterator[None]:
        if after_computing and self.has_streams:
            self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream) if self.has_streams else nullcontext():
            yield


def stored_on_host(value: Tensor) -> Tensor:
    """The same values in host memory, pinned where they come from a device."""
    return value if value.device.type == "cpu" else value.cpu().pin_memory()


def memory_of(value: Tensor) -> Tensor:
    """All memory that a value shares, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def bytes_of(value: Tensor) -> Tensor:
    """A contiguous value's own bytes."""
    return value.view(-1).view(torch.uint8)
