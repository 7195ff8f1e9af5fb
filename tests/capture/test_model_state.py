"""A model's state is read again exactly when something changed that a program may depend on."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from shardc.capture.model_state import LatestState, model_state


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Options:
    depth: int = 1
    names: list[str] = field(default_factory=lambda: ["a"])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def _ring() -> list[Any]:
    ring: list[Any] = [[1]]
    ring.append(ring)
    return ring


def _nested(depth: int) -> dict[str, Any]:
    return {"inner": _nested(depth - 1) if depth else [1]}


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a dict": (lambda: {"a": 1}, lambda x: x.update(a=2)),
    "a dict's order": (lambda: OrderedDict(a=1, b=1), lambda x: x.move_to_end("a")),
    "an empty dict": (dict, lambda x: x.update(a=1)),
    "a list in a tuple": (lambda: (1, [2]), lambda x: x[1].append(3)),
    "a list in a named tuple in a dict": (lambda: {"p": Pair(1, [2])}, lambda x: x["p"].other.append(3)),
    "a plain object": (lambda: SimpleNamespace(a=[SimpleNamespace(b=1)]), lambda x: setattr(x.a[0], "b", 2)),
    "a plain object without attributes": (SimpleNamespace, lambda x: setattr(x, "a", 1)),
    "a dataclass": (Options, lambda x: x.names.append("b")),
    "an object with slots": (Slotted, lambda x: setattr(x, "scale", 2.0)),
    "an object with slots in a list": (lambda: [Slotted()], lambda x: setattr(x[0], "scale", 2.0)),
    "a deque": (lambda: [deque([1])], lambda x: x[0].append(2)),
    "a set": (lambda: {"s": {1}}, lambda x: x["s"].add(2)),
    "a partial": (lambda: partial(max, [1]), lambda x: x.args[0].append(2)),
    "a bound method": (lambda: Options().__eq__, lambda x: setattr(x.__self__, "depth", 2)),
    "a read-only mapping": (lambda: (d := {"a": 1}) and [MappingProxyType(d), d], lambda x: x[1].update(a=2)),
    "a numpy array": (lambda: {"n": numpy.zeros(3)}, lambda x: x["n"].fill(1)),
    "bytes in place": (lambda: [bytearray(b"a")], lambda x: x[0].append(1)),
    "an array": (lambda: [array("i", [1])], lambda x: x[0].append(1)),
    "a tensor of 0 dims": (lambda: {"t": torch.tensor(1.0)}, lambda x: x["t"].add_(1)),
    "a tensor": (lambda: {"t": torch.ones(2)}, lambda x: x["t"].add_(1)),
    "a value that contains itself": (_ring, lambda x: x[0].append(2)),
    "equal objects in place of others": (lambda: {"c": SimpleNamespace(a=1000)}, lambda x: x.update(c=_again())),
    "a number by an equal one": (lambda: SimpleNamespace(a=12345.5), lambda x: setattr(x, "a", float("12345.5"))),
    "a number by one of another type": (lambda: SimpleNamespace(a=1), lambda x: setattr(x, "a", True)),
    "a tensor's size": (lambda: {"t": torch.ones(2)}, lambda x: x["t"].resize_(3)),
    "a list of 3,000": (lambda: list(range(3000)), lambda x: x.append(1)),
    "a very long list": (lambda: list(range(20_000)), lambda x: x.append(1)),
    "a very long list that becomes short": (lambda: {"l": list(range(20_000))}, lambda x: x["l"].clear()),
    "a module that is no child": (lambda: [nn.Dropout(0.5)], lambda x: x[0].eval()),
    "a child of such a module": (lambda: [nn.Sequential(nn.Dropout(0.5))], lambda x: setattr(x[0][0], "p", 0.25)),
    "something very deep": (lambda: _nested(3), lambda x: x["inner"]["inner"]["inner"]["inner"].append(2)),
    "something too deep to be seen": (lambda: _nested(12), lambda x: _innermost(x).append(2)),
    "nothing": (lambda: {"a": [1, Options()]}, lambda x: None),
}


def _again() -> SimpleNamespace:
    return SimpleNamespace(a=int("1000"))


def _innermost(x: Any) -> Any:
    while isinstance(x, dict):
        x = x["inner"]
    return x


class Model(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(2, 2), value
        self.linear.shared = value  # type: ignore[assignment]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen_where_the_state_differs_and_nowhere_else(name: str) -> None:
    make, change = CHANGES[name]
    model, latest = Model(make()), LatestState()
    before, _ = latest.read(model)
    assert latest.is_same() and latest.read(model)[0] is before
    change(model.value)
    assert latest.is_same() == (model_state(model) == before)
    assert latest.read(model)[0] == model_state(model)
    assert latest.is_same()


def test_most_of_these_changes_are_seen() -> None:
    def is_seen(make: Callable[[], Any], change: Callable[[Any], Any]) -> bool:
        model = Model(make())
        before = model_state(model)
        change(model.value)
        return model_state(model) != before

    unseen = {name for name, each in CHANGES.items() if not is_seen(*each)}
    expected = {"a tensor", "a very long list", "something too deep to be seen", "nothing"}
    assert unseen == expected | {"equal objects in place of others", "a number by an equal one"}
