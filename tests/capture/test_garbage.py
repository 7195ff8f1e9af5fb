"""While a model is compiled, garbage is looked for among young objects alone."""

import gc
import weakref

import pytest
import torch
from torch import nn

import shardc
from shardc import Mesh
from shardc.capture.tracing import NEVER, young_garbage_only


class Ring:
    """An object that only a look for garbage can free."""

    def __init__(self) -> None:
        self.itself = self


def test_young_garbage_goes_and_what_was_before_is_put_back_once() -> None:
    before = gc.get_threshold()
    with young_garbage_only():
        with young_garbage_only():
            young = weakref.ref(Ring())
        assert gc.get_threshold() == (*before[:2], NEVER)
        rings = [[] for _ in range(10 * before[0] * before[1])]
        assert young() is None and rings
    assert gc.get_threshold() == before


def test_a_compile_puts_back_what_was_whether_it_succeeds_or_not() -> None:
    found, before = [], gc.get_threshold()

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(gc.get_threshold())
            return super().forward(x)

    shardc.compile(Model(4, 4), Mesh(dp=2), args=(torch.ones(4, 4),))
    with pytest.raises(shardc.CaptureError):
        shardc.compile(Model(4, 4), Mesh(dp=2), args=(torch.ones(4, 3),))
    assert {*found} == {(*before[:2], NEVER)} and gc.get_threshold() == before
