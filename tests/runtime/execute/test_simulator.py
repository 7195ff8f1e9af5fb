"""Virtual ranks: pieces make up the whole, collectives equal the dense result, programs run forward and backward."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from localized import Writer, aten, row_parallel, row_parallel_inputs, row_parallel_values

from shardc.language.mesh import AxisPart, Mesh
from shardc.language.partition import P, blocks
from shardc.language.sharding import DimSharding, Sharding
from shardc.program.collective import (
    all_gather,
    all_reduce,
    all_to_all,
    collective_permute,
    reduce_scatter,
    shard_slice,
    source_position,
)
from shardc.runtime.comm.dtensor import pad, same_bits, shard, unpad, unshard
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.execute.executor import Executor
from shardc.runtime.simulator import interpret, simulate

MESHES = [Mesh(dp=4), Mesh(dp=2, tp=2), Mesh(dp=2, tp=3), Mesh(pp=2, dp=2, tp=2), Mesh(dp=2, tp=4)]
PARTS_OF_FOUR = (AxisPart("tp", 1, 2), AxisPart("tp", 2, 2))


@st.composite
def cuts(draw, is_even=True):
    """A sharding without partials and a shape that it cuts."""
    mesh = draw(st.sampled_from(MESHES))
    parts = [mesh.axis(name) for name in mesh.axis_names]
    if mesh.axis_names[-1] == "tp" and mesh.shape[-1] == 4 and draw(st.booleans()):
        parts = [*parts[:-1], *PARTS_OF_FOUR]
    ndim = draw(st.integers(1, 3))
    rows: list[list[list[AxisPart]]] = [[[]] for _ in range(ndim)]
    for part in draw(st.permutations(parts)):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            if is_even and draw(st.booleans()) and len(rows[dim]) < 3:
                rows[dim].append([])
            rows[dim][-1].append(part)
    dims, shape = [], []
    for row in rows:
        sizes = [math.prod(part.size for part in axes) * draw(st.integers(1, 3)) for axes in row]
        minor = [(size, tuple(axes)) for size, axes in zip(sizes[1:], row[1:], strict=True) if axes]
        rest = math.prod(size for size, axes in zip(sizes[1:], row[1:], strict=True) if not axes)
        dims.append(DimSharding(tuple(row[0]), tuple(minor)))
        shape.append(
            draw(st.integers(0, 9))
            if not is_even and not minor
            else sizes[0] * rest * math.prod(size for size, _ in minor)
        )
    return Sharding(mesh, tuple(dims)), tuple(shape)


def whole_of(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


class TestPieces:
    @given(cuts())
    def test_pieces_of_all_ranks_make_up_the_whole(self, case):
        sharding, shape = case
        whole = whole_of(shape)
        pieces = [shard(whole, sharding, position) for position in range(sharding.mesh.size)]
        assert all(piece.shape == sharding.local_shape(shape) for piece in pieces)
        assert torch.equal(unshard(pieces, sharding, shape), whole)

    @given(cuts(is_even=False))
    def test_uneven_pieces_are_chunks_and_make_up_the_whole(self, case):
        sharding, shape = case
        whole = whole_of(shape)
        pieces = [shard(whole, sharding, position) for position in range(sharding.mesh.size)]
        padded = [pad(piece, sharding, shape, position) for position, piece in enumerate(pieces)]
        assert all(piece.shape == sharding.local_shape(shape) for piece in padded)
        assert all(torch.equal(unpad(padded[i], sharding, shape, i), piece) for i, piece in enumerate(pieces))
        assert torch.equal(unshard(padded, sharding, shape), whole)

    def test_major_axes_come_first(self):
        mesh = Mesh(dp=2, tp=2)
        sharding = P(("tp", "dp")).sharding(mesh, (4,), "x")
        assert [shard(torch.arange(4), sharding, position).item() for position in range(4)] == [0, 2, 1, 3]

    def test_each_of_the_blocks_is_cut(self):
        sharding = P(blocks(3, "tp")).sharding(Mesh(tp=2), (12,), "qkv")
        assert shard(torch.arange(12), sharding, 0).tolist() == [0, 1, 4, 5, 8, 9]
        assert shard(torch.arange(12), sharding, 1).tolist() == [2, 3, 6, 7, 10, 11]

    def test_replicas_that_differ_by_one_bit_are_refused(self):
        mesh = Mesh(dp=2, tp=2)
        sharding = P("dp").sharding(mesh, (4,), "x")
        pieces = [torch.zeros(2) for _ in range(4)]
        pieces[3] = -pieces[3]
        with pytest.raises(AssertionError, match=r"loss: replicas of \[_@dp\] at positions 2 and 3 differ"):
            unshard(pieces, sharding, (4,), "loss")

    def test_nans_with_the_same_bits_are_the_same(self):
        assert same_bits(torch.tensor(math.nan), torch.tensor(math.nan))
        assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))

    def test_a_partial_value_has_no_whole(self):
        mesh = Mesh(dp=2)
        with pytest.raises(AssertionError, match="reduction is open"):
            unshard([torch.ones(2)] * 2, Sharding(mesh, (DimSharding(),), ((mesh.axis("dp"), "sum"),)), (2,))


def random_pieces(mesh, shape):
    return [torch.randint(-8, 8, shape).float() for _ in range(mesh.size)]


AXES = st.sampled_from([("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"), ("tp:(1)2",), ("tp:(2)2", "dp")])


class TestCollectives:
    """On random local tensors of 1 to 3 dims, over axes in any order and parts of axes."""

    mesh = Mesh(dp=2, tp=4)

    @given(AXES, st.data())
    def test_all_gather_equals_the_whole(self, axes, data):
        ndim = data.draw(st.integers(1, 3))
        dim = data.draw(st.integers(0, ndim - 1))
        spec = [None] * ndim
        spec[dim] = axes
        whole = torch.randn([24, 16, 8][:ndim])
        sharding = P(*spec).sharding(self.mesh, whole.shape, "x")
        pieces = [shard(whole, sharding, position) for position in range(self.mesh.size)]
        assert all(torch.equal(x, whole) for x in SimulatedComm(self.mesh).all_gather(pieces, axes, dim))
        back = SimulatedComm(self.mesh).shard_slice([whole] * self.mesh.size, axes, dim)
        assert all(torch.equal(*pair) for pair in zip(back, pieces, strict=True))

    @given(AXES, st.sampled_from(["sum", "max", "min"]), st.data())
    def test_reduce_scatter_is_all_reduce_and_slice(self, axes, op, data):
        ndim = data.draw(st.integers(1, 3))
        dim = data.draw(st.integers(0, ndim - 1))
        comm, pieces = SimulatedComm(self.mesh), random_pieces(self.mesh, [8, 16, 8][:ndim])
        reduced = comm.all_reduce(pieces, axes, op)
        for group in self.mesh.groups(tuple(self._parts(axes))):
            stack = torch.stack([pieces[i] for i in group])
            dense = {"sum": stack.sum(0), "max": stack.amax(0), "min": stack.amin(0)}[op]
            assert all(torch.equal(reduced[i], dense) for i in group)
        scattered = comm.reduce_scatter(pieces, axes, op, dim)
        sliced = comm.shard_slice(reduced, axes, dim)
        assert all(torch.equal(*pair) for pair in zip(scattered, sliced, strict=True))

    @given(AXES, st.permutations([0, 1, 2]))
    def test_all_to_all_is_all_gather_and_slice(self, axes, dims):
        comm, pieces = SimulatedComm(self.mesh), random_pieces(self.mesh, [8, 16, 8])
        src, dst, _ = dims
        gathered = comm.all_gather(pieces, axes, src)
        expected = comm.shard_slice(gathered, axes, dst)
        assert all(torch.equal(*pair) for pair in zip(comm.all_to_all(pieces, axes, src, dst), expected, strict=True))

    @pytest.mark.parametrize(
        ("src", "dst"),
        [
            (("dp", "tp"), ("tp", "dp")),
            (("dp",), ("tp:(2)2",)),
            (("tp:(1)2",), ("tp:(2)2",)),
            (("tp",), ("tp:(2)2", "tp:(1)2")),
            (("dp", "tp:(1)2"), ("tp",)),
        ],
    )
    def test_a_permute_moves_one_sharding_to_another_and_each_rank_sends_once(self, src, dst):
        whole = torch.randn(8, 3)
        before, after = (P(axes).sharding(self.mesh, whole.shape, "x") for axes in (src, dst))
        pieces = [shard(whole, before, position) for position in range(self.mesh.size)]
        comm = SimulatedComm(self.mesh)
        assert torch.equal(unshard(comm.collective_permute(pieces, src, dst), after, whole.shape), whole)
        parts = [tuple(self._parts(axes)) for axes in (src, dst)]
        sources = [source_position(self.mesh, position, *parts) for position in range(self.mesh.size)]
        assert sorted(sources) == list(range(self.mesh.size))
        assert [traffic.bytes["collective_permute"] for traffic in comm.traffic] == [
            0 if sources[i] == i else pieces[i].nbytes for i in range(self.mesh.size)
        ]

    def test_bytes_are_counted_by_the_ring_algorithms(self):
        comm, pieces = SimulatedComm(self.mesh), random_pieces(self.mesh, [8, 4])
        comm.all_gather(pieces, ("tp",), 0)
        comm.all_reduce(pieces, ("tp",), "sum")
        comm.reduce_scatter(pieces, ("tp",), "sum", 1)
        comm.all_to_all(pieces, ("tp",), 0, 1)
        assert dict(comm.traffic[5].bytes) == {
            "all_gather": 3 * 128,
            "all_reduce": 192,
            "reduce_scatter": 96,
            "all_to_all": 96,
        }
        assert set(comm.traffic[5].calls.values()) == {1}

    def test_a_group_of_one_does_nothing(self):
        comm = SimulatedComm(Mesh(dp=1, tp=2))
        pieces = random_pieces(comm.mesh, [4])
        assert all(a is b for a, b in zip(comm.all_reduce(pieces, ("dp",), "sum"), pieces, strict=True))
        assert not comm.traffic[0].calls

    def _parts(self, axes):
        return P(axes).sharding(self.mesh, (8,), "x").cut_axes


class TestPrograms:
    def test_a_program_on_virtual_ranks_equals_the_dense_one(self):
        program, inputs = row_parallel(Mesh(dp=2, tp=2)), row_parallel_inputs()
        weight = inputs["weight"].clone().requires_grad_()
        y = inputs["x"] @ weight
        (y**2).sum().backward()
        loss, simulated, gradient, absent = simulate(program, row_parallel_values(program, inputs))
        torch.testing.assert_close(loss, (y**2).sum().detach())
        torch.testing.assert_close(simulated, y.detach())
        torch.testing.assert_close(gradient, weight.grad)
        assert absent is None

    def test_forward_waits_for_the_tangents(self):
        program, inputs = row_parallel(Mesh(dp=1, tp=1)), row_parallel_inputs()
        executor = Executor(program, SimulatedComm(program.mesh))
        values = row_parallel_values(program, inputs, loss=3.0)
        (outputs,), saved = executor.forward([[*values[:2], None]])
        assert outputs[2] is None
        (first,) = executor.backward(saved, [[None, None, values[2]]], keep=True)
        (second,) = executor.backward(saved, [[None, None, torch.tensor(1.0)]])
        torch.testing.assert_close(first[2], 3 * second[2])
        with pytest.raises(RuntimeError, match="backward: a second one through one forward"):
            executor.backward(saved, [[None, None, values[2]]])

    def test_only_what_the_backward_reads_is_saved(self):
        program, inputs = row_parallel(Mesh(dp=1, tp=1)), row_parallel_inputs()
        executor = Executor(program, SimulatedComm(program.mesh))
        (outputs,), saved = executor.forward([row_parallel_values(program, inputs)])
        ((x, y),) = ([t for t in tensors if t.ndim] for tensors in saved.tensors)
        assert x.shape == (4, 8) and y is outputs[1]

    def test_collectives_are_identities_on_one_device(self):
        mesh = Mesh(dp=2, tp=2)
        w = Writer(mesh)
        x = w.input("x", (4, 8), P())
        y = w.call(shard_slice, (x, ("dp",), 0), (4, 8), P("dp"))
        y = w.call(all_to_all, (y, ("dp",), 0, 1), (4, 8), P(None, "dp"))
        y = w.call(collective_permute, (y, ("dp",), ("tp",)), (4, 8), P(None, "tp"))
        y = w.call(all_gather, (y, ("tp",), 1), (4, 8), P())
        y = w.call(reduce_scatter, (y, ("tp",), "max", 1), (4, 8), P(None, "tp"))
        program = w.result(y=("output", y))
        whole = torch.randn(4, 8)
        torch.testing.assert_close(simulate(program, [whole])[0], whole)
        program.level = "lowered"
        assert interpret(program, [whole])[0] is whole

    def test_lists_of_tensors_are_arguments_too(self):
        w = Writer(Mesh(dp=2))
        x, y = w.input("x", (4, 2), P("dp")), w.input("y", (4, 3), P("dp"))
        program = w.result(z=("output", w.call(aten.cat.default, ([x, y], 1), (4, 5), P("dp"))))
        a, b = torch.randn(4, 2), torch.randn(4, 3)
        assert torch.equal(simulate(program, [a, b])[0], torch.cat([a, b], 1))

    def test_a_wrong_collective_is_caught(self):
        program, inputs = row_parallel(Mesh(dp=2, tp=2)), row_parallel_inputs()
        reduces = [node for node in program.graph.nodes if node.target is all_reduce]
        reduces[1].args = (reduces[1].args[0], ("tp",), "sum")
        with pytest.raises(AssertionError, match="replicas"):
            simulate(program, row_parallel_values(program, inputs))
