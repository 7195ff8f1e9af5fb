"""Flatten and rebuild values with tensors in them: containers, dataclasses, key-value caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardc.capture.signature import attributes_of

MAX_DEPTH = 8  # of plain objects inside plain objects


@dataclass(frozen=True, slots=True)
class Tree:
    """The nesting of a value, hashable: of a container its type, keys and children; a leaf has no ``kind``."""

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()

    def __str__(self) -> str:
        """``{'ids': _, 'mask': _}``, ``(_, _)`` or ``Cache(keys=_)``: leaves are underscores."""
        if self.kind is None:
            return "_"
        if self.kind in (tuple, list):
            inner = ", ".join(map(str, self.children))
            return f"[{inner}]" if self.kind is list else f"({inner}{',' * (len(self.children) == 1)})"
        if self.kind is dict:
            return f"{{{', '.join(f'{key!r}: {child}' for key, child in zip(self.keys, self.children, strict=True))}}}"
        pairs = zip(self.keys, self.children, strict=True)
        return f"{self.kind.__name__}({', '.join(f'{key}={child}' for key, child in pairs)})"


LEAF = Tree()
Named = tuple[str, Any]
"""A leaf with its path."""


def flatten(value: Any, name: str = "", is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Named], Tree]:
    """The leaves with their paths (``batch.ids``, ``xs.0``), and the tree for ``rebuild``.

    Everything that is no container is a leaf: tensors, numbers, None, modules. So is a value for which ``is_leaf`` is
    true. Unlike ``torch.utils._pytree`` this looks into dataclasses, subclasses of dict and plain objects (key-value
    caches) without a registration, which would be global.
    """
    items = None if is_leaf is not None and is_leaf(value) else _items(value)
    if items is None:
        return [(name, value)], LEAF
    leaves: list[Named] = []
    children: list[Tree] = []
    for key, child in items:
        child_leaves, tree = flatten(child, f"{name}.{key}" if name else str(key), is_leaf)
        leaves += child_leaves
        children.append(tree)
    return leaves, Tree(type(value), tuple(key for key, _ in items), tuple(children))


def rebuild(tree: Tree, leaves: Iterable[Any]) -> Any:
    """The value of a tree with new leaves, in the order of ``flatten``."""
    kind, rest = tree.kind, iter(leaves)
    if kind is None:
        return next(rest)
    children = [rebuild(child, rest) for child in tree.children]
    return _made(kind, tuple(zip(tree.keys, children, strict=True)))


def update(value: Any, tree: Tree, leaves: Iterable[Any]) -> Any:
    """The value of a tree with new leaves: ``value`` itself, changed in place, if it is mutable and of the same kind.

    Lists, dicts and plain objects are changed in place, and so are those inside them.
    """
    rest = iter(leaves)
    if tree.kind is None:
        return next(rest)
    kind: Any = tree.kind
    old = dict(_items(value) or attributes_of(value).items()) if type(value) is kind else {}
    children = [update(old.get(key), child, rest) for key, child in zip(tree.keys, tree.children, strict=True)]
    items = tuple(zip(tree.keys, children, strict=True))
    is_fixed = issubclass(kind, (tuple, dict)) and not is_mutable_container(value)  # a ModelOutput takes no update
    if type(value) is not kind or is_fixed:
        return _made(kind, items)
    if issubclass(kind, list):
        value[:] = children
    elif issubclass(kind, dict):
        for key in old.keys() - dict(items).keys():
            del value[key]
        value.update(items)
    else:
        for key in old.keys() - dict(items).keys():
            object.__delattr__(value, key)
        for key, child in items:
            object.__setattr__(value, key, child)
    return value


def is_mutable_container(value: Any) -> bool:
    """Whether a value is a list, or a dict that is no ModelOutput."""
    return isinstance(value, list) or (isinstance(value, dict) and not dataclasses.is_dataclass(value))


def _made(kind: type, items: Sequence[tuple[Any, Any]]) -> Any:
    """A new container or plain object of the class ``kind`` with these items."""
    if issubclass(kind, (tuple, list)):
        children = [child for _, child in items]
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    if issubclass(kind, dict) and dataclasses.is_dataclass(kind):  # transformers' ModelOutput
        return kind(**dict(items))
    if issubclass(kind, dict):
        mapping = kind()
        mapping.update(items)
        return mapping
    value = kind.__new__(kind)
    for key, child in items:
        object.__setattr__(value, key, child)
    return value


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
    return list(attributes_of(value).items()) if _holds_tensor(value, MAX_DEPTH) else None


def _holds_tensor(value: Any, depth: int) -> bool:
    """Whether a value is a tensor, or a container or plain object (a key-value cache) with one in it."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list, dict)):
        return any(_holds_tensor(child, depth) for child in (value.values() if isinstance(value, dict) else value))
    if depth == 0 or isinstance(value, (type, torch.nn.Module)):
        return False
    return any(_holds_tensor(child, depth - 1) for child in attributes_of(value).values())


def unnamed(leaves: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """For every tensor without a unique name, the name that it would have, the problem, and the remedy."""
    tensors: set[str] = set()
    for name, value in leaves:
        if isinstance(value, (set, frozenset)) and any(isinstance(each, torch.Tensor) for each in value):
            yield name, "it is in a set, which has no order: none says which tensor is which", "use a list or a tuple"
        if isinstance(value, torch.Tensor):
            if name in tensors:
                yield name, "two tensors have this path: a key with a dot reads as two", "rename one of the keys"
            tensors.add(name)
