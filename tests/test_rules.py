"""Every rule keeps its word: an op run on pieces and put together gives what the op gives on the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_case import EXAMPLES, Case, Draw, case_of, make_case, op_named
from torch import Tensor

from shardc.program import op_rule
from shardc.rule import RULES, Rule, make_rule, pointwise_rule
from shardc.sharding import TensorType
from shardc.spec import Dims

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2}


def cuttable(rule: Rule) -> list[str]:
    held = {*rule.whole, *rule.chunks}
    return [factor for factor, size in rule.sizes.items() if factor not in held and size > 1]


def check_cuts(case: Case, pieces: Mapping[str, int]) -> None:
    """Cut each of these factors in that many pieces, run every piece, put the results together, and compare."""
    sizes = {factor: size // pieces.get(factor, 1) for factor, size in case.rule.sizes.items()}
    changed = local_arguments(case, sizes)
    found = {
        index: case.run(cut_operands(case, pieces, index), changed)
        for index in itertools.product(*map(range, pieces.values()))
    }
    for r, (whole, dims) in enumerate(zip(case.results, case.rule.results, strict=True)):
        if whole is not None and dims is not None:
            parts = {index: results[r] for index, results in found.items()}
            assert {tuple(part.shape) for part in parts.values()} == {local_shape(dims, whole.shape, sizes)}
            if not whole.is_meta:
                assert_same(case, put_together(case.rule, r, parts, list(pieces), dict(sizes)), whole)


def cut_operands(case: Case, pieces: Mapping[str, int], index: Sequence[int]) -> list[Tensor | None]:
    sizes, tensors = dict(case.rule.sizes), list(case.tensors)
    for (factor, count), i in zip(pieces.items(), index, strict=True):
        for t, dims in enumerate(case.rule.operands):
            if case.rule.has(factor, dims):
                tensors[t] = merge(refine(tensors[t], dims, sizes).chunk(count, place(dims, factor))[i], dims)
        sizes[factor] //= count
    return tensors


def put_together(rule: Rule, r: int, parts: dict[Any, Tensor], factors: list[str], sizes: dict[str, int]) -> Tensor:
    """Join the parts of result ``r`` along the last factor, then the one before; ``sizes`` are those of a part."""
    if not factors:
        return parts[()]
    *first, last = factors
    groups: dict[Any, list[Tensor]] = {}
    for index in sorted(parts):
        groups.setdefault(index[:-1], []).append(parts[index])
    joined = {index: join(rule, r, group, last, sizes) for index, group in groups.items()}
    sizes[last] = rule.sizes[last]
    return put_together(rule, r, joined, first, sizes)


def join(rule: Rule, r: int, parts: list[Tensor], factor: str, sizes: Mapping[str, int]) -> Tensor:
    dims = rule.results[r]
    if rule.has(factor, dims):
        return merge(torch.cat([refine(part, dims, sizes) for part in parts], place(dims, factor)), dims)
    if rule.is_partial(factor, r):
        return {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[rule.reduce](torch.stack(parts), 0)
    assert all(torch.equal(part, parts[0]) for part in parts), f"{factor} is no part of result {r}, yet it differs"
    return parts[0]


def refine(tensor: Tensor, dims: Dims, sizes: Mapping[str, int]) -> Tensor:
    """The tensor with one dim a factor; a dim without factors stays."""
    shape = [
        s for factors, size in zip(dims, tensor.shape, strict=True) for s in ([sizes[f] for f in factors] or [size])
    ]
    return tensor.reshape(shape)


def merge(tensor: Tensor, dims: Dims) -> Tensor:
    """The inverse of ``refine``, whatever was cut."""
    sizes = iter(tensor.shape)
    return tensor.reshape([math.prod(next(sizes) for _ in factors or ("one",)) for factors in dims])


def place(dims: Dims, factor: str) -> int:
    return [name for factors in dims for name in factors or ("one",)].index(factor)


def local_shape(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(
        math.prod(sizes[f] for f in factors) if factors else size for factors, size in zip(dims, shape, strict=True)
    )


def local_types(
    types: Sequence[TensorType | None],
    sides: Sequence[Dims | None],
    sizes: Mapping[str, int],
) -> tuple[TensorType | None, ...]:
    return tuple(
        type_ if type_ is None or dims is None else replace(type_, shape=local_shape(dims, type_.shape, sizes))
        for type_, dims in zip(types, sides, strict=True)
    )


def local_arguments(case: Case, sizes: Mapping[str, int]) -> dict[int, Any]:
    entry = op_rule(case.op)
    if entry is None or entry.local is None:
        return {}
    shard = replace(
        case.call,
        operands=local_types(case.call.operands, case.rule.operands, sizes),
        results=local_types(case.call.results, case.rule.results, sizes),
    )
    return entry.local(case.call, shard)


def assert_same(case: Case, found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    if "empty" not in str(case.op):
        scale = max([1.0, *expected.abs().flatten().tolist()]) if is_number(expected) else 1
        torch.testing.assert_close(
            found, expected, rtol=0, atol=TOLERANCE.get(expected.dtype, 0) * scale, equal_nan=True
        )


def is_number(tensor: Tensor | None) -> bool:
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def check_linear(case: Case, group: frozenset[int]) -> None:
    """Split these operands in two terms; the results of both terms add up to the result."""
    draw = Draw(len(group))
    terms = [list(case.tensors), list(case.tensors)]
    for i in group:
        whole = case.tensors[i]
        assert whole is not None
        terms[0][i] = draw.floats(*whole.shape).to(whole)
        terms[1][i] = whole - terms[0][i]
    for one, other, expected in zip(case.run(terms[0]), case.run(terms[1]), case.results, strict=True):
        if expected is not None:
            assert_same(case, one + other, expected)


def check(case: Case) -> None:
    """Every factor in 2 and in 3 pieces, every two factors at once, every linear group."""
    factors = cuttable(case.rule)
    for factor, count in itertools.product(factors, (2, 3)):
        if case.rule.sizes[factor] % count == 0:
            check_cuts(case, {factor: count})
    for one, other in itertools.combinations(factors, 2):
        if case.rule.sizes[one] % 2 == case.rule.sizes[other] % 3 == 0:
            check_cuts(case, {one: 2, other: 3})
    for group in case.rule.linear:
        if all(
            case.tensors[i].is_floating_point() or case.tensors[i].is_complex() for i in group
        ):  # no sum of masks is open
            check_linear(case, group)


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
    explicit = {op for op, entry in RULES.items() if entry.bind is not pointwise_rule}
    assert explicit == {op_named(name) for name, _ in EXAMPLES}


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
    return [op for op in overloads if torch.Tag.pointwise in op.tags and is_pure(op) and has_no_entry(op)]


def has_no_entry(op: Any) -> bool:
    """Whether the table names no rule of the op's own; one that was asked for by its tag has been added."""
    return op not in RULES or RULES[op].bind is pointwise_rule


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
