"""The tier below a device's memory, where ``Zero.offload`` and ``saved`` store what nothing computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardc.options.zero import HOST, Zero

from .files import empty_in, folder_of, read, write
from .host import Host
from .worker import Worker

TRANSFERRING = Worker("shardc-fetch")  # one for all, in the order in which they submit: it has a stack


class Tier:
    """Host memory, or files of a ``folder``, below the memory of a device.

    What is fetched is copied beside computation: on a stream of its own, or where the device is a CPU by a thread.
    """

    def __init__(self, folder: str | None, device: torch.device) -> None:
        self.folder, self.device, self._host = folder, device, Host(device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory in the tier."""
        if self.folder is not None:
            return empty_in(self.folder, shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._host.has_streams)

    def has(self, x: Tensor) -> bool:
        """Whether a tensor is in the tier."""
        return x.device.type == "cpu" and (self.folder is None or folder_of(x) == self.folder)

    def copied(self, x: Tensor) -> Tensor:
        """A copy in the tier."""
        return x if x.is_meta else write(self.empty(x.shape, x.dtype), x)

    def stored(self, x: Tensor) -> Tensor:
        """The same values in the tier."""
        return x if self.has(x) else self.copied(x)

    def fetch(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Start a copy on the device, in a tensor if one is given; returns a function that waits for it."""
        if x.is_meta:
            return lambda: x
        if self._host.has_streams:
            copied, mark = self._host.copy_back(x, into), self._host.mark()

            def wait() -> Tensor:
                self._host.wait(mark)
                return copied

            return wait
        with torch.inference_mode(False):  # it may be kept, and fetched again outside of that mode
            copy = torch.empty(x.shape, dtype=x.dtype) if into is None else into
        return TRANSFERRING.submit(_copied, copy, x).result

    def offload(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a copy in the tier; returns a function that waits for it. What code that is compiled returns stays."""
        if x.is_meta or isinstance(x, FakeTensor):
            return lambda: x
        copy = self.empty(x.shape, x.dtype)
        if x.device.type == "cpu":
            write(copy, x)
            return lambda: copy
        self._host.copy_out(x, copy)
        mark = self._host.mark()

        def wait() -> Tensor:
            mark.synchronize()
            return copy

        return wait

    def lend(self, x: Tensor) -> Callable[[], Tensor]:
        """As ``offload``, of what nobody writes to any more: on a CPU it is the tensor itself."""
        return (lambda: x) if x.device.type == "cpu" else self.offload(x)

    def save(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a copy in the tier for ``restore``; returns a function after which computation may reuse the memory."""
        if x.is_meta:
            return lambda: x
        copy = self._empty_like(x)
        if x.device.type == "cpu":
            write(copy, x)
        else:
            self._host.copy_out(x, copy, is_held=True)
        return partial(self._after, self._host.mark(), copy, x)

    def restore(self, x: Tensor) -> Callable[[], Tensor]:
        """As ``fetch``, of what was saved, into memory of the stream that computes: it is free after its last use."""
        return self.fetch(x, torch.empty_like(x, device=self.device))

    def _empty_like(self, x: Tensor) -> Tensor:
        """Memory in the tier with the strides of a tensor, which kernels of backward may rely on."""
        strides = torch.empty_like(x, device="meta").stride()  # those of a tensor without gaps
        return self.empty(x.shape, x.dtype).as_strided(x.shape, strides)

    def _after(self, mark: Any, copy: Tensor, held: Tensor) -> Tensor:
        """A copy once computation waits for it; the memory that is copied is ``held`` until then."""
        self._host.wait(mark)
        return copy


@torch.no_grad()
def _copied(copy: Tensor, x: Tensor) -> Tensor:
    return read(x, copy)


def tier_of(zero: Zero | None, device: torch.device) -> Tier | None:
    """The tier that an option names; None where nothing is offloaded."""
    return None if zero is None or zero.offload is None else tier_in(str(zero.to), device)


@lru_cache(maxsize=64)
def tier_in(to: str, device: torch.device) -> Tier:
    """Host memory, or files of a folder; there is one for all who name it."""
    return Tier(None if to == HOST else to, device)
