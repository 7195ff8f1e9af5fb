"""Each collective leaves the sharding that it says, with equal values, and its adjoint is the collective we think.

A value laid out on ranks is a point of a space with one number for each element that a rank holds. Of elements that
``r`` ranks hold alike each counts ``1/r``. Then <Fx, y> = <x, F*y> holds for F a collective and F* its adjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_case import integers, lay_out, read_back
from torch import Tensor

from shardc.language.machine import CollectiveKind
from shardc.language.mesh import Axes, Mesh
from shardc.language.partition import parse_part
from shardc.language.sharding import DimSharding, Sharding, num_shards
from shardc.program.collective import COLLECTIVES, group_size, steps_sharding, wire_bytes
from shardc.runtime.comm.simulated import SimulatedComm

Call = tuple[CollectiveKind, tuple[object, ...]]
Names = tuple[str, ...]


def check(comm: SimulatedComm, src: Sharding, call: Call, shape: tuple[int, ...]) -> None:
    """The collective is the identity on the whole value, and <Fx, y> = <x, F*y>."""
    kind, args = call
    dst = steps_sharding(src, kind, args)
    x, y = integers(shape, 1), integers(shape, 2)
    held = lay_out(x, src)
    moved = act(comm, call, held)
    assert {tuple(piece.shape) for piece in moved} == {dst.local_shape(shape)}, f"{call} on {src}"
    assert torch.equal(read_back(moved, dst, SimulatedComm(comm.mesh), shape), x), f"{call} on {src}: other values"
    duals = lay_out(y, dst.reduced())
    back = act(comm, adjoint(call, src), duals)
    assert inner(moved, duals, dst) == inner(held, back, src), f"{call} on {src}: not its adjoint"


def act(comm: SimulatedComm, call: Call | None, held: Sequence[Tensor]) -> Sequence[Tensor]:
    if call is None:
        return held
    moved: Sequence[Tensor] = getattr(comm, call[0])(held, *call[1])
    return moved


def adjoint(call: Call, src: Sharding) -> Call | None:
    """What carries gradients back: the dual of a partial value is one that all ranks along it hold."""
    match call:
        case "all_gather", args:
            return "shard_slice", args
        case "shard_slice", args:
            return "all_gather", args
        case "reduce_scatter", (axes, _, dim):
            return "all_gather", (axes, dim)
        case "all_to_all", (axes, src_dim, dst_dim):
            return "all_to_all", (axes, dst_dim, src_dim)
        case "collective_permute", (axes, new_axes):
            return "collective_permute", (new_axes, axes)
    assert call[0] == "all_reduce"
    return None


def inner(ones: Sequence[Tensor], others: Sequence[Tensor], sharding: Sharding) -> float:
    replicas = sharding.mesh.size // num_shards(sharding.cut_axes + sharding.partial_axes)
    return sum(float((a * b).sum()) for a, b in zip(ones, others, strict=True)) / replicas


# All collectives on small meshes.


def calls(src: Sharding) -> Iterator[Call]:
    """Every collective that applies to a value of two dims."""
    mesh = src.mesh
    names = tuple(map(mesh.print_part, src.partial_axes))
    free = [axis for axis in map(mesh.axis, mesh.axis_names) if axis not in src.cut_axes + src.partial_axes]
    for dim in (0, 1):
        cut = tuple(map(mesh.print_part, src.dims[dim].axes))
        for i in range(len(cut)):
            yield "all_gather", (cut[i:], dim)
            yield "all_to_all", (cut[i:], dim, 1 - dim)
        for axes in permutations(free):
            if axes:
                yield "shard_slice", (tuple(map(mesh.print_part, axes)), dim)
        for some in permutations(names):
            if some:
                yield "reduce_scatter", (some, "sum", dim)
    if names:
        yield "all_reduce", (names, "sum")
    cuts = tuple(map(mesh.print_part, src.cut_axes))
    for other in permutations((*cuts, *map(mesh.print_part, free)), len(cuts)):
        if cuts and _sizes(mesh, other) == _sizes(mesh, cuts):
            yield "collective_permute", (cuts, other)


def _sizes(mesh: Mesh, names: Names) -> list[int]:
    return [mesh.axis_size(name) for name in names]


def sharding(mesh: Mesh, first: str, second: str, partial: str = "") -> Sharding:
    def axes(names: str) -> Axes:
        return tuple(map(mesh.axis, names))

    dims = (DimSharding(axes(first)), DimSharding(axes(second)))
    return Sharding(mesh, dims, tuple((axis, "sum") for axis in axes(partial)))


MESHES = [Mesh(a=2), Mesh(a=2, b=3), Mesh(a=3, b=2, c=2), Mesh(a=2, b=2, c=2, device_ids=(7, 6, 5, 4, 3, 2, 1, 0))]
SHARDINGS = ["a,", ",a", "a,b", "ab,", ",ba", "c,ab", "bc,a", ",,a", "b,,a", ",c,ab", "ac,,b", "cab,"]


def everything() -> Iterator[tuple[Sharding, Call]]:
    for mesh in MESHES:
        for spec in SHARDINGS:
            if set(spec) - {","} <= set(mesh.axis_names):
                src = sharding(mesh, *spec.split(","))
                yield from ((src, call) for call in calls(src))


def test_every_collective_keeps_values_and_has_its_adjoint() -> None:
    checked = [check(SimulatedComm(src.mesh), src, call, (24, 48)) for src, call in everything()]
    kinds = {call[0] for _, call in everything()}
    assert kinds == set(COLLECTIVES.values()) - {"mask_padding", "rechunk"} and len(checked) > 150


@settings(max_examples=60)
@given(st.sampled_from(["all_reduce", "reduce_scatter"]), st.sampled_from(["max", "min"]), st.integers(0, 99))
def test_reductions_by_max_and_min_keep_values(kind: CollectiveKind, op: str, seed: int) -> None:
    mesh, x = Mesh(a=2, b=3), integers((6, 4), seed)
    src = Sharding(mesh, (DimSharding(), DimSharding((mesh.axis("a"),))), ((mesh.axis("b"), op),))  # type: ignore[arg-type]
    args = (("b",), op) if kind == "all_reduce" else (("b",), op, 0)
    moved = act(SimulatedComm(mesh), (kind, args), lay_out(x, src))
    assert torch.equal(read_back(moved, steps_sharding(src, kind, args), SimulatedComm(mesh), tuple(x.shape)), x)


# A wrong collective is caught by the same check.


class JoinsBackwards(SimulatedComm):
    """all_to_all that joins what it received in the wrong order."""

    def all_to_all(self, xs: Sequence[Tensor], axes: Names, src_dim: int, dst_dim: int) -> Sequence[Tensor]:
        count = len(self.mesh.groups(tuple(map(self.mesh.axis, axes)))[0])
        joined = super().all_to_all(xs, axes, src_dim, dst_dim)
        return [torch.cat(x.chunk(count, src_dim)[::-1], src_dim) for x in joined]


class GathersMinorFirst(SimulatedComm):
    """all_gather that takes its axes in the wrong order."""

    def all_gather(self, xs: Sequence[Tensor], axes: Names, dim: int) -> Sequence[Tensor]:
        return super().all_gather(xs, axes[::-1], dim)


class ReducesTwice(SimulatedComm):
    """all_reduce that reduces over an axis on which the value is whole."""

    def all_reduce(self, xs: Sequence[Tensor], axes: Names, op: str) -> Sequence[Tensor]:
        return super().all_reduce(xs, self.mesh.axis_names, op)


class KeepsTheWrongPiece(SimulatedComm):
    """reduce_scatter whose ranks keep their neighbour's piece."""

    def reduce_scatter(self, xs: Sequence[Tensor], axes: Names, op: str, dim: int) -> Sequence[Tensor]:
        kept = list(super().reduce_scatter(xs, axes, op, dim))
        for group in self.mesh.groups(tuple(map(self.mesh.axis, axes))):
            pieces = [kept[position] for position in group]
            for position, piece in zip(group, pieces[1:] + pieces[:1], strict=True):
                kept[position] = piece
        return kept


class PermutesBack(SimulatedComm):
    """collective_permute in the wrong direction."""

    def collective_permute(self, xs: Sequence[Tensor], src_axes: Names, dst_axes: Names) -> Sequence[Tensor]:
        return super().collective_permute(xs, dst_axes, src_axes)


PLANTED = [
    (JoinsBackwards, ("a,", ""), ("all_to_all", (("a",), 0, 1))),
    (GathersMinorFirst, ("ab,", ""), ("all_gather", (("a", "b"), 0))),
    (ReducesTwice, (",", "a"), ("all_reduce", (("a",), "sum"))),
    (KeepsTheWrongPiece, (",", "a"), ("reduce_scatter", (("a",), "sum", 1))),
    (PermutesBack, ("abc,", ""), ("collective_permute", (("a", "b", "c"), ("b", "c", "a")))),
]


@pytest.mark.parametrize(("wrong", "spec", "call"), PLANTED, ids=lambda item: getattr(item, "__name__", ""))
def test_a_wrong_collective_is_caught(wrong: type[SimulatedComm], spec: tuple[str, str], call: Call) -> None:
    src = sharding(Mesh(a=2, b=2, c=2), *spec[0].split(","), spec[1])
    check(SimulatedComm(src.mesh), src, call, (24, 48))
    with pytest.raises(AssertionError, match="other values"):
        check(wrong(src.mesh), src, call, (24, 48))


class ScattersUnsummed(SimulatedComm):
    """A slice whose adjoint forgets to join."""

    def all_gather(self, xs: Sequence[Tensor], axes: Names, dim: int) -> Sequence[Tensor]:
        joined = super().all_gather(xs, axes, dim)
        return [x / len(self.mesh.groups(tuple(map(self.mesh.axis, axes)))[0]) for x in joined]


def test_a_wrong_adjoint_is_caught() -> None:
    src = sharding(Mesh(a=2), "", "")
    with pytest.raises(AssertionError, match="not its adjoint"):
        check(ScattersUnsummed(src.mesh), src, ("shard_slice", (("a",), 0)), (24, 48))


# What a collective does to a sharding.

FOUR = Mesh(dp=2, tp=4)
TABLE = [
    ("all_gather", (("tp",), 0), "[_@dp+tp, _]", "[_@dp, _]"),
    ("all_gather", (("dp", "tp"), 0), "[_@dp+tp, _]", "[_, _]"),
    ("all_gather", (("tp:(2)2",), 0), "[_@dp+tp, _]", "[_@dp+tp:(1)2, _]"),
    ("shard_slice", (("tp:(2)2",), 0), "[_@tp:(1)2, _]", "[_@tp, _]"),
    ("shard_slice", (("dp", "tp"), 1), "[_, _]", "[_, _@dp+tp]"),
    ("all_reduce", (("tp",), "sum"), "[_@dp, _]{sum tp}", "[_@dp, _]"),
    ("all_reduce", (("tp:(2)2",), "sum"), "[_@dp, _]{sum tp}", "[_@dp, _]{sum tp:(1)2}"),
    ("reduce_scatter", (("tp", "dp"), "sum", 1), "[_, _]{sum dp tp}", "[_, _@tp+dp]"),
    ("all_to_all", (("tp",), 0, 1), "[_@dp+tp, _]", "[_@dp, _@tp]"),
    ("all_to_all", (("tp:(2)2",), 0, 1), "[_@tp, _@dp]", "[_@tp:(1)2, _@dp+tp:(2)2]"),
    ("collective_permute", (("dp", "tp"), ("tp", "dp")), "[_@dp+tp, _]", "[_@tp+dp, _]"),
    ("collective_permute", (("tp:(2)2", "dp"), ("dp", "tp:(2)2")), "[_@tp, _@dp]", "[_@tp:(1)2+dp, _@tp:(2)2]"),
    ("collective_permute", (("tp",), ("tp:(2)2", "dp")), "[_@tp, _]", "[_@tp:(2)2+dp, _]"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "args", "src", "dst"), TABLE)
def test_a_collective_knows_the_sharding_of_its_result(kind: CollectiveKind, args: Names, src: str, dst: str) -> None:
    assert str(steps_sharding(parsed(src), kind, args)) == dst


MISTAKES = [
    ("all_gather", (("dp",), 0), "[_@dp+tp, _]", "are not the minor cuts of dim 0"),
    ("all_gather", (("tp",), 1), "[_@dp+tp, _]", "are not the minor cuts of dim 1"),
    ("shard_slice", (("tp",), 1), "[_@dp+tp, _]", "cannot cut dim 1"),
    ("shard_slice", (("tp:(2)2",), 1), "[_, _]{sum tp}", "cannot cut dim 1"),
    ("all_reduce", (("dp",), "sum"), "[_, _]{sum tp}", "no sum over"),
    ("all_reduce", (("tp",), "max"), "[_, _]{sum tp}", "no max over"),
    ("collective_permute", (("tp",), ("dp",)), "[_@tp, _]", "cannot make 4 pieces"),
    ("collective_permute", (("dp",), ("tp:(1)2",)), "[_@tp, _]", "cannot give way"),
]


@pytest.mark.parametrize(("kind", "args", "src", "message"), MISTAKES)
def test_a_collective_that_does_not_apply_is_a_fault(kind: CollectiveKind, args: Names, src: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        steps_sharding(parsed(src), kind, args)


def parsed(text: str) -> Sharding:
    """A sharding of FOUR as it prints."""

    def axes(names: str) -> Axes:
        return tuple(parse_part(name, FOUR) for name in names.split("+") if name)

    cuts, _, partial = text.removeprefix("[").partition("]")
    dims = tuple(DimSharding(axes(dim.strip().removeprefix("_").removeprefix("@"))) for dim in cuts.split(","))
    names = partial.removeprefix("{sum").removesuffix("}").split()
    return Sharding(FOUR, dims, tuple((part, "sum") for name in names for part in axes(name)))


def test_bytes_on_the_wire_are_those_of_the_ring_algorithms() -> None:
    found = {kind: wire_bytes(kind, 1200, 4) for kind in COLLECTIVES.values() if kind != "rechunk"}
    assert found == {
        "all_gather": 900, "shard_slice": 0, "all_reduce": 1800, "reduce_scatter": 900, "all_to_all": 900,
        "collective_permute": 1200, "mask_padding": 0,
    }  # fmt: skip
    assert all(wire_bytes(kind, 1200, 1) == 0 for kind in COLLECTIVES.values())


def test_the_group_of_a_permute_that_moves_nothing_is_one() -> None:
    mesh = Mesh(a=1, b=2)
    assert group_size(mesh, "collective_permute", (("a", "b"), ("b", "a"))) == 1
    assert group_size(FOUR, "collective_permute", (("dp", "tp"), ("tp", "dp"))) == 8
    assert group_size(FOUR, "all_gather", (("tp:(2)2",), 0)) == 2
