"""Code that cannot be captured is an error with its line, also where torch raises a key error or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.language.errors import CaptureError, place_in_model


class Experts(nn.Module):
    """Modules and numbers that may be looked up by name."""

    def __init__(self, function: Callable[[Experts, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(3, 3) for i in range(2)})
        self.weights = {0: 1.0, 1: 2.0}

    def forward(self, x: Tensor, ids: Tensor) -> object:
        return self.function(self, x, ids)


def checked(x: Tensor) -> Tensor:
    assert x.max() < 8 + torch.rand(())
    return x


X, IDS = torch.randn(4, 3), torch.tensor([1, 0, 1, 1])
REFUSED: dict[str, tuple[Callable[[Experts, Tensor, Tensor], object], str]] = {
    "a module by a number": (lambda self, x, ids: self.experts[f"expert_{ids[0]}"](x), "what is looked up depends"),
    "an attribute by a number": (
        lambda self, x, ids: getattr(self, f"expert_{ids[0]}")(x),
        "what is looked up depends",
    ),
    "a dict by a tensor": (lambda self, x, ids: x * self.weights[ids[0]], "what is looked up depends"),
    "a tensor of tensors": (lambda self, x, ids: x * torch.Tensor([x[0, 0], 1, 1]), "torch.stack, not torch.Tensor"),
    "numpy": (lambda self, x, ids: x * float(np.mean(x)), "write this line with other ops of torch"),
    "a generator": (lambda self, x, ids: x + torch.rand(3, generator=torch.Generator()), "leave generator= out"),
    "a seed": (
        lambda self, x, ids: x + torch.manual_seed(0).initial_seed(),
        "the model itself seeds torch's generator",
    ),
    "a check of values": (lambda self, x, ids: checked(x), "write torch._assert(condition, message)"),
    "a collective": (lambda self, x, ids: torch.ops._c10d_functional.wait_tensor(x), "the model itself communicates"),
    "results to come": (lambda self, x, ids: (x * i for i in range(2)), "return a list or a tuple"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_code_without_a_graph_is_a_capture_error_that_names_the_line(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(CaptureError) as raised:
        shardc.compile(Experts(function), Mesh(dp=2), {"x": P("dp")}, args=(X, IDS))
    assert said in str(raised.value)
    is_output = name == "results to come"
    assert raised.value.who == "output 'output'" or (not is_output and raised.value.who.startswith("test_refusal.py:"))


def test_a_key_that_is_missing_anyway_keeps_its_type() -> None:
    with pytest.raises(KeyError, match="none"):
        shardc.compile(Experts(lambda self, x, ids: self.experts["none"](x)), Mesh(dp=2), {}, args=(X, IDS))


def test_errors_of_the_model_and_of_its_ops_name_their_line() -> None:
    with pytest.raises(KeyError) as raised:
        shardc.compile(Experts(lambda self, x, ids: self.experts["none"](x)), Mesh(dp=2), {}, args=(X, IDS))
    assert place_in_model(raised.value).startswith("test_refusal.py:")
    program = shardc.compile(Experts(lambda self, x, ids: x[ids]), Mesh(dp=2), {}, args=(X, IDS))
    with pytest.raises((IndexError, RuntimeError)) as failed:
        program.simulate(X, IDS + 4)
    assert place_in_model(failed.value).startswith("test_refusal.py:")


def test_torch_prints_nothing_beside_the_error(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with pytest.raises(CaptureError, match="must have same reduction dim"):
        shardc.compile(nn.Linear(4, 4), Mesh(dp=2), {}, args=(X,))
    assert not [found for found in caplog.records if found.levelno >= logging.WARNING] and not logger.disabled


def test_a_number_that_is_known_is_formatted_by_its_value() -> None:
    def by_name(self: Experts, x: Tensor, ids: Tensor) -> Tensor:
        for i in torch.arange(2):
            x = self.experts[f"expert_{i}"](x)
        assert f"of {x.sum()}"  # a message
        return x

    model = Experts(by_name)
    found, _ = shardc.compile(model, Mesh(dp=2), {"x": P("dp")}, args=(X, IDS)).simulate(X, IDS)
    torch.testing.assert_close(found, by_name(model, X, IDS).detach())
