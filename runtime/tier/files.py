"""Tensors in files: the memory is a file that is mapped, and the system keeps as much of it in memory as there is room.

A file has no name any more once it is mapped, so that it is gone with the last tensor in it, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.language.errors import ShardingError
from shardc.language.text import bytes_text

aten = torch.ops.aten


def empty_in(folder: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in a file of a folder. ShardingError where there is no such folder, or no room in it."""
    numel = prod(shape)
    if not numel:
        return torch.empty(tuple(shape), dtype=dtype)
    nbytes = numel * dtype.itemsize
    try:
        descriptor, path = tempfile.mkstemp(prefix="shardc-", dir=folder)
        try:
            try:
                made = torch.from_file(path, shared=True, size=numel, dtype=dtype).view(tuple(shape))
            finally:
                os.unlink(path)
            os.posix_fallocate(descriptor, 0, nbytes)  # else a full disk ends the process when a page is written
            return made
        finally:
            os.close(descriptor)
    except OSError as error:
        what, problem = f"a tensor of {bytes_text(nbytes)}", f"no file can be made for it: {error.strerror or error}"
        is_missing = not os.path.isdir(folder)
        remedy = (
            "make the folder on every host first" if is_missing else "name a folder on a local disk with room for it"
        )
        raise ShardingError(f"folder {folder!r}", what, problem, remedy) from None


def folder_of(tensor: Tensor) -> str | None:
    """The folder of the file that a tensor is in; None for one in memory."""
    if tensor.device.type != "cpu" or (path := tensor.untyped_storage().filename) is None:
        return None
    return str(Path(path).parent)


OF_ZEROS = (aten.zeros_like, aten.empty_like)
LIKE = (*OF_ZEROS, aten.ones_like, aten.full_like, aten.clone, aten.add)  # ops whose result is like a tensor


def made_beside(func: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """The result of an op that makes a tensor like one in a file, such as an optimizer's state: in the same folder.

    So is the sum of two tensors in files, such as gradients of two calls. None for any other op or tensor.
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
