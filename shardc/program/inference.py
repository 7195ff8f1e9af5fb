"""Shape inference: run each distinct call once on meta tensors; cache its result types, strides and shared memory."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from shardc.language.sharding import TensorType
from shardc.language.size import Symbolic, symbolic_of
from shardc.program.node import takes_device

Types = TensorType | tuple[TensorType | None, ...] | None


def result_types(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta") -> Types:
    """The types of a call's results, given types for tensors: run it on meta tensors, or on zeros if that fails.

    The result types of known ops depend on nothing but arguments, so equal calls, as in every layer, run once.
    """
    if not is_known(target):
        return _types_by_run(target, args, kwargs, device)
    return _types_of_call(CallKey.of(target, args, kwargs, device))


@functools.lru_cache(maxsize=4096)
def _types_of_call(call: CallKey) -> Types:
    return _types_by_run(call.target, call.args, call.kwargs, call.device)


def _types_by_run(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Types:
    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, TensorType):
            return torch.zeros([*map(symbolic_of, leaf.shape)], dtype=leaf.dtype, device=device)
        return symbolic_of(leaf)

    placed = {**kwargs, "device": device} if takes_device(target) else dict(kwargs)
    try:
        with symbolic_shapes((args, kwargs)):
            return types_of(target(*map_aggregate(args, tensor), **map_aggregate(placed, tensor)))
    except NotImplementedError:
        if device == "cpu":
            raise
        return _types_by_run(target, args, kwargs, "cpu")


def symbolic_shapes(arguments: Any) -> AbstractContextManager[Any]:
    """In the block tensors may be made with symbolic sizes, if the arguments have some."""
    environments = set[Any]()

    def note(leaf: Any) -> Any:
        numbers = leaf.shape if isinstance(leaf, (TensorType, Layout)) else (leaf,)
        environments.update(number.environment for number in numbers if isinstance(number, Symbolic))
        return leaf

    map_aggregate(arguments, note)
    return FakeTensorMode(shape_env=environments.pop()) if environments else nullcontext()


def types_of(value: Any) -> Types:
    """The type of a tensor, or of each entry of a tuple or list, None for one that is no tensor."""
    if isinstance(value, torch.Tensor):
        return TensorType.of(value)
    if isinstance(value, (list, tuple)):
        types = (types_of(entry) for entry in value)
        return tuple(entry if isinstance(entry, TensorType) else None for entry in types)
    return None


def result_layouts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Layouts:
    """The layouts of a call's results, given layouts for tensors: strides and shared memory as the op makes them."""
    key = CallKey.of(target, args, kwargs)
    return _layouts_of_call(key) if is_known(target) else _layouts_by_run(key)


def _layouts_by_run(call: CallKey) -> Layouts:
    tensors: list[Tensor] = []  # the call's, then its results

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Layout):
            return leaf
        tensors.append(torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta"))
        return tensors[-1]

    returned = call.target(*map_aggregate(call.args, tensor), **map_aggregate(call.kwargs, tensor))
    layouts: list[Layout | None] = []
    for result in [returned] if isinstance(returned, Tensor) else returned:
        if not isinstance(result, Tensor):  # an attention kernel of a GPU returns numbers too
            layouts.append(None)
            continue
        memory = result.untyped_storage()._cdata
        owner = next((i for i, each in enumerate(tensors) if each.untyped_storage()._cdata == memory), None)
        layouts.append(Layout(tuple(result.shape), result.stride(), result.dtype, owner))
        tensors.append(result)
    return tuple(layouts)


_layouts_of_call = functools.lru_cache(maxsize=4096)(_layouts_by_run)  # equal calls, as in every layer, run once


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and dtype of a tensor. Its offset in memory does not matter here.

    ``owner``: for a call's result, the index of the tensor whose memory it shares, among the call's tensors and then
    its results; None if its memory is new.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    owner: int | None = None

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def new(type_: TensorType) -> Layout:
        """The layout of a new tensor, whose elements follow each other."""
        steps = accumulate(map(partial(max, 1), type_.shape[:0:-1]), operator.mul, initial=1)
        return Layout(type_.shape, tuple(steps)[::-1][-len(type_.shape) :] if type_.shape else (), type_.dtype)


Layouts = tuple[Layout | None, ...]  # of a call's results


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


def is_known(target: Any) -> bool:
    """Whether an op is torch's or shardc's own, whose result types depend on nothing but a call's arguments."""
    is_of_torch = getattr(target, "namespace", "") in ("aten", "prims")
    return is_of_torch or getattr(target, "__module__", "").startswith("shardc.")


def typed(argument: Any) -> Any:
    """An argument as a hashable value with its type, so that 1, 1.0 and True differ."""
    if isinstance(argument, dict):
        return tuple((name, typed(value)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple(map(typed, argument))
    if isinstance(argument, TensorType):
        return argument, *map(type, argument.shape)  # a size may be an expression, and equal a number
    return type(argument), argument
