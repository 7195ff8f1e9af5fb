"""A change of a parallel module takes effect at its next call, as it would on the model alone."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh

MESH = Mesh(dp=2, tp=2)


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("rows", "scale")

    def __init__(self, scale: float, rows: Tensor | None = None) -> None:
        self.scale, self.rows = scale, rows

    def scaled(self, _module: Any, _args: Any, output: Tensor) -> Tensor:
        """A hook, which is bound to what it reads."""
        return output * self.scale


@dataclass
class Batch:
    """Of its attributes one is no field."""

    rows: Tensor

    def __post_init__(self) -> None:
        self.scale = float(len(self.rows))


class Model(nn.Module):
    """Three layers, the last tied to the first, and a little of all else that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight, self.last = self.first.weight, self.first
        self.register_buffer("shift", torch.ones(8))
        self.register_buffer("other", torch.full((8,), 3.0))
        self.register_buffer("alias", self.shift)
        self.window, self.bits, self.numbers = deque([1.0]), bytearray(b"\1"), array("d", [1.0])
        self.slotted, self._factor, self._latest = Slotted(2.0), 1.0, 1.0
        self.second.register_forward_hook(self.slotted.scaled)

    @property
    def factor(self) -> float:
        """What all is multiplied by."""
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        self._factor = value

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(self.second(self.first(x)).tanh()) * self._factor * self._latest * getattr(self, "extra", 1.0)
        y = y * sum(self.window) * self.bits[0] * self.numbers[0]
        y = self.last(y) if self.last is not None else y
        for buffer in self._buffers.values():
            y = y if buffer is None else y * buffer
        return y + len(self._buffers)


def tie(model: Any, name: str) -> None:
    model.third.weight = getattr(model, name).weight


def rename(model: Any) -> None:
    model.later = model.other
    del model.other


CHANGES: dict[str, Callable[[Any], Any]] = {
    "what a parameter is tied to": lambda model: tie(model, "second"),
    "a tie that comes": lambda model: (setattr(model.third, "weight", nn.Parameter(torch.eye(8))), model(rows()),
                                       tie(model, "second")),
    "what a module is shared with": lambda model: setattr(model, "last", model.second),
    "what a buffer is shared with": lambda model: setattr(model, "alias", model.other),
    "a module by one without parameters": lambda model: setattr(model, "second", nn.Identity()),
    "a module by None": lambda model: setattr(model, "last", None),
    "a parameter by None": lambda model: setattr(model.third, "bias", None),
    "a parameter's size": lambda model: setattr(model.third, "bias", nn.Parameter(torch.ones(1))),
    "a buffer by None": lambda model: setattr(model, "shift", None),
    "a buffer's size": lambda model: setattr(model, "other", torch.full((1,), 5.0)),
    "a buffer's name": rename,
    "a deleted buffer": lambda model: delattr(model, "other"),
    "a new attribute": lambda model: setattr(model, "extra", 3.0),
    "a property": lambda model: setattr(model, "factor", 3.0),
    "an attribute deleted": lambda model: (setattr(model, "extra", 3.0), model(rows()), delattr(model, "extra")),
    "a deque": lambda model: model.window.append(2.0),
    "bytes": lambda model: model.bits.__setitem__(0, 3),
    "an array": lambda model: model.numbers.__setitem__(0, 3.0),
    "a slot, by a hook that is a method": lambda model: setattr(model.slotted, "scale", 3.0),
}  # fmt: skip


def rows() -> Tensor:
    return torch.arange(32, dtype=torch.float32).view(4, 8) / 32


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_takes_effect_at_the_next_call(name: str) -> None:
    torch.manual_seed(0)
    alone = Model()
    parallel = shardc.parallelize(alone, MESH, {})
    torch.testing.assert_close(parallel(rows()), alone(rows()))
    for model in (alone, parallel):
        CHANGES[name](model)
    torch.testing.assert_close(parallel(rows()), alone(rows()))


class Called(nn.Module):
    """A layer, and a function of it and of what a call gives."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor, scale: float = 0.0, **more: Any) -> Tensor:
        return self.function(self.layer, x, scale, more)


def weighted(layer: nn.Module, x: Tensor, scale: float, more: dict[str, Tensor]) -> Tensor:
    return layer(x) + sum(i * each for i, each in enumerate(more.values())) + torch.copysign(x, torch.tensor(scale))


def scaled(layer: nn.Module, x: Any, scale: float, more: dict[str, Tensor]) -> Tensor:
    return layer(x.rows) * x.scale


def test_the_order_of_keywords_and_the_sign_of_a_zero_are_seen() -> None:
    alone = Called(weighted)
    parallel, one, two = shardc.parallelize(alone, MESH, {}), rows() + 1, rows() + 2
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((rows(),), {"one": one, "two": two}), ((rows(),), {"two": two, "one": one}), ((rows(), -0.0), {}),
        ((rows(), 0.0), {}),
    ]  # fmt: skip
    for args, kwargs in calls:
        torch.testing.assert_close(parallel(*args, **kwargs), alone(*args, **kwargs))


def test_attributes_of_an_argument_are_seen_in_slots_and_beside_fields() -> None:
    alone, batch = Called(scaled), Slotted(1.0, rows())
    parallel = shardc.parallelize(alone, MESH, {})
    for x in (batch, Batch(rows()), Batch(rows()[:2])):
        torch.testing.assert_close(parallel(x), alone(x))
    for name, value in (("rows", rows() + 1), ("scale", 3.0)):
        setattr(batch, name, value)
        torch.testing.assert_close(parallel(batch), alone(batch))
    assert len(parallel.shardc.variants) == 4, "a tensor in a slot is no constant"
