"""Containers: any nesting of tuples, dicts, dataclasses and objects that hold tensors, as named leaves and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardc.frozen import attributes_of

_MAX_DEPTH = 8  # of plain objects inside plain objects


@dataclass(frozen=True, slots=True)
class Tree:
    """How a value nests, hashable: a leaf has no ``kind``; a container its type, its keys and its children."""

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()


LEAF = Tree()


def flatten(value: Any, name: str = "") -> tuple[list[tuple[str, Any]], Tree]:
    """The leaves with their paths (``batch.ids``, ``xs.0``), and the tree that ``rebuild`` takes.

    Whatever is no container is a leaf: tensors, numbers, None, modules.
    """
    items = _items(value)
    if items is None:
        return [(name, value)], LEAF
    leaves: list[tuple[str, Any]] = []
    children: list[Tree] = []
    for key, child in items:
        found, tree = flatten(child, f"{name}.{key}" if name else str(key))
        leaves += found
        children.append(tree)
    return leaves, Tree(type(value), tuple(key for key, _ in items), tuple(children))


def rebuild(tree: Tree, leaves: Iterable[Any]) -> Any:
    """The value again, from its tree and new leaves in the same order."""
    return _rebuild(tree, iter(leaves))


def _rebuild(tree: Tree, leaves: Iterator[Any]) -> Any:
    if tree.kind is None:
        return next(leaves)
    children = [_rebuild(child, leaves) for child in tree.children]
    return _make(tree.kind, tree.keys, children)


def _make(kind: type, keys: tuple[Any, ...], children: list[Any]) -> Any:
    if issubclass(kind, (tuple, list)):
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    if issubclass(kind, dict) and dataclasses.is_dataclass(kind):  # transformers' ModelOutput
        return kind(**dict(zip(keys, children, strict=True)))
    if issubclass(kind, dict):
        filled = kind()
        filled.update(zip(keys, children, strict=True))
        return filled
    made = kind.__new__(kind)
    for key, child in zip(keys, children, strict=True):
        object.__setattr__(made, key, child)
    return made


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """The children of a container with their keys; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, (tuple, list)):
        return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return list((fields if isinstance(value, dict) else fields | attributes_of(value)).items())
    if isinstance(value, dict):
        return list(value.items())
    return list(attributes_of(value).items()) if _holds_tensor(value, _MAX_DEPTH) else None


def _holds_tensor(value: Any, depth: int) -> bool:
    """Whether a plain object, such as a key-value cache, has a tensor somewhere in its attributes."""
    if depth == 0 or isinstance(value, (type, torch.Tensor, torch.nn.Module)):
        return False
    return any(_is_or_holds_tensor(child, depth - 1) for child in attributes_of(value).values())


def _is_or_holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any(_is_or_holds_tensor(child, depth) for child in value)
    if isinstance(value, dict):
        return any(_is_or_holds_tensor(child, depth) for child in value.values())
    return _holds_tensor(value, depth)
