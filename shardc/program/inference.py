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


def result_types(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta") -> Types:
    """The types of a call's results, given types for tensors, by a run on meta tensors, or on zeros where that fails.

    The results of torch's own ops depend on nothing else, so like calls, as in every layer, run once.
    """
    if not is_of_torch(target):
        return _types_by_run(target, args, kwargs, device)
    return _types_of_call(CallKey.of(target, args, kwargs, device))


@functools.lru_cache(maxsize=4096)
def _types_of_call(call: CallKey) -> Types:
    return _types_by_run(call.target, call.args, call.kwargs, call.device)


def _types_by_run(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Types:
    def tensor(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, TensorType) else leaf

    placed = {**kwargs, "device": device} if takes_device(target) else dict(kwargs)
    try:
        return types_of(target(*map_aggregate(args, tensor), **map_aggregate(placed, tensor)))
    except NotImplementedError:
        if device == "cpu":
            raise
        return _types_by_run(target, args, kwargs, "cpu")


def types_of(value: Any) -> Types:
    """The type of a tensor, or of each entry of a tuple or list, None for one that is no tensor."""
    if isinstance(value, torch.Tensor):
        return TensorType(tuple(map(int, value.shape)), value.dtype)
    if isinstance(value, (list, tuple)):
        types = (types_of(entry) for entry in value)
        return tuple(entry if isinstance(entry, TensorType) else None for entry in types)
    return None


def meta_results(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[fx.Node, Any]) -> Any:
    """The results of a call of one of torch's ops on meta tensors, which ``values`` has for the nodes in its arguments.

    Results have the strides, and share the memory, that torch gives them. Like calls run once.
    """
    tensors: list[Tensor] = []

    def layout(node: fx.Node) -> Any:
        tensors.append(values[node])
        return Layout.of(values[node])

    layouts = _result_layouts(CallKey.of(target, *fx.map_arg((args, dict(kwargs)), layout)))
    if isinstance(layouts, Layout):
        return layouts.tensor(tensors)
    results: list[Tensor | None] = []
    for each in layouts:
        result = None if each is None else each.tensor(tensors)
        results.append(result)
        tensors += [] if result is None else [result]
    return tuple(results)


@functools.lru_cache(maxsize=4096)
def _result_layouts(call: CallKey) -> Layout | tuple[Layout | None, ...]:
    tensors: list[Tensor] = []  # the call's, then its results

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Layout):
            return leaf
        tensors.append(leaf.tensor([]))
        return tensors[-1]

    returned = call.target(*map_aggregate(call.args, tensor), **map_aggregate(call.kwargs, tensor))
    layouts: list[Layout | None] = []
    for result in [returned] if isinstance(returned, Tensor) else returned:
        if result is None:
            layouts.append(None)
            continue
        memory = result.untyped_storage()._cdata
        owner = next((i for i, each in enumerate(tensors) if each.untyped_storage()._cdata == memory), None)
        layouts.append(Layout.of(result, owner))
        tensors.append(result)
    return layouts[0] if isinstance(returned, Tensor) and layouts[0] else tuple(layouts)


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and dtype of a tensor.

    ``owner``: the index, among the call's tensors and then its results, of the one whose memory it shares; None where
    its memory is new.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    owner: int | None = None

    @staticmethod
    def of(tensor: Tensor, owner: int | None = None) -> Layout:
        """The layout of a tensor; its offset in memory does not matter here."""
        return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, owner)

    def tensor(self, tensors: list[Tensor]) -> Tensor:
        """A meta tensor of this layout, in the memory of one of ``tensors`` where it has an owner."""
        if self.owner is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return tensors[self.owner].as_strided(self.shape, self.stride, 0)


@dataclass(frozen=True, slots=True)
class CallKey:
    """A call as the key of a cache: equal to one whose arguments are equal and of the same Python types."""

    target: Any
    args: tuple[Any, ...] = field(compare=False)
    kwargs: Mapping[str, Any] = field(compare=False)
    device: str
    arguments: tuple[Any, ...]
    default_dtype: torch.dtype

    @staticmethod
    def of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta") -> CallKey:
        """The key of a call whose arguments have types or layouts for tensors."""
        return CallKey(target, args, kwargs, device, (typed(args), typed(dict(kwargs))), torch.get_default_dtype())


def is_of_torch(target: Any) -> bool:
    """Whether an op is one of torch's own, whose result types depend on nothing but a call's arguments."""
    return getattr(target, "namespace", "") in ("aten", "prims")


def typed(argument: Any) -> Any:
    """An argument as a hashable value with its type, so that 1, 1.0 and True differ."""
    if isinstance(argument, dict):
        return tuple((name, typed(value)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple(map(typed, argument))
    if isinstance(argument, TensorType):
        return argument, *map(type, argument.shape)  # a size may be an expression, and equal a number
    return type(argument), argument
