"""A rank's request as lines of text, which must be equal on all ranks: versions, options, shapes, modes of modules."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardc.capture.model import state_names
from shardc.capture.signature import Constant, Identity, Signature, TensorLeaf
from shardc.language.mesh import Mesh
from shardc.options import Zero

_NUMBERS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def request_lines(
    signature: Signature, model: nn.Module, arguments: Iterable[tuple[str, Any]], further: Iterable[str] = ()
) -> Iterator[str]:
    """The lines of a call: its inputs, the modes of modules and of torch, and the model's parameters.

    ``arguments``: names and values of the leaves, for the placements of DTensors. ``further``: more lines.
    """
    placements = {name: each.placements for name, each in arguments if isinstance(each, DTensor)}
    yield f"arguments {signature.tree}"
    for name, leaf in signature.leaves:
        if isinstance(leaf, TensorLeaf):
            placed = f", {placements[name]}" if name in placements else ""
            yield f"input {name!r}: {leaf}{', requires_grad' * leaf.requires_grad}{placed}"
        else:
            yield f"value {name!r}: {text_of(leaf)}"
    yield f"gradients are {'on' if signature.train else 'off'}"
    yield f"default dtype {signature.default_dtype}, autocast {signature.autocast or 'off'}"
    parameters, buffers, aliases = state_names(model)
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
            yield f"{kind} {name}: {tuple(tensor.shape)}, {tensor.dtype}{frozen}"
    for name, first in aliases.items():
        yield f"{name} is tied to {first}"
    for path, module in model.named_modules():
        yield f"module {path or '(model)'} is in {'train' if module.training else 'eval'} mode"
    yield from further


def making_lines(mesh: Any, asked: Mapping[str, Any]) -> Iterator[str]:
    """The lines of making a module: versions, the mesh, annotations and options."""
    yield f"version {_own_version()} of shardc"
    yield f"version {torch.__version__} of torch"
    yield f"version {platform.python_version()} of python"
    yield f"mesh {Mesh.of(mesh)}"
    for name, value in asked.items():
        if name == "annotations":
            yield from sorted(f"annotation {pattern!r}: {text_of(spec)}" for pattern, spec in (value or {}).items())
        else:
            yield f"option {name}={text_of(value)}"


def _own_version() -> str:
    try:
        return metadata.version("shardc")
    except metadata.PackageNotFoundError:
        return "unknown"


def text_of(value: Any) -> str:
    """A value as text that is equal in every process: without addresses; functions and other objects by name."""
    if isinstance(value, Constant):
        return text_of(value.value)
    if isinstance(value, Identity):
        return text_of(value.value)
    if isinstance(value, _NUMBERS):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(text_of, value)))})"
    if type(value).__module__.startswith("shardc."):
        return _fields_text(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _fields_text(value: Any) -> str:
    """An object of a shardc class as text: its fields, or its repr."""
    names = getattr(value, "__dataclass_fields__", None)
    if names is None or isinstance(value, Zero):  # whose repr has no addresses
        return repr(value)
    return f"{type(value).__name__}({', '.join(f'{name}={text_of(getattr(value, name))}' for name in names)})"
