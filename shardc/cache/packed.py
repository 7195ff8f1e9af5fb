"""A program as bytes, and back.

Reading the bytes runs nothing that they contain. They name no function but ops, which must be torch's, shardc's own or
registered in this process. They make no objects but tuples, dicts, numbers and dataclasses of shardc.
"""

from __future__ import annotations

import io
import operator
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import reduce
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import fx

from shardc.language.mesh import Mesh
from shardc.language.rule import Rule
from shardc.program.program import Program
from shardc.program.provenance import Origin

OF_TORCH = (torch.dtype, torch.memory_format, torch.layout)
ROOMS = ("language", "ops", "options", "passes", "program", "schedules")  # whose functions and classes programs hold
LEVEL = 1  # of compression: programs repeat themselves


class NotPackedError(Exception):
    """A value that the cache cannot pack or unpack; the message names it."""


def pack_program(program: Program) -> bytes:
    """A program as bytes. Raises a NotPackedError for one with opaque calls, constants among arguments, or symbols."""
    nodes = list(program.graph.nodes)
    targets = {node.target: target_name(node.target) for node in nodes if node.op == "call_function"}
    places = {target: i for i, target in enumerate(targets)}
    heads = [(node.op, places[node.target] if node.op == "call_function" else node.target, node.name) for node in nodes]
    indices = {node: i for i, node in enumerate(nodes)}
    facts = [(_plain(node.args), _plain(node.kwargs), program.facts(node)) for node in nodes]
    return _packed((list(targets.values()), heads), (facts, program.own_fields), nodes=indices)


def unpack_program(data: bytes) -> Program:
    """Read a program from bytes. Raises a NotPackedError for bytes of anything else."""
    reader = _Reader(data)
    names, heads = reader.next()
    targets = [_target_of(name) for name in names]
    graph = fx.Graph()
    if not {op for op, _, _ in heads} <= {"placeholder", "call_function", "output"}:
        raise NotPackedError("it has nodes that no program has")
    reader.nodes = nodes = [
        graph.create_node(op, targets[target] if op == "call_function" else target, name=name)
        for op, target, name in heads
    ]
    rows, given = reader.next()
    program = Program(graph=graph, **given)
    for node, (args, kwargs, facts) in zip(nodes, rows, strict=True):
        node.args, node.kwargs = args, kwargs
        program.set_facts(node, facts)
    return program


# Targets of calls.


def target_name(target: Any) -> tuple[str, ...]:
    """The name of the op that a node calls, in parts. Raises a NotPackedError for a target that is no op."""
    if isinstance(target, torch._ops.OpOverload):
        return ("op", *str(target).split("."))
    if target is operator.getitem:
        return ("getitem",)
    if isinstance(target, FunctionType) and target.__module__.split(".")[0] == "shardc":
        return "function", target.__module__, target.__qualname__
    raise NotPackedError(f"it calls {getattr(target, '__name__', target)}, which is no op")


def _target_of(name: Sequence[str]) -> Any:
    kind, *parts = name
    if kind == "getitem":
        return operator.getitem
    try:
        if kind == "op":
            found = reduce(getattr, parts, torch.ops)
            if isinstance(found, torch._ops.OpOverload):
                return found
        elif kind == "function":
            module, function = parts
            found = getattr(_own_module(module), function)
            if isinstance(found, FunctionType):
                return found
    except (AttributeError, ValueError) as error:
        raise NotPackedError(f"there is no {'.'.join(parts)}") from error
    raise NotPackedError(f"{name} is called by no program")


def _own_module(name: str) -> Any:
    """A module of shardc whose functions and classes programs may hold. Raises a NotPackedError for any other."""
    if not name.startswith(tuple(f"shardc.{room}" for room in ROOMS)):
        raise NotPackedError(f"{name} is of no room whose objects programs have")
    try:
        return import_module(name)
    except ImportError as error:
        raise NotPackedError(f"there is no {name}") from error


def _plain(value: Any) -> Any:
    """The arguments of a node with plain containers in place of fx's."""
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return {key: _plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


# Pickles of data alone. Everything else is a persistent id, which this file reads.


def _packed(*values: Any, nodes: Mapping[fx.Node, int] | None = None) -> bytes:
    """Pack values, after a table of the origins that they refer to."""
    origins = dict[int, tuple[int, Any]]()
    texts = list[bytes]()
    for value in values:
        file = io.BytesIO()
        _Pickler(file, origins, nodes or {}).dump(value)
        texts.append(file.getvalue())
    table = io.BytesIO()
    _Pickler(table, {}, nodes or {}).dump([row for _, row in origins.values()])
    parts = [table.getvalue(), *texts]
    sizes = b"".join(len(part).to_bytes(8, "big") for part in parts)
    return zlib.compress(len(parts).to_bytes(8, "big") + sizes + b"".join(parts), LEVEL)


class _Pickler(pickle.Pickler):
    """Pickles data. ``origins``: by id, the index and the row of each origin so far; earlier origins come first."""

    def __init__(self, file: Any, origins: dict[int, tuple[int, Any]], nodes: Mapping[fx.Node, int]) -> None:
        super().__init__(file, protocol=5)
        self.origins, self.nodes = origins, nodes

    def persistent_id(self, value: Any) -> Any:
        """The persistent id of a value that is not pickled as data; None for any other."""
        kind = type(value)
        if kind is fx.Node:
            return self.nodes[value]
        if kind is Origin:
            return "origin", self._place(value)
        if kind in OF_TORCH:
            return "torch", str(value).removeprefix("torch.")
        if kind is torch.device:
            return "device", str(value)
        if isinstance(value, type):
            return "class", value.__module__, value.__qualname__
        return None

    def reducer_override(self, value: Any) -> Any:
        """Refuse all objects but our own dataclasses; of a rule pack the init fields alone."""
        if isinstance(value, Rule):
            return Rule, tuple(getattr(value, each.name) for each in fields(value) if each.init)
        if is_data(type(value)):
            return NotImplemented
        raise NotPackedError(f"it holds a {type(value).__module__}.{type(value).__qualname__}")

    def _place(self, origin: Origin) -> int:
        """The index of an origin. Chains of origins are long, so this does not recurse."""
        todo = [origin]
        while todo:
            each = todo[-1]
            before = [*filter(None, [each.previous]), *each.addends]
            missing = [other for other in before if id(other) not in self.origins]
            todo += missing
            if not missing:
                todo.pop()
                if id(each) not in self.origins:
                    previous = None if each.previous is None else self.origins[id(each.previous)][0]
                    addends = tuple(self.origins[id(other)][0] for other in each.addends)
                    row = (each.annotation, each.rank, each.value, each.via, previous, addends)
                    self.origins[id(each)] = len(self.origins), row
        return self.origins[id(origin)][0]


class _Reader:
    """Reads the output of ``_packed``. ``nodes``: the nodes, by the index that stands for each."""

    def __init__(self, data: bytes) -> None:
        try:
            text = zlib.decompress(data)
        except zlib.error as error:
            raise NotPackedError(str(error)) from error
        count = int.from_bytes(text[:8], "big")
        if 8 + 8 * count > len(text):
            raise NotPackedError("it ends early")
        start, self._texts = 8 + 8 * count, list[bytes]()
        for i in range(count):
            size = int.from_bytes(text[8 + 8 * i : 16 + 8 * i], "big")
            self._texts.append(text[start : start + size])
            start += size
        self.nodes: list[fx.Node] = []
        self._origins: list[Origin] = []
        for annotation, rank, value, via, previous, addends in self.next():
            before = None if previous is None else self._origins[previous]
            others = tuple(self._origins[i] for i in addends)
            self._origins.append(Origin(annotation, rank, value, via, before, others))

    def next(self) -> Any:
        """The next value."""
        return _Unpickler(io.BytesIO(self._texts.pop(0)), self.nodes, self._origins).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, nodes: Sequence[fx.Node], origins: Sequence[Origin]) -> None:
        super().__init__(file)
        self._nodes, self._origins = nodes, origins
        self._known: dict[Any, Any] = {}

    def persistent_load(self, name: Any) -> Any:
        """The value that a persistent id stands for."""
        if isinstance(name, int):
            return self._nodes[name]
        kind, *rest = name
        if kind == "origin":
            return self._origins[rest[0]]
        if name not in self._known:
            self._known[name] = _NAMED[kind](*rest)
        return self._known[name]

    def find_class(self, module: str, name: str) -> Any:
        """Refuse: everything that a file may name has a persistent id."""
        raise NotPackedError(f"it names {module}.{name}")


def is_data(kind: type) -> bool:
    """Whether objects of a class are data: dataclasses and enumerations of shardc."""
    is_own = kind.__module__.split(".")[0] == "shardc"
    return is_own and (is_dataclass(kind) or issubclass(kind, (Enum, Mesh)))


def _class_of(module: str, name: str) -> type:
    found = reduce(getattr, name.split("."), _own_module(module))
    if not isinstance(found, type) or not is_data(found):
        raise NotPackedError(f"{module}.{name} is no data")
    return found


def _of_torch(name: str) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, OF_TORCH):
        raise NotPackedError(f"torch.{name} is no dtype")
    return value


_NAMED: Mapping[str, Callable[..., Any]] = {"class": _class_of, "torch": _of_torch, "device": torch.device}
