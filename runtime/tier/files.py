"""Tensors in files: the memory is a file that is mapped, and the system keeps as much of it in memory as there is room.

A file has no name any more once it is mapped, so that it is gone with the last tensor in it, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
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
        raise ShardingError(f"Zero(to={folder!r})", what, problem, remedy) from None


def folder_of(tensor: Tensor) -> str | None:
    """The folder of the file that a tensor is in; None for one in memory."""
    if tensor.device.type != "cpu" or (path := tensor.untyped_storage().filename) is None:
        return None
    return str(Path(path).parent)


def _one(made: Tensor, x: Tensor, *args: Any) -> Tensor:
    return made.fill_(1)


def _value(made: Tensor, x: Tensor, value: Any, *args: Any) -> Tensor:
    return made.fill_(value)


def _copy(made: Tensor, x: Tensor, *args: Any) -> Tensor:
    return made.copy_(x)


def _zeros(made: Tensor, x: Tensor, *args: Any) -> Tensor:
    return made


LIKE: dict[Any, Callable[..., Tensor]] = {  # ops whose result is like a tensor, and what is written to it
    aten.zeros_like: _zeros, aten.empty_like: _zeros, aten.ones_like: _one, aten.full_like: _value, aten.clone: _copy,
}  # fmt: skip


def made_beside(func: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """The result of an op that makes a tensor like one in a file, such as an optimizer's state: in the same folder.

    None for any other op or tensor.
    """
    fill = LIKE.get(getattr(func, "overloadpacket", None))
    folder = folder_of(x) if fill is not None and isinstance(x, Tensor) else None
    if fill is None or folder is None or str(kwargs.get("device") or "cpu") != "cpu":
        return None
    like = torch.empty_like(x, dtype=kwargs.get("dtype"), device="meta")
    return fill(empty_in(folder, like.shape, like.dtype), x, *args)


def empty_beside(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of the shape of another, in the same folder if that is in a file."""
    made = made_beside(aten.empty_like.default, x, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) if made is None else made


def sum_beside(func: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """The sum of two tensors in files, such as gradients of two calls: in the same folder. None for anything else."""
    if func is not aten.add.Tensor or not args or not isinstance(args[0], Tensor) or args[0].shape != x.shape:
        return None
    folder = folder_of(x)
    if folder is None or folder_of(args[0]) != folder or x.dtype != args[0].dtype:
        return None
    return torch.add(x, *args, **kwargs, out=empty_in(folder, x.shape, x.dtype))
