"""store: between uses a parameter is cut over one axis more than it is computed on."""

from __future__ import annotations

import pytest
from printed import Function, block, parameter, printed, value

import shardc
from shardc import Mesh, P, Zero
from shardc.passes.reshard.store import store

TENSORS = {"x": value(8, 6), "w": parameter(6, 16)}
STORED = block(
    """
    w: f32[6@dp, 16]
    x: f32[8@dp, 6]
    tangent(output): f32[]
    reshard_2: f32[6, 16] = reshard(w)
    dot: f32[8@dp, 16] = dot(x, reshard_2, "a b, b c -> a c")
    sum_1: f32[]{sum dp} = sum(dot)
    reshard: f32[] = reshard(sum_1)
    expand_1: f32[8@dp, 16] = expand(tangent(output), [8, 16])
    dot_1: f32[6, 16]{sum dp} = dot(x, expand_1, "a b, a c -> b c")
    reshard_1: f32[6@dp, 16] = reshard(dot_1)
    output: reshard
    gradient w: reshard_1
    """
)


def stored(zero: Zero | None) -> shardc.Compiled:
    model = Function(lambda x, w: (x @ w).sum(), TENSORS)
    return shardc.compile(model, Mesh(dp=2), {"x": P("dp")}, kwargs={"x": TENSORS["x"]}, zero=zero)


@pytest.mark.parametrize(("stage", "kept"), [(2, "computed w: reshard_2\n"), (3, "")])
def test_a_parameter_is_gathered_for_use_and_its_gradient_arrives_cut(stage: int, kept: str) -> None:
    """Stage 2 keeps the gathered copy, which is then a result of the program."""
    assert printed(stored(Zero(stage=stage)).at("store")) == STORED + kept


def test_without_zero_the_program_stays() -> None:
    program = stored(None)
    before = program.at("insert_reshards")
    assert store(before) is before
