"""An op that needs a dim whole lets its axis cut another dim, by all_to_all, where that sends no more than a gather."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from printed import compiled, value
from torch import Tensor

from shardc import Mesh, P

MESH, X = Mesh(dp=4), 64 * 16 * 4
WHOLE_IN: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: x.sort(0).values,
    "argsort": lambda x: x.argsort(0),
    "topk": lambda x: x.topk(40, 0).values,
    "median": lambda x: x.median(0).values,
    "kthvalue": lambda x: x.kthvalue(3, 0).values,
    "cummax": lambda x: x.cummax(0).values,
}


@pytest.mark.parametrize("name", WHOLE_IN)
def test_one_all_to_all_stands_where_a_gather_did(name: str) -> None:
    x = value(64, 16)
    program = compiled(WHOLE_IN[name], MESH, {"x": P("dp"), "output:output": P(...)}, x=x)
    assert [(each.kind, each.wire_bytes) for each in program.collectives] == [("all_to_all", X // 4 * 3 // 4)]
    assert str(program.shardings["output"]) in ("[_, _@dp]", "[_@dp]")
    torch.testing.assert_close(program.simulate(x=x)[0], WHOLE_IN[name](x))


def test_a_gradient_comes_back_by_another() -> None:
    x = value(64, 16).requires_grad_()
    program = compiled(lambda x: x.sort(0).values.square().sum(), MESH, {"x": P("dp")}, True, x=x)
    sent = [(each.phase, each.kind) for each in program.collectives if each.bytes > 4]
    assert sent == [("forward", "all_to_all"), ("backward", "all_to_all")]


@pytest.mark.parametrize("spec, kinds", [(P(), ["all_gather"]), (P("dp"), ["all_to_all", "all_to_all"])], ids=str)
def test_a_result_decides_too(spec: P, kinds: list[str]) -> None:
    annotations = {"x": P("dp"), "output:output": spec}
    program = compiled(lambda x: x.sort(0).values, MESH, annotations, x=value(64, 16))
    assert [each.kind for each in program.collectives] == kinds


@pytest.mark.parametrize(
    "shape, mesh, spec",
    [((64, 6), MESH, P("dp")), ((64,), MESH, P("dp")), ((64, 16), Mesh(dp=2, tp=2), P("dp", "tp"))],
    ids=["does not divide", "no other dim", "cut already"],
)
def test_without_a_free_dim_that_divides_it_is_gathered(shape: tuple[int, ...], mesh: Mesh, spec: P) -> None:
    program = compiled(lambda x: x.sort(0).values, mesh, {"x": spec}, x=value(*shape))
    assert [each.kind for each in program.collectives] == ["all_gather"]


def test_several_axes_move_together() -> None:
    x = value(64, 16, 3)
    program = compiled(lambda x: x.sort(0).values, Mesh(dp=2, tp=2), {"x": P(("dp", "tp"))}, x=x)
    assert {each.kind for each in program.collectives} == {"all_to_all"}


def test_the_reason_names_the_dim_that_is_whole_and_the_annotation() -> None:
    program = compiled(lambda x: x.sort(0).values, MESH, {"x": P("dp")}, x=value(64, 16))
    text = program.explain("all_to_all_dp").text()
    assert "dp cuts dim 0, which sort needs whole" in text and "x: P('dp')" in text


def test_an_axis_moves_that_cuts_a_value_where_it_is_read_alone() -> None:
    """The value itself is not cut by it, since 4 ranks do not divide its 3 rows: only the op before is."""
    x, mask = value(3, 2, 1, 2), value(3, 2, 1, 1) > 0

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, x, -torch.inf).logsumexp(0)

    annotations = {"x": P("y", None, None, "x"), "mask": P(("x", "y"))}
    compiled(masked, Mesh(x=2, y=2), annotations, x=x, mask=mask)


def test_an_axis_moves_that_only_another_operand_brings() -> None:
    """The values are whole: the axis with which the index is cut would cut them, too."""

    def smallest(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        return x.scatter_reduce(0, index, source, "amin")

    index = torch.arange(16).reshape(4, 4) % 4
    compiled(smallest, Mesh(x=4), {"index": P("x")}, x=value(12, 4), index=index, source=value(4, 4))
