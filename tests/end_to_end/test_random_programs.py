"""After every pass a random model under random annotations computes what it computes on one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_model import RandomModel, Step, check, check_program

from shardc import Mesh, P


@pytest.mark.share
@settings(max_examples=12)  # the conformance suite "programs" draws 500
@given(st.data())
def test_every_pass_keeps_the_values_of_a_random_model(data: st.DataObject) -> None:
    check_program(data)


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
