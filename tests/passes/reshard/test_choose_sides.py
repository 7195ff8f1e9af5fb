"""Parameters come first in a second propagation only where that may divide a product between data and parameters."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from printed import compiled, parameter, value
from random_model import annotations, meshes, models
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.passes.reshard import choose_sides
from shardc.program.program import Program
from shardc.program.text import program_text


def program_of(model: nn.Module, mesh: Mesh, chosen: dict[str, P], x: Tensor) -> tuple[Any, ...]:
    program = shardc.compile(model, mesh, chosen, args=(x,)).at("insert_reshards")
    return program_text(program), program.sides


@settings(max_examples=8)
@given(st.data())
def test_that_it_is_left_out_changes_no_random_program(data: st.DataObject) -> None:
    model, x = data.draw(models())
    mesh = data.draw(meshes())
    chosen = data.draw(annotations(model, mesh, x))
    found = program_of(model, mesh, chosen, x)
    with patch.object(choose_sides, "_has_shared_factor", lambda rule: True):
        assert program_of(model, mesh, chosen, x) == found


CASES = {
    "experts": (lambda x, w: torch.einsum("etk,ekn->etn", x, w), (4, 8, 4), (4, 4, 6), P(None, "a"), 1),
    "a product": (lambda x, w: x @ w, (8, 4), (4, 6), P("a"), 0),
    "one expert": (lambda x, w: torch.einsum("etk,ekn->etn", x, w), (1, 8, 4), (1, 4, 6), P(None, "a"), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_asked_where_a_product_has_a_dim_of_all_its_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, x, w, spec, count = CASES[name]
    asked: list[str] = []
    before = choose_sides.with_parameters_first

    def noted(program: Program, axis: str) -> Program:
        asked.append(axis)
        return before(program, axis)

    monkeypatch.setattr(choose_sides, "with_parameters_first", noted)
    chosen = {"x": spec, "param:w": P("a") if len(w) == 2 or w[0] > 1 else P(None, "a")}
    compiled(lambda x, w: function(x, w).sum(), Mesh(a=2), chosen, True, x=value(*x), w=parameter(*w))
    assert asked == ["a"] * count
