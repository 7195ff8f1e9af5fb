"""While a model is compiled, garbage is looked for among new objects alone."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shardc
from shardc import Mesh
from shardc.garbage import new_garbage_only


class Ring:
    """An object that only a look for garbage can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()  # as tests/conftest.py


@pytest.mark.usefixtures("nothing_frozen")
def test_older_garbage_waits_for_the_end_and_newer_does_not() -> None:
    older = weakref.ref(Ring())
    with new_garbage_only():
        newer = weakref.ref(Ring())
        with new_garbage_only():
            gc.collect()
            assert newer() is None and older() is not None
        assert gc.get_freeze_count() > 0
    gc.collect()
    assert older() is None and gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_a_compile_leaves_nothing_frozen_whether_it_succeeds_or_not() -> None:
    found = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(gc.get_freeze_count())
            return super().forward(x)

    shardc.compile(Model(4, 4), Mesh(dp=2), args=(torch.ones(4, 4),))
    with pytest.raises(shardc.CaptureError):
        shardc.compile(Model(4, 4), Mesh(dp=2), args=(torch.ones(4, 3),))
    assert min(found) > 0 and gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with new_garbage_only():
        pass
    assert gc.get_freeze_count() >= frozen > 0
