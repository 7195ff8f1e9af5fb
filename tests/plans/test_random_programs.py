"""After every pass a random model under random annotations computes what it computes on one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_model import RandomModel, Step, annotations, meshes, models, options

import shardc
from shardc import Mesh, P
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
    """Draw a model, a mesh, annotations and options, and compare with one device after every pass."""
    model, x = data.draw(models())
    mesh = data.draw(meshes())
    check(model, x, mesh, data.draw(annotations(model, mesh, x)), **data.draw(options(mesh)))


def check(
    model: RandomModel, x: torch.Tensor, mesh: shardc.Mesh, chosen: dict[str, shardc.P], **options: object
) -> None:
    """The loss and every gradient, after every pass."""
    loss = model(x)
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    compiled = shardc.compile(model, mesh, chosen, args=(x,), **options)
    for name, program in compiled.stages.items():
        runtime = simulate if program.level == "localized" else interpret
        output, gradients = compiled.run(runtime, program, (x,), {})
        assert_close(output, loss.detach(), f"the loss after {name}")
        for (parameter, _), gradient in zip(model.named_parameters(), expected, strict=True):
            if gradient is not None:
                found = gradients[parameter]
                assert found is not None
                assert_close(found, gradient, f"the gradient of {parameter} after {name}")


FOUND = {  # programs that were wrong or refused once: steps, shape, mesh, annotations
    "a view after attention": ("attention 0", (4, 4, 4), Mesh(a=1), {"x": P("a", None, None)}),
    "blocks of one of two sizes of a window's dim": (
        "batch_norm 11, halves 8, gelu 7, pipeline 10, repeat 1, mask 3, logsumexp 3", (4, 3, 8), Mesh(a=2, b=3),
        {"x": P("a", P.OPEN, "b"), "param:scale": P("b")},
    ),
    "one element cut, in a plan with a view": (
        "pipeline 8, max 7, heads 0, residual 3, pipeline 8", (10, 10, 4), Mesh(a=1, b=2), {"x": P("b", "a", None)},
    ),
    "attention of what a pool has transposed": (
        "pool 2, attention 4", (3, 5, 12), Mesh(a=2, b=3), {"x": P("b", "a", P.OPEN)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_wrong_once_are_right(name: str) -> None:
    text, shape, mesh, chosen = FOUND[name]
    steps = [step.split() for step in text.split(", ")]
    torch.manual_seed(0)
    model = RandomModel(shape[-1], tuple(Step(op, int(number)) for op, number in steps))
    check(model, torch.randn(shape, dtype=torch.float64), mesh, chosen)
