"""Encodes values as JSON, with tensors kept apart: state dicts of optimizers and schedulers, and the user's extras."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardc.language.errors import CheckpointError
from shardc.language.sharding import dtype_name

from .file import FormatError


def encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """Encode a value as JSON; add tensors in it to ``tensors``, by a key made of their path.

    Takes numbers, strings, None, lists, tuples, dicts, Counters, dtypes and tensors. Raises a CheckpointError for
    others.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        key = key_of(path)
        assert key not in tensors, key
        tensors[key] = value
        return {"$tensor": key}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if type(value) in (list, tuple, torch.Size):
        items = [encode(each, (*path, str(i)), tensors) for i, each in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        are_names = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if are_names and not isinstance(value, Counter):
            return {key: encode(each, (*path, key), tensors) for key, each in value.items()}
        tag, pairs = "$counter" if isinstance(value, Counter) else "$items", []
        for i, (key, each) in enumerate(value.items()):
            pairs.append([encode(key, (*path, str(i), "key"), tensors), encode(each, (*path, str(i)), tensors)])
        return {tag: pairs}
    what = f"a value of type {type(value).__module__}.{type(value).__qualname__}"
    problem = "a checkpoint holds tensors, numbers, strings, lists, tuples and dicts, and runs no code when it is read"
    raise CheckpointError(".".join(path), what, problem, "leave it out, or save what it is made from")


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Decode an encoded value; ``tensor`` finds the tensor of a key. Raises a FormatError for an unknown tag."""
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), "")
    if not tag:
        return {key: decode(each, tensor) for key, each in value.items()}
    if len(value) > 1 or tag not in _DECODERS:
        raise FormatError(f"a value of unknown kind {tag!r}")
    return _DECODERS[tag](value[tag], tensor)


def _decode_dtype(name: Any, tensor: Callable[[str], Any]) -> torch.dtype:
    dtype = getattr(torch, name) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"{name!r} is no dtype")
    return dtype


def _decode_float(text: Any, tensor: Callable[[str], Any]) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise FormatError(f"{text!r} is no number")
    return float(text)


_DECODERS: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "$float": _decode_float,
    "$dtype": _decode_dtype,
    "$tensor": lambda key, tensor: tensor(key),
    "$tuple": lambda items, tensor: tuple(decode(each, tensor) for each in items),
    "$items": lambda pairs, tensor: {decode(key, tensor): decode(each, tensor) for key, each in pairs},
    "$counter": lambda pairs, tensor: Counter({decode(key, tensor): decode(each, tensor) for key, each in pairs}),
}


def key_of(path: tuple[str, ...]) -> str:
    """The key of a tensor: the names on its path, joined by ``/``."""
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in path)
