"""Objects among the arguments of a call, such as key-value caches: the caller sees what the model changes in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardc.capture.containers import MAX_DEPTH, Named, Tree, flatten, is_mutable_container, rebuild, update
from shardc.capture.signature import BY_IDENTITY, Constant, Leaf, TensorLeaf, attributes_of, leaf_of


@dataclass(frozen=True, slots=True)
class Kept:
    """A leaf of an object that is the same as before the call. ``path``: its path in the call."""

    path: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A leaf of an output that is an object among the arguments. ``path``: that of the object in the call."""

    path: str


@dataclass(frozen=True, slots=True)
class ObjectAfter:
    """The contents of an object among the arguments after the call.

    ``path``: that of the object in the call. Tensors in ``leaves`` are outputs of the program, in order.
    """

    path: str
    leaves: tuple[tuple[str, Leaf | Kept], ...]
    tree: Tree

    @property
    def outputs(self) -> list[tuple[str, TensorLeaf]]:
        """The new tensors in the object."""
        return [(name, leaf) for name, leaf in self.leaves if isinstance(leaf, TensorLeaf)]

    def values(self, before: Mapping[str, Any], tensors: Iterator[Any]) -> list[Any]:
        """The values of the leaves. ``before``: those before the call; ``tensors``: the program's outputs."""
        return [
            before[leaf.path] if isinstance(leaf, Kept) else leaf.value if isinstance(leaf, Constant) else next(tensors)
            for _, leaf in self.leaves
        ]

    def remade(self, value: Any, tensors: Iterator[Any]) -> Any:
        """A new object like ``value`` after the call."""
        return rebuild(self.tree, self.values(dict(leaves_inside(value, self.path)[0]), tensors))

    def updated(self, value: Any, tensors: Iterator[Any]) -> Any:
        """``value`` itself, changed as the call changes it."""
        return update(value, self.tree, self.values(dict(leaves_inside(value, self.path)[0]), tensors))


class CallObjects:
    """The objects among the arguments of a call that is captured, by path, with their leaves before it."""

    def __init__(self, arguments: Sequence[Named]) -> None:
        self.values = objects_among(arguments)
        self._before = {path: _described(leaves_inside(value, path)[0]) for path, value in self.values.items()}

    def path_of(self, value: Any) -> str | None:
        """The path of an object of the call; None for any other value."""
        return next((path for path, each in self.values.items() if each is value), None)

    def after(self, returned: Collection[str]) -> tuple[tuple[ObjectAfter, ...], list[Named]]:
        """The objects that the call changed, or that are ``returned``, and the tensors that it left in them."""
        objects, tensors = list[ObjectAfter](), list[Named]()
        for path, value in self.values.items():
            before = self._before[path]
            leaves, tree = leaves_inside(value, path)
            described = tuple((name, self._leaf(name, each, before)) for name, each in leaves)
            is_changed = len(leaves) != len(before) or not all(isinstance(leaf, Kept) for _, leaf in described)
            if is_changed or path in returned:
                objects.append(ObjectAfter(path, described, tree))
                tensors += [(name, each) for (name, each), (_, leaf) in zip(leaves, described, strict=True)
                            if isinstance(leaf, TensorLeaf)]  # fmt: skip
        return tuple(objects), tensors

    @staticmethod
    def _leaf(name: str, value: Any, before: Mapping[str, tuple[Any, Leaf]]) -> Leaf | Kept:
        old, described = before.get(name, (None, None))
        leaf = leaf_of(value)
        is_kept = described is not None and (value is old if isinstance(value, torch.Tensor) else leaf == described)
        return Kept(name) if is_kept else leaf


def _described(leaves: Sequence[Named]) -> dict[str, tuple[Any, Leaf]]:
    return {name: (value, leaf_of(value)) for name, value in leaves}


def objects_among(arguments: Sequence[Named]) -> dict[str, Any]:
    """The objects among named values, or in containers of them, by path."""
    leaves = (leaf for name, value in arguments for leaf in flatten(value, name, is_object)[0])
    return {name: value for name, value in leaves if is_object(value)}


def is_object(value: Any) -> bool:
    """Whether a model may change a value: a list, a dict, or a plain object, but no tensor, function or module."""
    if is_mutable_container(value):
        return True
    if isinstance(value, (torch.Tensor, tuple, dict, Enum, partial, nn.Module, *BY_IDENTITY, MethodType)):
        return False
    return hasattr(value, "__dict__") or bool(attributes_of(value))


def leaves_inside(value: Any, path: str) -> tuple[list[Named], Tree]:
    """The leaves of an object by path, and its tree, even if it holds no tensors."""
    if is_mutable_container(value):
        return flatten(value, path)
    leaves, children = list[Named](), list[Tree]()
    attributes = attributes_of(value)
    for key, child in attributes.items():
        inside, tree = flatten(child, f"{path}.{key}")
        leaves += inside
        children.append(tree)
    return leaves, Tree(type(value), tuple(attributes), tuple(children))


@contextmanager
def preserved(arguments: Sequence[Named]) -> Iterator[None]:
    """Undo at the end of the block its changes to the objects among the arguments of a call, and to their contents."""
    before = dict[int, tuple[Any, Any]]()
    for value in objects_among(arguments).values():
        _remember(value, before, 0)
    try:
        yield
    finally:
        for value, content in before.values():
            _restore(value, content)


def _remember(value: Any, before: dict[int, tuple[Any, Any]], depth: int) -> None:
    """Enter an object, list or dict, and those inside it, in ``before``: by id, with a copy of its contents."""
    if id(value) in before or depth > MAX_DEPTH:
        return
    if isinstance(value, (list, tuple)):
        content: Any = list(value)
    elif isinstance(value, dict):
        content = dict(value)
    elif is_object(value):
        content = attributes_of(value)
    else:
        return
    before[id(value)] = value, content
    for child in content.values() if isinstance(content, dict) else content:
        _remember(child, before, depth + 1)


def _restore(value: Any, content: Any) -> None:
    if isinstance(value, list):
        value[:] = content
    elif is_mutable_container(value):
        value.clear()
        value.update(content)
    elif not isinstance(value, (tuple, dict)):
        for name in attributes_of(value).keys() - content.keys():
            object.__delattr__(value, name)
        for name, each in content.items():
            object.__setattr__(value, name, each)
