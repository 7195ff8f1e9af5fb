"""A call's arguments as leaves, by the names of forward's arguments, and a call put together again of other leaves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardc.borrow import state_names
from shardc.error import ShardingError, raise_all
from shardc.tree import Tree, flatten, rebuild


def call_leaves(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], Tree]:
    """The leaves of a call by the names of forward's arguments, ``xs.0`` for ``*xs`` and ``foo`` for one of ``**kw``.

    An argument that is given as its default counts as not given.
    """
    named: dict[str, Any] = {}
    for name, place, default in _places(forward, len(args), tuple(kwargs)):
        if isinstance(place, dict):  # **kw
            named.update((key, kwargs[key]) for key in place)  # in order, which forward may see
        elif isinstance(place, tuple):  # *xs
            named[name] = tuple(args[i] for i in place)
        elif not _is_default(value := args[place] if isinstance(place, int) else kwargs[place], default):
            named[name] = value
    leaves, tree = flatten(named)
    raise_all([
        ShardingError(f"input {name!r}", "a tensor in a container", problem, remedy)
        for name, problem, remedy in unnamed(leaves)
    ])  # fmt: skip
    return leaves, tree


def rebuild_call(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with other tensors, by the names of the leaves."""
    bound = _bound(forward, args, kwargs)
    for name, value in bound.arguments.items():
        path = "" if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else name
        leaves, tree = flatten(value, path)
        bound.arguments[name] = rebuild(tree, (tensors.get(path, leaf) for path, leaf in leaves))
    return bound.args, bound.kwargs


def names_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By kind (``param``, ``input``, ``module``) every name that a pattern may mean, and the one name of its value.

    A tied parameter has several names, an entry ``foo`` of ``**kw`` is ``kw.foo`` too.
    """
    parameters, buffers, aliases = state_names(model)
    state = {name: name for name in (*parameters, *buffers)}
    leaves, _ = call_leaves(model.forward, args, kwargs)
    passed = {name: name for name, value in leaves if isinstance(value, torch.Tensor)}
    modules = {path: path for path, _ in model.named_modules() if path}
    return {"param": state | aliases, "input": passed | _keyword_names(model.forward, passed), "module": modules}


def _keyword_names(forward: Callable[..., Any], names: Iterable[str]) -> dict[str, str]:
    parameters = inspect.signature(forward).parameters
    rest = [parameter.name for parameter in parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    return {f"{kw}.{name}": name for kw in rest for name in names if name.partition(".")[0] not in parameters}


def unnamed(leaves: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """The name of every tensor that has none of its own, what is wrong with it, and what to do."""
    tensors: set[str] = set()
    for name, value in leaves:
        if isinstance(value, (set, frozenset)) and any(isinstance(each, torch.Tensor) for each in value):
            yield name, "it is in a set, which has no order: none says which tensor is which", "use a list or a tuple"
        if isinstance(value, torch.Tensor):
            if name in tensors:
                yield name, "two tensors have this path: a key with a dot reads as two", "rename one of the keys"
            tensors.add(name)


def _bound(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    signature = inspect.signature(forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ShardingError(
            "the inputs",
            f"forward takes {signature}",
            str(error),
            "give what forward takes: args=(x,) for a single tensor, kwargs={'name': y} for those by name",
        ) from None


def _places(forward: Callable[..., Any], count: int, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """For each argument of forward that is given: its name, the index or name that it is given by, and its default.

    Those of a method are found once for all objects that have it.
    """
    if isinstance(forward, MethodType):
        return _places_of_method(forward.__func__, count, names)
    bound = _bound(forward, range(count), dict(zip(names, names, strict=True)))
    parameters = bound.signature.parameters
    return [(name, place, parameters[name].default) for name, place in bound.arguments.items()]


@lru_cache(maxsize=256)
def _places_of_method(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    return _places(partial(function, None), count, names)


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    is_alike = isinstance(value, (int, float, str)) and type(value) is type(default) and value == default
    return is_alike and repr(value) == repr(default)  # -0.0 is not 0.0
