"""Tensors in files: their memory is a mapped file, of which the system caches as much in memory as there is room for.

A file is unlinked once it is mapped, so that it is gone with its last tensor, however the process ends. ``read`` and
``write`` copy a large tensor from or to a file by one system call: a mapped page costs more to fault in, and far more
to write to, than to copy. Both ways of access see the same values.
"""

from __future__ import annotations

import errno
import os
import resource
import tempfile
import weakref
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.language.errors import ShardingError
from shardc.language.text import bytes_text

from ..comm.checksum import bytes_of

aten = torch.ops.aten
LARGE = 2**20  # bytes of a tensor whose file stays open
DIRECT = getattr(os, "O_DIRECT", 0)
Transfer = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev
_descriptors: dict[str, int] = {}  # of open files, by path


def empty_in(folder: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in a file of a folder. Raises a ShardingError if there is no such folder, or no room in it."""
    numel = prod(shape)
    if not numel:
        return torch.empty(tuple(shape), dtype=dtype)
    nbytes = numel * dtype.itemsize
    try:
        descriptor, path = tempfile.mkstemp(prefix="shardc-", dir=folder)
        is_kept = False
        try:
            try:
                made = torch.from_file(path, shared=True, size=numel, dtype=dtype).view(tuple(shape))
            finally:
                os.unlink(path)
            os.posix_fallocate(descriptor, 0, nbytes)  # else a full disk would kill the process when it writes a page
            is_kept = _keep_open(made, descriptor)
            return made
        finally:
            if not is_kept:
                os.close(descriptor)
    except OSError as error:
        what, problem = f"a tensor of {bytes_text(nbytes)}", f"no file can be made for it: {error.strerror or error}"
        is_missing = not os.path.isdir(folder)
        remedy = (
            "make the folder on every host first" if is_missing else "name a folder on a local disk with room for it"
        )
        raise ShardingError(f"folder {folder!r}", what, problem, remedy) from None


def _keep_open(made: Tensor, descriptor: int) -> bool:
    """Keep the file of a large tensor open until the tensor is gone, unless the process has few descriptors left."""
    if made.nbytes < LARGE or descriptor > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        return False
    storage = made.untyped_storage()
    assert storage.filename is not None
    _descriptors[storage.filename] = descriptor
    weakref.finalize(storage, _close, storage.filename).atexit = False
    return True


def _close(path: str) -> None:
    os.close(_descriptors.pop(path))


def read(x: Tensor, into: Tensor, is_cached: bool = True) -> Tensor:
    """Copy a tensor to the memory ``into``, and return that.

    ``is_cached``: go through the page cache, for data that is read again soon. Otherwise bypass it, in a quarter of the
    processor's time, if the system can do that with this memory and this file.
    """
    descriptor = _descriptor_of(x)
    if descriptor is None or not _are_alike(x, into):
        return into.copy_(x)
    _transfer(os.preadv, descriptor, into, x, is_cached)
    return into


def write(x: Tensor, values: Tensor, is_cached: bool = True) -> Tensor:
    """Copy values from memory to a tensor, and return the tensor. ``is_cached``: as for ``read``."""
    descriptor = _descriptor_of(x)
    if descriptor is None or not _are_alike(x, values):
        return x.copy_(values)
    _transfer(os.pwritev, descriptor, values, x, is_cached)
    return x


def is_open(x: Tensor) -> bool:
    """Whether a tensor is in an open file, from and to which ``read`` and ``write`` transfer large blocks."""
    return _descriptor_of(x) is not None


def _descriptor_of(x: Tensor) -> int | None:
    return _descriptors.get(x.untyped_storage().filename or "") if x.device.type == "cpu" else None


def _are_alike(x: Tensor, memory: Tensor) -> bool:
    """Whether both have the same layout in host memory, so that copying bytes copies values."""
    is_plain = all(each.is_contiguous() and not each.is_conj() and not each.is_neg() for each in (x, memory))
    return is_plain and x.shape == memory.shape and x.dtype == memory.dtype and memory.device.type == "cpu"


def _transfer(call: Transfer, descriptor: int, memory: Tensor, x: Tensor, is_cached: bool) -> None:
    """Repeat a system call, which may transfer only a part, until all bytes of a tensor are transferred."""
    data, begin = bytes_of(memory), int(x.storage_offset()) * x.itemsize
    done = 0 if is_cached else _transferred_directly(call, descriptor, data, begin)
    while done < len(data):
        moved = call(descriptor, [data[done:]], begin + done)
        assert moved, (done, len(data))
        done += moved


def _transferred_directly(call: Transfer, descriptor: int, data: memoryview, begin: int) -> int:
    """Transfer bytes past the page cache. Returns their number: 0 if this memory, file or system does not allow it."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | DIRECT)
    except OSError:
        return 0
    try:
        return call(direct, [data], begin)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        os.close(direct)


def folder_of(tensor: Tensor) -> str | None:
    """The folder of a tensor's file; None for a tensor in memory."""
    if tensor.device.type != "cpu" or (path := tensor.untyped_storage().filename) is None:
        return None
    return str(Path(path).parent)


OF_ZEROS = (aten.zeros_like, aten.empty_like)
LIKE = (*OF_ZEROS, aten.ones_like, aten.full_like, aten.clone, aten.add)  # ops whose result is like a tensor


def made_beside(func: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """The result, in the same folder, of an op that makes a tensor like one in a file, such as an optimizer's state.

    The sum of two tensors in files of one folder, such as gradients of two calls, is made there too. None for any other
    op or tensor.
    """
    packet: Any = getattr(func, "overloadpacket", None)
    folder = folder_of(x) if packet in LIKE and isinstance(x, Tensor) else None
    if folder is None or str(kwargs.get("device") or "cpu") != "cpu":
        return None
    if packet is aten.add and not (isinstance(args[0], Tensor) and _is_like(args[0], x)):
        return None
    made = empty_in(folder, x.shape, kwargs.get("dtype") or x.dtype)
    if packet in OF_ZEROS:
        return made
    result: Tensor = packet.out(x, *args, **({"alpha": kwargs["alpha"]} if "alpha" in kwargs else {}), out=made)
    return result


def _is_like(other: Tensor, x: Tensor) -> bool:
    return other.shape == x.shape and other.dtype == x.dtype and folder_of(other) == folder_of(x)


def empty_beside(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of the shape of another, in the same folder if that is in a file."""
    folder = folder_of(x)
    if folder is not None:
        return empty_in(folder, x.shape, dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
