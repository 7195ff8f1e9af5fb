"""After every pass a random model under random annotations computes what it computes on one device."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_model import annotations, meshes, models

import shardc
from shardc.runtime.simulator import interpret, simulate


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.shape == expected.shape, what
    error = (found - expected).abs().max() / max(1.0, expected.abs().max().item()) if expected.numel() else 0
    assert error <= 1e-10, f"{what} differs by {error:.1e}"


@settings(max_examples=60)
@given(st.data())
def test_every_pass_keeps_the_values_of_a_random_model(data: st.DataObject) -> None:
    check_program(data)


def check_program(data: st.DataObject) -> None:
    """Draw a model, a mesh and annotations, and compare with one device after every pass."""
    model, x = data.draw(models())
    mesh = data.draw(meshes())
    chosen = data.draw(annotations(model, mesh, x))
    loss = model(x)
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    compiled = shardc.compile(model, mesh, chosen, args=(x,))
    for name, program in compiled.stages.items():
        runtime = simulate if program.level == "localized" else interpret
        output, gradients = compiled.run(runtime, program, (x,), {})
        assert_close(output, loss.detach(), f"the loss after {name}")
        for (parameter, _), gradient in zip(model.named_parameters(), expected, strict=True):
            if gradient is not None:
                found = gradients[parameter]
                assert found is not None
                assert_close(found, gradient, f"the gradient of {parameter} after {name}")
