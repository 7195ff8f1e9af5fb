"""The plan of a reshard leaves the target, on every rank and step by step, at the least cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count, permutations
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reshard_case import Case, all_shardings, cases, integers, lay_out, read_back, take, uneven_cases

from shardc.language.cut import has_same_shards, join_dim
from shardc.language.errors import ShardingError
from shardc.language.machine import CollectiveKind
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType, num_shards
from shardc.passes.reshard.plan_reshard import common_subdims, plan_reshard, reshard_plan
from shardc.program.collective import Collective, Step, group_size, steps_sharding
from shardc.runtime.comm.simulated import SimulatedComm

F32 = torch.float32
Sub = tuple[tuple[int, str], ...]  # parts of a dim, each of a size and cut by axes of one letter


# The plan is right.


@settings(max_examples=300)
@given(cases())
def test_every_pair_of_shardings_lowers_to_the_target_with_equal_values(case: Case) -> None:
    check_values(case)


@settings(max_examples=300)
@given(uneven_cases())
def test_sizes_that_do_not_divide_lower_to_the_target_with_equal_values(case: Case) -> None:
    check_values(case)


@pytest.mark.parametrize("mesh", [Mesh(a=2, b=2), Mesh(a=3, b=2)], ids=str)
def test_all_pairs_on_uneven_dims_lower_to_the_target_with_equal_values(mesh: Mesh) -> None:
    for case in all_pairs(mesh, 2, (5, 7)):
        check_values(case)


@pytest.mark.parametrize("mesh", [Mesh(a=2, b=2), Mesh(a=1, b=2)], ids=str)
def test_all_pairs_on_two_dims_and_two_axes_lower_to_the_target_with_equal_values(mesh: Mesh) -> None:
    pairs = list(all_pairs(mesh, 2, (4, 8)))
    assert len(pairs) == 223
    for case in pairs:
        check_values(case)
        check_local_sizes(case)


@settings(max_examples=300)
@given(cases(smallest=2))
def test_a_value_on_the_way_is_never_larger_than_at_both_ends(case: Case) -> None:
    if is_seen_alike(case):
        check_local_sizes(case)


@pytest.mark.parametrize(
    ("mesh", "shape", "src", "dst"),
    [
        (Mesh(a=3, b=2, c=2), (6, 6), "a+b,c", "b,a+c"),
        (Mesh(a=4, b=3, c=2), (12, 12), "a,b+c", "b+c,a"),
        (Mesh(a=2, b=4, c=1), (2, 4), "c+b:(1)2,b:(2)2+a", "a,c+b"),
    ],
)
def test_a_plan_is_found_where_few_sequences_fit_in_memory(
    mesh: Mesh, shape: tuple[int, ...], src: str, dst: str
) -> None:
    case = Case(shape, *(P.parse(spec).sharding(mesh, shape, "test") for spec in (src, dst)))
    check_values(case)
    check_local_sizes(case)


@settings(max_examples=300)
@given(cases(smallest=2))
def test_a_plan_sends_no_more_than_to_gather_everything_and_slice(case: Case) -> None:
    assert bytes_sent(case) <= bytes_to_gather_all(case)


@settings(max_examples=200)
@given(cases())
def test_each_step_says_the_sharding_that_its_collective_leaves(case: Case) -> None:
    before = case.src
    for step in plan_reshard(case.src, case.dst, case.type)[:-1]:
        if step.kind != "view":
            assert has_same_shards(step.sharding, steps_sharding(before, step.kind, step.args), step.shape)
        before = step.sharding


def check_values(case: Case) -> None:
    whole, comm = integers(case.shape), SimulatedComm(case.src.mesh)
    held, steps = lay_out(whole, case.src), plan_reshard(case.src, case.dst, case.type)
    for step in steps:
        held = take(step, held, comm)
        assert {tuple(piece.shape) for piece in held} == {step.sharding.local_shape(step.shape)}, step
        assert torch.equal(read_back(held, step.sharding, comm, step.shape).reshape(case.shape), whole), step
    assert not steps or steps[-1].sharding == case.dst
    assert torch.equal(read_back(held, case.dst, comm, case.shape), whole)


def check_local_sizes(case: Case) -> None:
    bound = max(math.prod(sharding.local_shape(case.shape)) for sharding in (case.src, case.dst))
    for step in plan_reshard(case.src, case.dst, case.type):
        assert math.prod(step.sharding.local_shape(step.shape)) <= bound, (case, step)


def is_seen_alike(case: Case) -> bool:
    """Whether both cuts of each dim are plain cuts of the same sub-dims; otherwise the dim is gathered on the way."""
    return all(common_subdims(*cuts) for cuts in zip(case.src.dims, case.dst.dims, case.shape, strict=True))


def all_pairs(mesh: Mesh, ndim: int, shape: tuple[int, ...]) -> Iterator[Case]:
    every = all_shardings(mesh, ndim)
    return (Case(shape, a, b) for a in every for b in every if set(b.partial) <= set(a.partial))


def bytes_sent(case: Case) -> int:
    plan = reshard_plan(case.src.mesh, case.shape, torch.float64, case.src, case.dst)
    return sum(each.wire_bytes for each in plan)


def bytes_to_gather_all(case: Case) -> int:
    """An all_reduce of what is open no more, then an all_gather of every dim; slices are free."""
    local = math.prod(case.src.local_shape(case.shape)) * 8
    ways = num_shards(case.src.partial_axes) // num_shards(case.dst.partial_axes)
    return 2 * (local * (ways - 1) // ways) + math.prod(case.shape) * 8 - local


# The plan is the cheapest.


@pytest.mark.parametrize(
    ("mesh", "ndim", "shape", "every"),
    [(Mesh(a=2, b=2), 2, (16, 16), 1), (Mesh(a=3, b=3), 2, (81, 81), 1), (Mesh(a=2, b=2, c=2), 2, (64, 64), 47)],
    ids=str,
)  # fmt: skip
def test_no_sequence_of_collectives_is_cheaper(mesh: Mesh, ndim: int, shape: tuple[int, ...], every: int) -> None:
    shardings = all_shardings(mesh, ndim)
    for case in list(all_pairs(mesh, ndim, shape))[::every]:
        found, least = cost_of(case, plan_reshard(case.src, case.dst, case.type)), least_cost(case, shardings)
        assert found <= least if case.src.partial else found == pytest.approx(least), case


def cost_of(case: Case, steps: tuple[Step, ...]) -> float:
    total, before = 0.0, case.src
    for step in steps:
        total += step_cost(case, before, step.sharding, step.kind, step.args)  # type: ignore[arg-type]
        before = step.sharding
    return total


def step_cost(case: Case, src: Sharding, dst: Sharding, kind: CollectiveKind, args: tuple[object, ...]) -> float:
    """Elements sent, and a 64th of the larger end's local value for each collective."""
    if kind == "shard_slice":
        return 0
    payload = max(local_size(case, src), local_size(case, dst))
    latency = max(local_size(case, case.src), local_size(case, case.dst)) / 64
    if kind == "collective_permute":
        return payload + latency
    ways = group_size(src.mesh, kind, args)
    return payload * (ways - 1) / ways * (2 if kind == "all_reduce" else 1) + latency


def local_size(case: Case, sharding: Sharding) -> int:
    return math.prod(sharding.local_shape(case.shape))


def least_cost(case: Case, shardings: list[Sharding]) -> float:
    """Dijkstra over all shardings, with any number of permutes; axes of neither end share no reduction."""
    bound = max(local_size(case, case.src), local_size(case, case.dst))
    ticket = count()
    heap, done = [(0.0, 0, case.src)], set()
    while heap:
        cost, _, at = heapq.heappop(heap)
        if at == case.dst:
            return cost
        if at in done:
            continue
        done.add(at)
        for kind, args in every_collective(case, at):
            after = steps_sharding(at, kind, args)
            after = Sharding(after.mesh, after.dims, tuple(sorted(after.partial)))
            if local_size(case, after) <= bound and after.is_even(case.shape):
                heapq.heappush(heap, (cost + step_cost(case, at, after, kind, args), next(ticket) + 1, after))
        for after in shardings:
            if after.partial == at.partial and pieces(after) == pieces(at):
                more = step_cost(case, at, after, "collective_permute", ())
                heapq.heappush(heap, (cost + more, next(ticket) + 1, after))
    raise AssertionError(case)


def pieces(sharding: Sharding) -> list[int]:
    return [num_shards(dim.axes) for dim in sharding.dims]


def every_collective(case: Case, at: Sharding) -> Iterator[tuple[CollectiveKind, tuple[object, ...]]]:
    mesh, dims = at.mesh, range(len(at.dims))
    unused = {mesh.axis(name) for name in mesh.axis_names} - set(case.src.cut_axes)
    sliced = set(case.dst.cut_axes) if case.src.partial else set(case.dst.cut_axes) | unused
    for axis in sliced - set(at.cut_axes) - set(at.partial_axes):
        yield from (("shard_slice", ((mesh.print_part(axis),), dim)) for dim in dims)
    for dim in dims:
        axes = tuple(map(mesh.print_part, at.dims[dim].axes))
        for i in range(len(axes)):
            yield "all_gather", (axes[i:], dim)
            yield from (("all_to_all", (axes[i:], dim, other)) for other in dims if other != dim)
    open_axes = [mesh.print_part(part) for part in at.partial_axes if part not in case.dst.partial_axes]
    for size in range(1, len(open_axes) + 1):
        for axes in permutations(open_axes, size):
            yield "all_reduce", (axes, "sum")
            yield from (("reduce_scatter", (axes, "sum", dim)) for dim in dims)


DP4_TP8 = Mesh(dp=4, tp=8)
EXAMPLES = [
    ("dp,-,-", "tp", "dp,-,-", "all_reduce tp"),
    ("dp,-,-", "tp", "dp,tp,-", "reduce_scatter tp 1"),
    ("dp,tp,-", "", "dp,-,-", "all_gather tp 1"),
    ("dp,-,tp", "", "dp,tp,-", "all_to_all tp 2 1"),
    ("-,-", "", "dp,tp", "shard_slice dp 0, shard_slice tp 1"),
    ("-,-", "", "dp+tp,-", "shard_slice dp+tp 0"),
    ("dp+tp,-", "", "-,-", "all_gather dp+tp 0"),
    ("-,-", "dp tp", "-,-", "all_reduce dp+tp"),
    ("-,-", "dp tp", "tp+dp,-", "reduce_scatter tp+dp 0"),
    ("-,-", "dp tp", "dp,-", "reduce_scatter dp 0, all_reduce tp"),
    ("-,tp", "dp", "dp,tp", "reduce_scatter dp 0"),
    ("dp+tp,-", "", "tp+dp,-", "collective_permute dp+tp tp+dp"),
    ("tp:(1)2,-", "", "tp:(2)2,-", "collective_permute tp:(1)2 tp:(2)2"),
    ("tp,-", "", "tp:(1)2,tp:(2)4", "all_to_all tp:(2)4 0 1"),
    ("-,blocks(2,tp)", "", "dp,blocks(2,tp)", "shard_slice dp 0"),
    ("blocks(3,tp),-", "", "-,-", "view 3 32 64, all_gather tp 1, view 96 64"),
    ("blocks(3,tp),-", "", "tp,-", "view 3 32 64, all_gather tp 1, view 96 64, shard_slice tp 0"),
]


@pytest.mark.parametrize(("src", "partial", "dst", "expected"), EXAMPLES)
def test_plans_of_everyday_reshards(src: str, partial: str, dst: str, expected: str) -> None:
    shape = (96, 64, 8)[: dst.count(",") + 1]
    one, two = (P.parse(spec).sharding(DP4_TP8, shape, "test") for spec in (src, dst))
    one = Sharding(DP4_TP8, one.dims, tuple((DP4_TP8.axis(name), "sum") for name in partial.split()))
    assert ", ".join(map(text, plan_reshard(one, two, TensorType(shape, F32)))) == expected


@pytest.mark.parametrize(
    ("src", "dst", "expected", "sent"),
    [
        ("a,-", "c,a", "shard_slice b 1, shard_slice c 0, collective_permute a+c+b c+b+a, all_gather b 0", 3072),
        ("a,-", "-,a", "all_to_all a 0 1", 8192),  # to join the pieces would cost as much as is saved
    ],
)
def test_an_axis_of_neither_end_shares_what_is_moved_twice(src: str, dst: str, expected: str, sent: int) -> None:
    mesh, shape = Mesh(a=3, b=3, c=4), (192, 48)
    ends = [P.parse(spec).sharding(mesh, shape, "test") for spec in (src, dst)]
    assert ", ".join(map(text, plan_reshard(*ends, TensorType(shape, F32)))) == expected
    assert sum(each.wire_bytes for each in reshard_plan(mesh, shape, F32, *ends)) == sent
    check_values(Case(shape, ends[0], ends[1]))


@pytest.mark.parametrize(
    ("mesh", "shape", "src", "dst", "kinds", "sent"),
    [
        (Mesh(a=4), (24,), ((24, "a"),), ((6, "a"), (4, "")), ["rechunk"], 6),
        (Mesh(a=4), (24,), ((6, "a"), (4, "")), ((24, "a"),), ["rechunk"], 6),
        (Mesh(a=2), (70,), ((7, "a"), (10, "")), ((14, "a"), (5, "")), ["rechunk"], 5),
        (Mesh(a=3, b=2), (40,), ((10, "a"), (4, "")), ((8, "a"), (5, "")), ["rechunk"], 2),
        (Mesh(a=2, b=2), (60,), ((15, "ab"), (4, "")), ((60, "ab"),), ["rechunk"], 3),
    ],
)
def test_chunks_of_one_axis_in_a_row_change_their_size_with_neighbours(
    mesh: Mesh, shape: tuple[int, ...], src: Sub, dst: Sub, kinds: list[str], sent: int
) -> None:
    ends = [Sharding(mesh, (join_dim([(n, DimSharding(tuple(map(mesh.axis, axes)))) for n, axes in sub]),))
            for sub in (src, dst)]  # fmt: skip
    case = Case(shape, ends[0], ends[1])
    check_values(case)
    check_local_sizes(case)
    assert [step.kind for step in plan_reshard(*ends, case.type)] == kinds
    assert bytes_sent(case) == 8 * sent


def test_uneven_pieces_are_counted_with_their_padding() -> None:
    (gather,) = reshard_plan(Mesh(a=4), (5,), F32, P("a"), P())
    assert (gather.local_shape_in, gather.local_shape_out, gather.bytes, gather.wire_bytes) == ((2,), (5,), 32, 24)


REFERENCES = [line.split(" | ") for line in Path(__file__).with_name("reshard_references.txt").read_text().splitlines()]


def test_no_reshard_sends_more_than_the_reference_partitioner() -> None:
    for name, sent, reference, plan in compare_with_references():
        print(f"{name:62} {sent:6} {reference:6}  {plan}")
        assert sent <= reference, (name, plan)


def compare_with_references() -> Iterator[tuple[str, int, int, str]]:
    for name, axes, sizes, src, dst, reference in [line for line in REFERENCES if not line[0].startswith("#")]:
        mesh = Mesh(**{axis: int(size) for axis, size in (each.split("=") for each in axes.split(","))})
        plan = reshard_plan(mesh, tuple(map(int, sizes.split(","))), F32, P.parse(src), P.parse(dst))
        kinds = ", ".join(f"{each.kind} {'+'.join(each.axes)} {each.wire_bytes}" for each in plan)
        yield name, sum(each.wire_bytes for each in plan), int(reference), kinds


@settings(max_examples=150)
@given(st.data())
def test_a_plan_on_axes_of_one_rank_is_the_plan_on_axes_of_two(data: st.DataObject) -> None:
    two = Mesh(a=2, b=2, c=2)
    src, dst = (data.draw(st.sampled_from(all_shardings(two, 2))) for _ in range(2))
    assume(len({*src.used_parts, *dst.cut_axes}) == 3)  # an axis of one rank that neither end uses shares nothing
    dst = Sharding(two, dst.dims, tuple(part for part in src.partial if part[0] not in dst.cut_axes))
    found = [
        plan_reshard(on_mesh(src, mesh), on_mesh(dst, mesh), TensorType((8, 8), F32))
        for mesh in (two, Mesh(a=1, b=1, c=1))
    ]
    assert list(map(text, found[0])) == list(map(text, found[1]))


@pytest.mark.parametrize(("src", "partial", "dst"), [row[:3] for row in EXAMPLES if ":" not in row[0] + row[2]])
def test_everyday_plans_are_the_same_on_2_and_on_2048_ranks(src: str, partial: str, dst: str) -> None:
    texts = set()
    for mesh in (Mesh(dp=1, tp=2), Mesh(dp=2, tp=2), Mesh(dp=16, tp=2), Mesh(dp=1024, tp=2)):
        shape = (3 * 2**12, 2**12, 8)[: dst.count(",") + 1]
        one, two = (P.parse(spec).sharding(mesh, shape, "test") for spec in (src, dst))
        one = Sharding(mesh, one.dims, tuple((mesh.axis(name), "sum") for name in partial.split()))
        steps = plan_reshard(one, two, TensorType(shape, F32))
        texts.add(", ".join(text(step) for step in steps if step.kind != "view"))
    assert len(texts) == 1, texts


def on_mesh(sharding: Sharding, mesh: Mesh) -> Sharding:
    """The same sharding by whole axes on a mesh of other sizes."""
    dims = tuple(DimSharding(tuple(mesh.axis(part.name) for part in dim.axes)) for dim in sharding.dims)
    return Sharding(mesh, dims, tuple((mesh.axis(part.name), op) for part, op in sharding.partial))


def text(step: Step) -> str:
    args = ["+".join(arg) if isinstance(arg, tuple) else arg for arg in step.args if arg != "sum"]
    return " ".join(map(str, [step.kind, *(step.args[0] if step.kind == "view" else args)]))


# What tools call.


def test_reshard_plan_lists_what_is_sent_by_one_rank() -> None:
    mesh = Mesh(dp=2, tp=4)
    src = Sharding(mesh, P("dp").sharding(mesh, (8, 64), "x").dims, ((mesh.axis("tp"), "sum"),))
    assert reshard_plan(mesh, (8, 64), F32, src, P(None, "tp")) == (
        Collective("reduce_scatter", ("tp",), "float32", (4, 64), (4, 16), 1024, 768, 6144),
        Collective("all_gather", ("dp",), "float32", (4, 16), (8, 16), 512, 256, 2048),
    )
    assert reshard_plan(mesh, (8, 64), F32, P(), P("dp", "tp")) == ()


MESH = Mesh(dp=2, tp=4)
BAD = [
    (P("dp"), P("pp"), ["dst: P('pp') on shape [8, 64], dim 0: the mesh is Mesh(dp=2, tp=4)", "it has no such axis"]),
    (P("dp", "dp"), P(), ["src: P('dp', 'dp') on shape [8, 64]", "an axis can cut one dim of a value, once"]),
    (P(None, None, "dp"), P(), ["src: P(None, None, 'dp') on shape [8, 64]", "3 entries for 2 dims"]),
    (Sharding.replicated(Mesh(dp=2), 2), P(), ["src: [_, _] on Mesh(dp=2), shape [8, 64], Mesh(dp=2, tp=4)"]),
    (
        P(),
        Sharding(MESH, (WHOLE, WHOLE), ((MESH.axis("tp"), "sum"),)),
        ["dst: f32[8, 64]{sum tp}", "src is f32[8, 64]: no reduction can be opened again", "partial only where src is"],
    ),
]


@pytest.mark.parametrize(("src", "dst", "expected"), BAD)
def test_reshard_plan_refuses_shardings_that_do_not_fit(
    src: P | Sharding, dst: P | Sharding, expected: list[str]
) -> None:
    with pytest.raises(ShardingError) as caught:
        reshard_plan(MESH, (8, 64), F32, src, dst)
    for line in expected:
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        ("-,-", "-,-", ()),  # every device holds all
        ("x,y", "x,y", ("collective_permute",)),
        ("x+y,-", "y+x,-", ("collective_permute",)),  # that of axes is that of devices as well
        ("x,y", "x,-", ("collective_permute", "all_gather")),  # before the value grows
        ("x,-", "x,y", ("collective_permute",)),  # after it shrank
    ],
)
def test_devices_in_another_order_cost_a_permute_where_the_value_is_smallest(
    src: str, dst: str, kinds: tuple[str, ...]
) -> None:
    mesh, other = Mesh(x=2, y=2), Mesh(x=2, y=2, device_ids=(3, 2, 1, 0))
    ends = [P.parse(spec).sharding(at, (16, 8), "test") for spec, at in ((src, mesh), (dst, other))]
    plan = reshard_plan(mesh, (16, 8), F32, *ends)
    assert tuple(each.kind for each in plan) == kinds
    assert all(each.wire_bytes == 128 for each in plan)
