"""cut_blocks: a plain cut of a fused parameter becomes a cut of each block that ops take."""

from __future__ import annotations

import pytest
from printed import block, compiled, parameter, printed, value
from torch import Tensor

from shardc import Mesh, P, blocks

MESH = Mesh(dp=2, tp=4)
NOTE = "w: w: P(None, 'tp') cuts each block that the model takes apart, [_, (_ 8@tp)], not the whole dim"


def split(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return (q * k + v) @ o


def view(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
    q, k, v = (x @ w).view(8, 3, 4, 2).unbind(1)
    return (q * k + v).reshape(8, 8) @ o


TENSORS = {"x": value(8, 6), "w": parameter(6, 24), "o": parameter(8, 6)}


def test_the_graph_stays_and_the_pin_of_a_fused_weight_cuts_each_block() -> None:
    program = compiled(split, MESH, {"w": P(None, "tp")}, **TENSORS)
    before, after = program.at("keep_dims"), program.at("cut_blocks")
    assert after.level == before.level == "canonical"
    assert (
        printed(before)
        == printed(after)
        == block(
            """
            w: f32[6, 24]
            o: f32[8, 6]
            x: f32[8, 6]
            dot: f32[8, 24] = dot(x, w, "a b, b c -> a c")
            split: (f32[8, 8], f32[8, 8], f32[8, 8]) = split(dot, 8, -1)
            mul: f32[8, 8] = mul(getitem, getitem_1)
            add: f32[8, 8] = add(mul, getitem_2)
            dot_1: f32[8, 6] = dot(add, o, "a b, b c -> a c")
            output: dot_1
            """
        )
    )
    assert [str(pin.sharding) for pin in before.pins] == ["[_, _@tp]"]
    assert [str(pin.sharding) for pin in after.pins] == ["[_, (_ 8@tp)]"]
    assert after.notes == (NOTE,)


@pytest.mark.parametrize("model", [split, view])
def test_every_value_is_cut_as_if_the_user_had_asked_for_blocks(model) -> None:  # type: ignore[no-untyped-def]
    plain = compiled(model, MESH, {"w": P(None, "tp")}, **TENSORS)
    asked = compiled(model, MESH, {"w": P(None, blocks(3, "tp"))}, **TENSORS)
    assert printed(plain.at("propagate")) == printed(asked.at("propagate"))
    assert plain.at("propagate").notes == (NOTE,)
    assert not asked.at("propagate").notes


@pytest.mark.parametrize("annotations", [{"x": P("tp"), "w": P(None, "tp")}, {"o": P("tp")}])
def test_a_cut_that_does_not_come_to_the_split_from_a_plain_pin_stays(annotations: dict[str, P]) -> None:
    program = compiled(split, MESH, annotations, **TENSORS)
    assert program.at("cut_blocks").pins == program.at("keep_dims").pins
    assert not program.at("cut_blocks").notes


def test_blocks_that_the_axis_does_not_divide_stay_plain() -> None:
    tensors = {"x": value(8, 6), "w": parameter(6, 12), "o": parameter(6, 6)}

    def pair(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
        gate, up = (x @ w).chunk(2, -1)
        return (gate * up) @ o

    program = compiled(pair, MESH, {"w": P(None, "tp")}, **tensors)
    assert program.at("cut_blocks").pins == program.at("keep_dims").pins
