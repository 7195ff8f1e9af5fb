"""Every rule is true: an op run on pieces and put together gives what it gives on the whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_case import EXAMPLES, Draw, make_case, op_named

from shardc.language.rule import RULES, make_rule
from shardc.program.user_rules import case_of, check, cuttable


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=[f"{name} {text}" for name, text in EXAMPLES])
def test_pieces_of_an_op_make_the_whole(name: str, text: str) -> None:
    for seed in (0, 1):
        check(make_case(name, text, seed))


@settings(max_examples=40)
@given(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4), st.data())
def test_pieces_of_any_view_make_the_whole(src: list[int], data: st.DataObject) -> None:
    dst = []
    while math.prod(dst) < math.prod(src):
        rest = math.prod(src) // math.prod(dst)
        dst.append(data.draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0])))
    check(case_of(torch.ops.aten.view.default, (Draw(0).floats(*src), dst), {}))


def test_no_rule_is_without_an_example() -> None:
    assert set(RULES) == {op_named(name) for name, _ in EXAMPLES}


def test_every_rule_but_these_lets_something_be_cut() -> None:
    """A rule that quietly turned all whole would pass every other test."""
    can_be_cut = {name for name, text in EXAMPLES if cuttable(make_case(name, text, 0).rule)}
    never = {name for name, _ in EXAMPLES} - can_be_cut
    assert never == {
        "arange.default", "arange.start", "arange.start_step", "linspace.default", "eye.default", "eye.m",
        "scalar_tensor.default", "mean.default", "any.default", "all.default", "prod.default", "squeeze.default",
        "median.default", "nanmedian.default",
    }  # fmt: skip


# Ops that torch tags as pointwise.


def tagged_ops() -> list[Any]:
    names = sorted({schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")})
    packets = [getattr(torch.ops.aten, name.removeprefix("aten::"), None) for name in names]
    overloads = [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]
    return [op for op in overloads if torch.Tag.pointwise in op.tags and is_pure(op) and op not in RULES]


def is_pure(op: Any) -> bool:
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return not (is_random or op._schema.is_mutable) and all("Tensor" in str(r.type) for r in op._schema.returns)


def generic_arguments(op: Any, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by the schema alone: tensors that broadcast, and numbers."""
    draw, args = Draw(0), []
    shapes = itertools.chain([(6, 12)], itertools.cycle([(6, 1), (12,)]))
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor" and not argument.kwarg_only:
            args.append((draw.positive(*next(shapes)) * 2).to(dtype))
        elif not argument.kwarg_only and not argument.has_default_value():
            args.append({"number": 2, "int": 2, "float": 0.5, "bool": False, "str": "none"}.get(kind))
    return tuple(args), {}


def test_ops_that_torch_tags_as_pointwise_are() -> None:
    checked = 0
    for op, dtype in itertools.product(tagged_ops(), (torch.float64, torch.int64)):
        args, kwargs = generic_arguments(op, dtype)
        try:
            op(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            continue  # not these arguments, not this dtype, or not on this device
        case = case_of(op, args, kwargs)
        check(case)
        checked += 1
    assert checked > 300


# Wrong rules are caught.


def test_a_softmax_whose_dim_is_free_is_caught() -> None:
    args = (Draw(0).floats(6, 12), 1, False)
    with pytest.raises(AssertionError):
        check(case_of(torch.ops.aten._softmax.default, args, {}, lambda call: make_rule("a b -> a b", call)))


def test_a_bias_added_by_every_shard_is_caught() -> None:
    draw = Draw(0)
    args = (draw.floats(6), draw.floats(12, 6), draw.floats(6, 6))
    with pytest.raises(AssertionError):
        check(case_of(torch.ops.aten.addmm.default, args, {}, lambda call: make_rule("n, m k, k n -> m n", call)))


def test_a_mean_of_means_called_a_sum_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(
            case_of(torch.ops.aten.mean.default, (Draw(0).floats(6, 6),), {}, lambda call: make_rule("a b -> ", call))
        )


def test_a_gelu_called_linear_is_caught() -> None:
    args = (Draw(0).floats(6),)
    with pytest.raises(AssertionError):
        check(case_of(torch.ops.aten.gelu.default, args, {}, lambda call: make_rule("a -> a", call, linear="0")))


def test_a_transpose_named_in_the_wrong_order_is_caught() -> None:
    args = (Draw(0).floats(6, 6),)
    with pytest.raises(AssertionError):
        check(case_of(torch.ops.aten.t.default, args, {}, lambda call: make_rule("a b -> a b", call)))


def test_a_size_that_stays_global_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(case_of(torch.ops.aten.arange.default, (6,), {}, lambda call: make_rule("-> a", call)))
