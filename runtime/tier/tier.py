"""The tier below a device's memory, in which ``Zero.offload`` and ``saved`` store idle tensors."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardc.options.zero import HOST, Zero

from .files import empty_in, folder_of, read, write
from .host import Host
from .worker import Worker

HUGE_PAGE = 2**21  # bytes
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # what asks Linux for huge pages
TRANSFERRING = Worker("shardc-fetch")  # one thread for all tiers, since each reserves address space for its stack


class Tier:
    """Host memory, or files of a ``folder``, below the memory of a device.

    Tensors are fetched during computation: on a stream of its own, or by a thread if the device is a CPU.
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
        """A copy of a tensor in the tier."""
        return x if x.is_meta else write(self.empty(x.shape, x.dtype), x)

    def stored(self, x: Tensor) -> Tensor:
        """The tensor itself if it is in the tier, else a copy there."""
        return x if self.has(x) else self.copied(x)

    def fetch(self, x: Tensor, into: Tensor | None = None, is_cached: bool = False) -> Callable[[], Tensor]:
        """Start a copy to the device, to ``into`` if it is given. Returns a function that waits for it.

        ``is_cached``: the page cache holds the tensor's file, because it was just written.
        """
        if x.is_meta:
            return lambda: x
        if self._host.has_streams:
            copied, mark = self._host.copy_back(x, into), self._host.mark()

            def wait() -> Tensor:
                self._host.wait(mark)
                return copied

            return wait
        with torch.inference_mode(False):  # the copy may be kept, and overwritten later outside of that mode
            copy = _in_huge_pages(x.shape, x.dtype) if into is None else into
        return TRANSFERRING.submit(_copied, copy, x, is_cached).result

    def offload(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a copy to the tier. Returns a function that waits for it. Tensors on meta and fake ones stay."""
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
        """Like ``offload``, for a tensor that nobody writes to any more: on a CPU returns the tensor itself."""
        return (lambda: x) if x.device.type == "cpu" else self.offload(x)

    def save(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a copy to the tier for ``restore``. Returns a function after which computation may reuse the memory."""
        if x.is_meta:
            return lambda: x
        copy = self._empty_like(x)
        if x.device.type == "cpu":
            write(copy, x)
        else:
            self._host.copy_out(x, copy, is_held=True)
        return partial(self._after, self._host.mark(), copy, x)

    def restore(self, x: Tensor) -> Callable[[], Tensor]:
        """Like ``fetch``, for a saved tensor, into memory of the computing stream, which is free after its last use."""
        return self.fetch(x, torch.empty_like(x, device=self.device), is_cached=True)

    def _empty_like(self, x: Tensor) -> Tensor:
        """Memory in the tier with a tensor's strides, on which kernels of backward may rely."""
        strides = torch.empty_like(x, device="meta").stride()  # those of a tensor without gaps
        return self.empty(x.shape, x.dtype).as_strided(x.shape, strides)

    def _after(self, mark: Any, copy: Tensor, held: Tensor) -> Tensor:
        """Let computation wait for a copy, and return it; ``held`` is the memory that is copied until then."""
        self._host.wait(mark)
        return copy


def _in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory. A large tensor is in huge pages, since the system is slow to make many small ones."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < HUGE_PAGE or ADVICE is None:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(ADVICE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


@torch.no_grad()
def _copied(copy: Tensor, x: Tensor, is_cached: bool) -> Tensor:
    return read(x, copy, is_cached)


def tier_of(zero: Zero | None, device: torch.device) -> Tier | None:
    """The tier that an option names; None if nothing is offloaded."""
    return None if zero is None or zero.offload is None else tier_in(str(zero.to), device)


@lru_cache(maxsize=64)
def tier_in(to: str, device: torch.device) -> Tier:
    """The tier in host memory, or in files of the folder ``to``; equal arguments share one."""
    return Tier(None if to == HOST else to, device)
