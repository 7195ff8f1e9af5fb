"""What a forward may not do is said with its line, also where torch says a key error or nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.error import CaptureError


class Experts(nn.Module):
    """Modules and numbers that may be looked up by name."""

    def __init__(self, function: Callable[[Experts, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(3, 3) for i in range(2)})
        self.weights = {0: 1.0, 1: 2.0}

    def forward(self, x: Tensor, ids: Tensor) -> object:
        return self.function(self, x, ids)


X, IDS = torch.randn(4, 3), torch.tensor([1, 0, 1, 1])
REFUSED: dict[str, tuple[Callable[[Experts, Tensor, Tensor], object], str]] = {
    "a module by a number": (lambda self, x, ids: self.experts[f"expert_{ids[0]}"](x), "what is looked up depends"),
    "an attribute by a number": (
        lambda self, x, ids: getattr(self, f"expert_{ids[0]}")(x),
        "what is looked up depends",
    ),
    "a dict by a tensor": (lambda self, x, ids: x * self.weights[ids[0]], "what is looked up depends"),
    "a number with a form": (lambda self, x, ids: print(f"{x.sum():.3f}"), "depends on the value of a tensor"),
    "a tensor of tensors": (lambda self, x, ids: x * torch.tensor([x[0, 0], 1, 1]), "torch.stack, not torch.tensor"),
    "numpy": (lambda self, x, ids: x * float(np.mean(x)), "write this line with other ops of torch"),
    "a generator": (lambda self, x, ids: x + torch.rand(3, generator=torch.Generator()), "leave generator= out"),
    "results to come": (lambda self, x, ids: (x * i for i in range(2)), "return a list or a tuple"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_graph_is_a_capture_error_that_names_the_line(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(CaptureError) as raised:
        shardc.compile(Experts(function), Mesh(dp=2), {"x": P("dp")}, args=(X, IDS))
    assert said in str(raised.value)
    is_output = name == "results to come"
    assert raised.value.who == "output 'output'" or (not is_output and raised.value.who.startswith("test_refusal.py:"))


def test_a_key_that_is_missing_anyway_keeps_its_type() -> None:
    with pytest.raises(KeyError, match="none"):
        shardc.compile(Experts(lambda self, x, ids: self.experts["none"](x)), Mesh(dp=2), {}, args=(X, IDS))


def test_a_number_that_is_known_is_formatted_by_its_value() -> None:
    def by_name(self: Experts, x: Tensor, ids: Tensor) -> Tensor:
        for i in torch.arange(2):
            x = self.experts[f"expert_{i}"](x)
        assert f"of {x.sum()}"  # a message
        return x

    model = Experts(by_name)
    found, _ = shardc.compile(model, Mesh(dp=2), {"x": P("dp")}, args=(X, IDS)).simulate(X, IDS)
    torch.testing.assert_close(found, by_name(model, X, IDS).detach())
