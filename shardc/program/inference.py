"""What an op returns, found on meta tensors once for calls that are alike: types, strides, and shared memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from shardc.language.sharding import TensorType
from shardc.program.node import takes_device

Types = TensorType | tuple[TensorType | None, ...] | None


def types_made(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta") -> Types:
    """What a call returns that has types for tensors: run on meta tensors; the few ops that cannot be, on zeros.

    Torch's own ops go by nothing else, so that one that is called alike, as in every layer, runs once.
    """
    if not is_of_torch(target):
        return _types_of_run(target, args, kwargs, device)
    return _types_of_call(LikeCall.of(target, args, kwargs, device))


@functools.lru_cache(maxsize=4096)
def _types_of_call(call: LikeCall) -> Types:
    return _types_of_run(call.target, call.args, call.kwargs, call.device)


def _types_of_run(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Types:
    def tensor(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, TensorType) else leaf

    placed = {**kwargs, "device": device} if takes_device(target) else dict(kwargs)
    try:
        return types_of(target(*map_aggregate(args, tensor), **map_aggregate(placed, tensor)))
    except NotImplementedError:
        if device == "cpu":
            raise
        return _types_of_run(target, args, kwargs, "cpu")


def types_of(value: Any) -> Types:
    """The type of what an op returned: of a tensor, or of each tensor of a tuple or list with None for what is none."""
    if isinstance(value, torch.Tensor):
        return TensorType(tuple(map(int, value.shape)), value.dtype)
    if isinstance(value, (list, tuple)):
        types = (types_of(entry) for entry in value)
        return tuple(entry if isinstance(entry, TensorType) else None for entry in types)
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor's; ``source``: whose memory it is of the call's tensors, then of its results; none where it is new."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    source: int | None = None

    @staticmethod
    def of(tensor: Tensor, source: int | None = None) -> Layout:
        """Where it begins in its memory does not matter here."""
        return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, source)

    def tensor(self, sources: list[Tensor]) -> Tensor:
        """A tensor on meta that lies so; one of ``sources`` gives the memory."""
        if self.source is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return sources[self.source].as_strided(self.shape, self.stride, 0)


def made_on_meta(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[fx.Node, Any]) -> Any:
    """What a call of one of torch's ops returns whose arguments hold nodes, for which there are ``values`` on meta."""
    sources: list[Tensor] = []

    def layout(node: fx.Node) -> Any:
        sources.append(values[node])
        return Layout.of(values[node])

    layouts = _layouts_made(LikeCall.of(target, *fx.map_arg((args, dict(kwargs)), layout)))
    if isinstance(layouts, Layout):
        return layouts.tensor(sources)
    made = []
    for each in layouts:
        made.append(None if each is None else each.tensor(sources))
        sources += [each for each in made[-1:] if each is not None]
    return tuple(made)


@functools.lru_cache(maxsize=4096)
def _layouts_made(call: LikeCall) -> Layout | tuple[Layout | None, ...]:
    given: list[Tensor] = []

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Layout):
            return leaf
        given.append(leaf.tensor([]))
        return given[-1]

    made = call.target(*map_aggregate(call.args, tensor), **map_aggregate(call.kwargs, tensor))
    results = [made] if isinstance(made, Tensor) else [*made]
    seen = [each.untyped_storage()._cdata for each in (*given, *(each for each in results if each is not None))]
    layouts, place = list[Layout | None](), len(given)
    for each in results:
        source = None if each is None else seen.index(each.untyped_storage()._cdata)
        layouts.append(None if each is None else Layout.of(each, source if source != place else None))
        place += each is not None
    return layouts[0] if isinstance(made, Tensor) and layouts[0] else tuple(layouts)


@dataclass(frozen=True, slots=True)
class LikeCall:
    """A call of an op on a device, equal to one whose arguments are equal and of the same Python types."""

    target: Any
    args: tuple[Any, ...] = field(compare=False)
    kwargs: Mapping[str, Any] = field(compare=False)
    device: str
    given: tuple[Any, ...]
    default: torch.dtype

    @staticmethod
    def of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta") -> LikeCall:
        """The call, with what describes tensors in their place."""
        given = (_told_apart(args), _told_apart(dict(kwargs)))
        return LikeCall(target, args, kwargs, device, given, torch.get_default_dtype())


def is_of_torch(target: Any) -> bool:
    """Whether an op is one of torch's own, which nothing but a call's arguments changes."""
    return getattr(target, "namespace", "") in ("aten", "prims")


def _told_apart(argument: Any) -> Any:
    """An argument that can be hashed, of which 1, 1.0 and True are three."""
    if isinstance(argument, dict):
        return tuple((name, _told_apart(value)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple(map(_told_apart, argument))
    return type(argument), argument
