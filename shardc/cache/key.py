"""The key of a program before the first pass: a digest of all that passes read, the same in every process."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from shardc.cache.packed import OF_TORCH, NotPackedError, is_data, target_name
from shardc.language.mesh import Mesh
from shardc.program.program import Program

PACKAGE = Path(__file__).parents[1]
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.device, *OF_TORCH)


def key_of(program: Program) -> str:
    """The key of a program's result in the cache. Raises a NotPackedError for a program that holds more than data."""
    digests = _Digests({node: i for i, node in enumerate(program.graph.nodes)})
    nodes = [_node(program, node) for node in program.graph.nodes]
    return digests.of([_versions(), program.own_fields, nodes]).hex()


def _node(program: Program, node: fx.Node) -> list[Any]:
    target = target_name(node.target) if node.op == "call_function" else node.target
    return [node.op, node.name, target, node.args, node.kwargs, program.facts(node)]


class _Digests:
    """Digests of values, each computed once. ``nodes``: the index of each node, which stands for it."""

    def __init__(self, nodes: Mapping[fx.Node, int]) -> None:
        self.nodes = nodes
        self._known: dict[int, tuple[Any, bytes]] = {}  # by id, with the value, which is kept alive

    def of(self, value: Any) -> bytes:
        """The digest of a value's type and contents."""
        kind = type(value)
        if kind in PLAIN:
            return _hashed([kind.__name__.encode(), repr(value).encode()])
        if id(value) not in self._known:
            parts = [kind.__qualname__.encode(), *map(self.of, self._contents(value))]
            self._known[id(value)] = value, _hashed(parts)
        return self._known[id(value)][1]

    def _contents(self, value: Any) -> Iterator[Any]:
        if isinstance(value, fx.Node):
            yield self.nodes[value]
        elif isinstance(value, Mesh):
            yield repr(value)
        elif isinstance(value, Enum):
            yield value.name
        elif isinstance(value, Mapping):
            yield from (part for pair in value.items() for part in pair)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(value, key=repr)
        elif is_data(type(value)):
            yield from (getattr(value, each.name) for each in fields(value) if each.init)
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            raise NotPackedError(f"it holds a {type(value).__module__}.{type(value).__qualname__}")


@cache
def _versions() -> tuple[Any, ...]:
    """The versions of Python and torch, and a digest of all code of shardc."""
    paths = [Path(folder, name) for folder, _, names in os.walk(PACKAGE, followlinks=True) for name in names]
    texts = [path.read_bytes() for path in sorted(paths) if path.suffix == ".py"]
    return platform.python_version(), str(torch.__version__), _hashed(texts)


def _hashed(parts: Sequence[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
