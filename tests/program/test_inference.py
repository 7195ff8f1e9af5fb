"""Type inference runs one of several equal calls: types and aliasing hold for each of them."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx

from shardc.language.sharding import TensorType
from shardc.program.inference import Layout, result_layouts, result_types
from shardc.program.program import Program

aten = torch.ops.aten
WIDE = torch.empty(4, 6, device="meta")
CALLS = {
    "a view": (aten.view.default, [WIDE], ([2, 12],)),
    "a reshape that is a view": (aten.reshape.default, [WIDE], ([24],)),
    "a reshape that copies": (aten.reshape.default, [WIDE.t()], ([24],)),
    "a view of what lies otherwise": (aten.transpose.int, [WIDE[:, 1:]], (0, 1)),
    "views by another name": (aten._unsafe_view.default, [WIDE], ([24],)),
    "parts of one": (aten.split.Tensor, [WIDE], (2, 1)),
    "an operand twice": (aten.add.Tensor, [WIDE, WIDE], ()),
    "several, one absent": (aten.native_layer_norm.default, [WIDE], ([6], None, None, 1e-5)),
    "something wider": (aten.expand.default, [WIDE[:, :1]], ([4, 6],)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_cached_inference_equals_a_fresh_one(name: str) -> None:
    target, tensors, rest = CALLS[name]
    layouts = [Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]
    expected = described(target(*tensors, *rest), tensors)
    for _ in range(2):
        found = result_layouts(target, (*layouts, *rest), {})
        own = [len(tensors) + i if each.owner is None else each.owner for i, each in enumerate(found)]
        assert [(each.shape, each.stride, each.dtype, at) for each, at in zip(found, own, strict=True)] == expected


def described(made: Any, tensors: list[Tensor]) -> list[Any]:
    results = [made] if isinstance(made, Tensor) else list(made)
    homes = [each.untyped_storage()._cdata for each in (*tensors, *results)]
    return [(each.shape, each.stride(), each.dtype, homes.index(each.untyped_storage()._cdata)) for each in results]


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (1, 2, 1), (4, 5, 6)], ids=str)
def test_the_layout_of_a_new_tensor_is_that_which_torch_gives_it(shape: tuple[int, ...]) -> None:
    assert Layout.new(TensorType(shape, torch.float32)).stride == torch.empty(shape).stride()


def test_calls_with_numbers_of_other_kinds_and_other_defaults_are_not_alike() -> None:
    whole = TensorType((4,), torch.int64)
    found = [result_types(aten.add.Tensor, (whole, number), {}) for number in (1, 1.0, True, 1)]
    assert [each.dtype for each in found] == [torch.int64, torch.float32, torch.int64, torch.int64]
    torch.set_default_dtype(torch.float64)
    try:
        assert result_types(aten.add.Tensor, (whole, 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_like_calls_have_one_rule_and_calls_that_only_look_alike_do_not() -> None:
    size = sympy.Symbol("n", positive=True, integer=True)
    rows = TensorType((4, 6), torch.float32), TensorType((size - size + 4, 6), torch.float32)
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    sums = [graph.call_function(aten.sum.dim_IntList, (of, dims)) for of in (x, y) for dims in ([0], [0], [1])]
    scaled = [graph.call_function(aten.mul.Tensor, (x, by)) for by in (1, 1.0, True, 1)]
    program = Program(graph, (), ())
    for node, type_ in ((x, rows[0]), (y, rows[1])):
        program.set_type(node, type_)
    for node in sums:
        program.set_type(node, TensorType((6,) if node.args[1] == [0] else (4,), torch.float32))
    for node in scaled:
        program.set_type(node, rows[0])
    rules = [program.rule(node) for node in (*sums, *scaled)]
    assert rows[0] == rows[1] and len({id(rule) for rule in rules[:6]}) == 4
    assert rules[0] is rules[1] and rules[0] is not rules[2] and rules[0] is not rules[3]
    assert len({id(rule) for rule in rules[6:]}) == 3 and rules[6] is rules[9]


def test_layouts_of_a_call_that_returns_numbers_too() -> None:
    """As the attention kernel that GPUs have in half precision."""
    rows = Layout.new(TensorType((2, 4, 16, 8), torch.bfloat16))
    found = result_layouts(torch.ops.aten._scaled_dot_product_flash_attention.default, (rows, rows, rows), {})
    assert found[0] is not None and found[0].shape == (2, 4, 16, 8)
    assert found[2:6] == (None,) * 4
