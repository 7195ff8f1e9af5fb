"""The language of rules: dims split into factors and joined again agree with reshaping the real tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardc.language.cut import dims_sharding, extends, factor_cuts, join_dim, split_dim
from shardc.language.mesh import Axes, AxisPart, Mesh
from shardc.language.partition import P
from shardc.language.rule import OpCall, Rule, make_rule, pointwise_rule, replicated_rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, num_shards
from shardc.ops.view import view_spec

SIZES = st.sampled_from((1, 2, 3, 4, 6, 8, 12))
F32 = torch.float32


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=3))
    return Mesh(**dict(zip("abc", sizes, strict=False)))


@st.composite
def parts(draw: st.DrawFn, mesh: Mesh) -> list[AxisPart]:
    """All axes of a mesh in some order, each whole or as two parts."""
    found: list[AxisPart] = []
    for name in draw(st.permutations(mesh.axis_names)):
        axis = mesh.axis(name)
        halves = [axis.major(2), axis.minor(2)] if axis.size == 4 and draw(st.booleans()) else [axis]
        found += draw(st.permutations(halves))
    return found


def draw_cut(draw: st.DrawFn, size: int, free: list[AxisPart]) -> DimSharding:
    """An even cut of one dim; the parts that it takes go from ``free``."""
    blocks = draw(st.sampled_from([count for count in (1, 1, 2, 3) if size % count == 0]))
    axes = take_parts(draw, size // blocks, free)
    minor = ((size // blocks, axes),) if axes else ()
    return join_dim([(size, DimSharding((), minor))])


def take_parts(draw: st.DrawFn, size: int, free: list[AxisPart]) -> Axes:
    taken: list[AxisPart] = []
    while free and size % (num_shards(tuple(taken)) * free[0].size) == 0 and draw(st.booleans()):
        taken.append(free.pop(0))
    return tuple(taken)


@st.composite
def cut_factors(draw: st.DrawFn) -> tuple[Mesh, list[tuple[int, DimSharding]]]:
    """Factors of one dim, each with its cut."""
    mesh = draw(meshes())
    free = draw(parts(mesh))
    sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
    return mesh, [(size, draw_cut(draw, size, free)) for size in sizes]


def elements(mesh: Mesh, position: int, cut: DimSharding, size: int) -> list[int]:
    """The elements of a dim that stand at a position of the mesh, in order: the meaning of a cut, written plainly."""
    index = torch.arange(size).reshape([sub for sub, _ in cut.subdims(size)])
    for dim, (_, axes) in enumerate(cut.subdims(size)):
        index = index.chunk(num_shards(axes), dim)[mesh.index(position, axes)]
    return index.flatten().tolist()


def elements_of_factors(mesh: Mesh, position: int, factors: Sequence[tuple[int, DimSharding]]) -> list[int]:
    """The same for a dim seen as several, each cut by itself."""
    index = torch.arange(math.prod(size for size, _ in factors)).reshape([size for size, _ in factors])
    for dim, (size, cut) in enumerate(factors):
        index = index.index_select(dim, torch.tensor(elements(mesh, position, cut, size)))
    return index.flatten().tolist()


# Splitting and joining.


@given(cut_factors())
def test_a_joined_dim_is_cut_as_its_factors_are(drawn: tuple[Mesh, list[tuple[int, DimSharding]]]) -> None:
    mesh, factors = drawn
    size, joined = math.prod(size for size, _ in factors), join_dim(factors)
    for position in range(mesh.size):
        assert elements(mesh, position, joined, size) == elements_of_factors(mesh, position, factors)


@given(cut_factors())
def test_splitting_a_joined_dim_gives_the_factors_cuts_back(drawn: tuple[Mesh, list[tuple[int, DimSharding]]]) -> None:
    mesh, factors = drawn
    sizes = [size for size, _ in factors]
    joined = join_dim(factors)
    found = split_dim(joined, math.prod(sizes), sizes)
    assert join_dim(list(zip(sizes, found, strict=True))) == joined
    if 1 not in mesh.shape:  # an axis of one rank may fall to either of two neighbours
        assert found == tuple(cut for _, cut in factors)


def test_an_axis_of_one_rank_is_found_where_it_was() -> None:
    """With as many samples as ranks too, where no element is left for it to cut."""
    mesh = Mesh(dp=4, tp=1)
    dp, tp = mesh.axis("dp"), mesh.axis("tp")
    for cuts in ((DimSharding((dp, tp)), WHOLE), (DimSharding((dp,)), DimSharding((tp,)))):
        assert split_dim(join_dim(list(zip((4, 8), cuts, strict=True))), 32, (4, 8)) == cuts
    blocks = DimSharding((), ((16, (tp,)),))  # as of a fused q, k, v
    assert split_dim(blocks, 48, (3, 4, 4)) == (WHOLE, DimSharding((tp,)), WHOLE)


@given(cut_factors(), st.lists(SIZES, min_size=1, max_size=3))
def test_splitting_over_any_factors_never_invents_a_cut(
    drawn: tuple[Mesh, list[tuple[int, DimSharding]]], sizes: list[int]
) -> None:
    mesh, factors = drawn
    size, dim = math.prod(size for size, _ in factors), join_dim(factors)
    assume(size % math.prod(sizes) == 0)
    sizes = [*sizes, size // math.prod(sizes)]
    rejoined = join_dim(list(zip(sizes, split_dim(dim, size, sizes), strict=True)))
    for position in range(mesh.size):
        assert set(elements(mesh, position, dim, size)) <= set(elements(mesh, position, rejoined, size))


@given(cut_factors())
def test_a_split_of_one_factor_changes_nothing(drawn: tuple[Mesh, list[tuple[int, DimSharding]]]) -> None:
    _, factors = drawn
    size, dim = math.prod(size for size, _ in factors), join_dim(factors)
    assert split_dim(dim, size, [size]) == (dim,)


def test_an_axis_that_cuts_across_two_factors_falls_in_parts() -> None:
    tp = Mesh(tp=4).axis("tp")
    assert split_dim(DimSharding((tp,)), 8, (2, 4)) == (
        DimSharding((AxisPart("tp", 1, 2),)),
        DimSharding((AxisPart("tp", 2, 2),)),
    )


def test_an_axis_that_does_not_line_up_is_left_out() -> None:
    mesh = Mesh(dp=2, tp=3)
    assert split_dim(DimSharding((mesh.axis("tp"),)), 6, (2, 3)) == (WHOLE, WHOLE)
    assert split_dim(DimSharding((mesh.axis("dp"), mesh.axis("tp"))), 12, (4, 3)) == (
        DimSharding((mesh.axis("dp"),)),
        WHOLE,
    )


def test_a_cut_minor_factor_is_a_cut_in_blocks() -> None:
    mesh = Mesh(tp=2)
    assert (
        join_dim([(3, WHOLE), (64, DimSharding((mesh.axis("tp"),)))])
        == P.parse("blocks(3,tp)").sharding(mesh, (192,), "w").dims[0]
    )


def test_a_cut_extends_its_own_beginning_alone() -> None:
    mesh = Mesh(dp=2, tp=2)
    dp, tp = mesh.axis("dp"), mesh.axis("tp")
    in_blocks = DimSharding((), ((4, (tp,)),))
    assert extends(DimSharding((dp, tp)), DimSharding((dp,))) and extends(in_blocks, WHOLE)
    assert not extends(DimSharding((dp, tp)), DimSharding((tp,))) and not extends(in_blocks, DimSharding((tp,)))


# Tensors.


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Mesh, list[list[tuple[int, DimSharding]]]]:
    """For each dim its factors, each with its cut."""
    mesh = draw(meshes())
    free = draw(parts(mesh))
    dims = draw(st.lists(st.lists(SIZES, max_size=2), min_size=1, max_size=3))
    return mesh, [[(size, draw_cut(draw, size, free)) for size in sizes] for sizes in dims]


@given(cut_tensors())
def test_a_tensors_cuts_are_its_factors_cuts_and_back(drawn: tuple[Mesh, list[list[tuple[int, DimSharding]]]]) -> None:
    mesh, tensor = drawn
    dims = tuple(tuple(f"{i}.{j}" for j in range(len(factors))) for i, factors in enumerate(tensor))
    sizes = {f"{i}.{j}": size for i, factors in enumerate(tensor) for j, (size, _) in enumerate(factors)}
    cuts = {f"{i}.{j}": cut for i, factors in enumerate(tensor) for j, (_, cut) in enumerate(factors) if cut != WHOLE}
    shape = tuple(math.prod(size for size, _ in factors) for factors in tensor)
    sharding = Sharding(mesh, dims_sharding(dims, cuts, sizes))
    assert sharding.is_even(shape)
    found = factor_cuts(dims, sharding.dims, shape, sizes)
    assert dims_sharding(dims, found, sizes) == sharding.dims
    if 1 not in mesh.shape:
        assert found == cuts


# Specs.


def call_of(operands: Sequence[tuple[int, ...] | None], results: Sequence[tuple[int, ...] | None]) -> OpCall:
    types = [tuple(None if shape is None else TensorType(shape, F32) for shape in side) for side in (operands, results)]
    return OpCall(types[0], {}, types[0], types[1])


def test_an_einsum_names_the_dims() -> None:
    rule = make_rule("b k, k n -> b n", call_of([(8, 4), (4, 6)], [(8, 6)]), linear="0 1")
    assert rule.operands == ((("b",), ("k",)), (("k",), ("n",)))
    assert rule.results == ((("b",), ("n",)),)
    assert rule.sizes == {"b": 8, "k": 4, "n": 6}
    assert rule.linear == (frozenset({0}), frozenset({1}))
    assert rule.is_reduced("k") and rule.is_partial("k", 0) and not rule.is_partial("b", 0)


def test_a_dim_of_several_factors_takes_the_open_size_from_its_own() -> None:
    rule = make_rule("(blk d) -> d, d, d", call_of([(24,)], [(8,), (8,), (8,)]), whole="blk")
    assert rule.operands == ((("blk", "d"),),) and rule.sizes == {"d": 8, "blk": 3}


def test_one_is_a_dim_that_is_never_cut() -> None:
    rule = make_rule("b 1 -> b 1", call_of([(8, 5)], [(8, 5)]))
    assert rule.operands == ((("b",), ()),) and rule.factors == ("b",)


def test_leading_dims_line_up_on_the_right() -> None:
    rule = make_rule("v d, ... -> ... d", call_of([(9, 4), (2, 3)], [(2, 3, 4)]))
    assert rule.operands[1] == rule.results[0][:2]  # type: ignore[index]


def test_a_broadcast_dim_has_no_part_in_the_factor() -> None:
    rule = make_rule("m n, m k, k n -> m n", call_of([(1, 6), (8, 4), (4, 6)], [(8, 6)]))
    assert rule.operands[0] == ((), ("n",))


def test_a_tensor_that_is_not_looked_at_is_never_partial() -> None:
    rule = make_rule("b -> b, _", call_of([(8,)], [(8,), (2,)]))
    assert rule.results[1] is None and not rule.is_partial("b", 1)


def test_results_of_one_op_may_be_partial_or_not() -> None:
    rule = make_rule("b d, b d -> b d, d", call_of([(8, 4), (8, 4)], [(8, 4), (4,)]))
    assert not rule.is_reduced("b") and rule.is_partial("b", 1) and not rule.is_partial("b", 0)


def test_an_absent_operand_takes_its_linear_groups_with_it() -> None:
    assert make_rule("a, a -> a", call_of([(8,), None], [(8,)]), linear="0 01").linear == (frozenset({0}),)


def test_a_sum_that_broadcasting_would_enlarge_is_not_let_through() -> None:
    assert pointwise_rule(call_of([(8, 1), (4,)], [(8, 4)]), linear="01").linear == ()
    assert pointwise_rule(call_of([(8, 4), (4,)], [(8, 4)]), linear="0 1").linear == (frozenset({0}),)


def test_a_spec_that_does_not_fit_the_shapes_is_refused() -> None:
    with pytest.raises(AssertionError):
        make_rule("a a -> a", call_of([(8, 4)], [(8,)]))


def test_the_fallback_cuts_nothing() -> None:
    rule = replicated_rule(call_of([(8, 4), None, (4,)], [(8,)]))
    assert rule.is_fallback and rule.whole == set(rule.factors) and len(rule.factors) == 4


# Views.


@given(st.lists(SIZES, min_size=1, max_size=3), st.permutations(range(3)))
def test_a_view_has_the_factors_of_both_shapes(src: list[int], order: list[int]) -> None:
    dst = [src[i] for i in order if i < len(src)]
    for left, right in ((src, dst), (src, [math.prod(src)]), ([math.prod(dst)], dst)):
        spec, sizes, whole = view_spec(left, right)
        rule = make_rule(spec, call_of([tuple(left)], [tuple(right)]), sizes=sizes, whole=whole)
        operand, result = rule.operands[0], rule.results[0]
        assert [shape_of(rule, operand), shape_of(rule, result)] == [left, right]
        assert rule.whole == {name for name in rule.factors if not (rule.has(name, operand) and rule.has(name, result))}


def shape_of(rule: Rule, dims: Sequence[tuple[str, ...]] | None) -> list[int]:
    return [math.prod(rule.sizes[factor] for factor in factors) for factors in dims or ()]


@pytest.mark.parametrize(
    ("small", "large"),
    [((48, 64), (8, 6, 64)), ((8, 384), (8, 6, 64)), ((8, 6, 64), (8, 6, 4, 16)), ((8, 6, 64), (2, 4, 1, 6, 64))],
)
def test_views_that_only_split_or_merge_leave_nothing_whole(small: tuple[int, ...], large: tuple[int, ...]) -> None:
    assert view_spec(small, large)[2] == view_spec(large, small)[2] == ""
