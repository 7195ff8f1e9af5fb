"""What a compiled model reports, and when it cannot run."""

from __future__ import annotations

import pytest
import torch

import shardc
from shardc import Mesh, P, ShardingError


def linear(device: str = "cpu") -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 6, device=device)


def test_a_model_on_meta_compiles_but_does_not_run() -> None:
    x = torch.randn(2, 4)
    compiled = shardc.compile(linear("meta"), Mesh(tp=2), {"weight": P("tp")}, args=(x,))
    with pytest.raises(ShardingError) as caught:
        compiled.simulate(x)
    assert str(caught.value) == (
        "parameter 'weight': it is on meta, as are 1 others\n"
        "  a program can be compiled and dumped without values, but not run\n"
        "  give the model values: model.to_empty(device='cpu') and its initialisers"
    )


def test_a_compiled_model_tells_shardings_collectives_and_memory_by_name() -> None:
    x = torch.randn(2, 4)
    compiled = shardc.compile(linear(), Mesh(tp=2), {"weight": P("tp"), "output:*": P()}, args=(x,))
    assert str(compiled.shardings["weight"]) == "[_@tp, _]"
    assert str(compiled.shardings["bias"]) == "[_@tp]"
    assert str(compiled.shardings["input"]) == "[_, _]"
    assert [(each.kind, each.axes, each.local_shape_out) for each in compiled.collectives] == [
        ("all_gather", ("tp",), (2, 6))
    ]
    assert compiled.memory["parameters"] == (3 * 4 + 3) * 4
    assert next(iter(compiled.seconds)) == "capture" and compiled.at("capture").level == "captured"


def test_an_output_that_is_no_loss_takes_the_gradient_that_is_given() -> None:
    model, x, gradient = linear(), torch.randn(2, 4), torch.randn(2, 6)
    expected = torch.autograd.grad(model(x), list(model.parameters()), gradient)
    compiled = shardc.compile(model, Mesh(dp=2), {"input": P("dp")}, args=(x,))
    output, gradients = compiled.simulate(x, grad_outputs={"output": gradient})
    torch.testing.assert_close(output, model(x))
    for name, found in zip(("weight", "bias"), expected, strict=True):
        torch.testing.assert_close(gradients[name], found)


@pytest.mark.parametrize("placed", ["param:w", "input:w"])
@pytest.mark.parametrize("zero", [None, shardc.Zero(stage=3)])
def test_an_input_with_the_name_of_a_parameter_has_a_gradient_of_its_own(placed: str, zero: shardc.Zero | None) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(16.0).reshape(4, 4) / 8)

        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return (self.w * self.w).sum() * (w * w).sum()

    model, w = Model(), torch.randn(6, requires_grad=True)
    of_parameter, of_input = torch.autograd.grad(model(w), [model.w, w])
    compiled = shardc.compile(model, Mesh(dp=2), {placed: P("dp")}, args=(w,), zero=zero)
    _, gradients = compiled.simulate(w.detach())
    assert list(gradients) == ["w", "input:w"]
    torch.testing.assert_close(gradients["w"], of_parameter)
    torch.testing.assert_close(gradients["input:w"], of_input)
    assert compiled.memory["gradients"] == (2 if zero or placed == "param:w" else 4) * 4 * 4


def test_without_training_there_are_no_gradients() -> None:
    model, x = linear(), torch.randn(2, 4)
    compiled = shardc.compile(model, Mesh(dp=2), {"input": P("dp")}, args=(x,), train=False)
    output, gradients = compiled.simulate(x)
    torch.testing.assert_close(output, model(x))
    assert gradients == {}


def test_a_device_mesh_is_taken_for_what_it_describes() -> None:
    class Described:
        mesh_dim_names = ("dp", "tp")
        shape = (2, 2)
        mesh = torch.arange(4).view(2, 2)

    compiled = shardc.compile(linear(), Described(), {"input": P("dp")}, args=(torch.randn(2, 4),))
    assert compiled.mesh == Mesh(dp=2, tp=2)


@pytest.mark.parametrize("train", [True, False])
def test_a_batch_norm_in_evaluation_compiles_and_equals_eager(train: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 1), torch.nn.BatchNorm2d(8)).eval()
    x = torch.randn(4, 4, 4, 4)
    compiled = shardc.compile(model, Mesh(dp=2), {"input": P("dp")}, args=(x,), train=train)
    torch.testing.assert_close(compiled.simulate(x)[0], model(x))


def test_a_batch_norm_in_bfloat16_compiles_and_runs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    compiled = shardc.compile(model, Mesh(dp=2), {"input": P("dp")}, args=(x,))
    torch.testing.assert_close(compiled.simulate(x)[0], model(x), rtol=2e-2, atol=2e-2)
