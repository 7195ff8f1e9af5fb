"""fuse_collectives: fewer and cheaper collectives for the same values."""

from __future__ import annotations

import torch
from printed import block, compiled, parameter, printed, value
from torch import Tensor, fx

import shardc
from shardc import Mesh, P
from shardc.language.sharding import Sharding, TensorType
from shardc.passes.lower.fuse_collectives import fuse_collectives
from shardc.program.collective import all_reduce, shard_slice
from shardc.program.communication import is_collective
from shardc.program.program import Input, Output, Program

MESH = Mesh(dp=2, tp=2)


def kinds(program: Program) -> list[str]:
    return [node.name for node in program.calls if node.name.startswith(("all_", "reduce_"))]


def test_attention_and_mlp_side_by_side_are_added_before_they_are_reduced() -> None:
    """GPT-J's block, with a bias on one of them: it is broadcast, so it comes last."""

    def side_by_side(x: Tensor, u: Tensor, d: Tensor, v: Tensor, e: Tensor, b: Tensor) -> Tensor:
        return x + ((x @ u).relu() @ d + b) + (x @ v).tanh() @ e

    weights = {name: parameter(*shape) for name, shape in {"u": (6, 4), "d": (4, 6), "v": (6, 4), "e": (4, 6)}.items()}
    annotations = {"x": P("dp"), "d": P("tp"), "e": P("tp")}
    program = compiled(side_by_side, MESH, annotations, x=value(8, 6), b=parameter(6), **weights)
    assert kinds(program.at("lower_reshards")) == ["all_reduce_tp", "all_reduce_tp_1"]
    assert printed(program.at("fuse_collectives")) == block(
        """
        b: f32[6]
        u: f32[6, 4@tp]
        d: f32[4@tp, 6]
        v: f32[6, 4@tp]
        e: f32[4@tp, 6]
        x: f32[8@dp, 6]
        dot: f32[8@dp, 4@tp] = dot(x, u, "a b, b c -> a c")
        relu: f32[8@dp, 4@tp] = relu(dot)
        dot_1: f32[8@dp, 6]{sum tp} = dot(relu, d, "a b, b c -> a c")
        dot_2: f32[8@dp, 4@tp] = dot(x, v, "a b, b c -> a c")
        tanh: f32[8@dp, 4@tp] = tanh(dot_2)
        dot_3: f32[8@dp, 6]{sum tp} = dot(tanh, e, "a b, b c -> a c")
        add_3: f32[8@dp, 6]{sum tp} = add(dot_1, dot_3)
        all_reduce_tp_2: f32[8@dp, 6] = all_reduce(add_3, ("tp",), "sum")
        add_4: f32[8@dp, 6] = add(x, all_reduce_tp_2)
        add_5: f32[8@dp, 6] = add(add_4, b)
        output: add_5
        """
    )


def test_with_a_cut_sequence_they_are_added_before_one_reduce_scatter() -> None:
    def side_by_side(x: Tensor, u: Tensor, d: Tensor, v: Tensor, e: Tensor) -> Tensor:
        one = shardc.annotate((x @ u).relu(), P("dp", None, "tp")) @ d
        other = shardc.annotate((x @ v).tanh(), P("dp", None, "tp")) @ e
        return x + one + other

    weights = {"u": (6, 16), "d": (16, 6), "v": (6, 16), "e": (16, 6)}
    tensors = {"x": value(4, 8, 6)} | {name: parameter(*shape) for name, shape in weights.items()}
    program = compiled(side_by_side, MESH, {"x": P("dp", "tp"), "u": P(None, "tp"), "v": P(None, "tp")}, **tensors)
    assert kinds(program.at("lower_reshards")) == ["all_gather_tp", "reduce_scatter_tp", "reduce_scatter_tp_1"]
    assert kinds(program.at("fuse_collectives")) == ["all_gather_tp", "reduce_scatter_tp_2"]


def test_collectives_that_two_reshards_have_in_common_are_done_once() -> None:
    program = compiled(lambda x: x.cumprod(0) + x.prod(), MESH, {"x": P("tp", "dp")}, x=value(8, 8))
    assert kinds(program.at("lower_reshards")) == ["all_gather_tp", "all_gather_tp_1", "all_gather_dp"]
    assert printed(program.at("fuse_collectives")) == block(
        """
        x: f32[8@tp, 8@dp]
        all_gather_tp: f32[8, 8@dp] = all_gather(x, ("tp",), 0)
        cumprod: f32[8, 8@dp] = cumprod(all_gather_tp, 0)
        all_gather_dp: f32[8, 8] = all_gather(all_gather_tp, ("dp",), 1)
        prod: f32[] = prod(all_gather_dp)
        add: f32[8, 8@dp] = add(cumprod, prod)
        output: add
        """
    )


def reduced_and_sliced(*dims: int) -> Program:
    """One all_reduce over tp and a slice over tp of each of these dims."""
    graph, type_ = fx.Graph(), TensorType((8, 6), torch.float32)
    partial = Sharding(MESH, P("dp").sharding(MESH, (8, 6), "x").dims, ((MESH.axis("tp"), "sum"),))
    nodes = {graph.placeholder("x"): partial}
    total = graph.call_function(all_reduce, (next(iter(nodes)), ("tp",), "sum"))
    nodes[total] = partial.reduced()
    slices = [graph.call_function(shard_slice, (total, ("tp",), dim)) for dim in dims]
    cuts = [P("dp", "tp"), P(("dp", "tp"))]
    nodes |= {node: cuts[1 - dim].sharding(MESH, (8, 6), "x") for node, dim in zip(slices, dims, strict=True)}
    graph.output(tuple(slices))
    outputs = tuple(Output(f"output{i}", "output") for i, _ in enumerate(dims))
    program = Program(graph, (Input("x", "input", type_),), outputs, MESH, "lowered")
    for node, sharding in nodes.items():
        program.set_type(node, type_)
        program.set_sharding(node, sharding)
    return program


def test_an_all_reduce_of_which_every_rank_keeps_a_piece_is_a_reduce_scatter() -> None:
    assert printed(fuse_collectives(reduced_and_sliced(1, 1))) == block(
        """
        x: f32[8@dp, 6]{sum tp}
        reduce_scatter: f32[8@dp, 6@tp] = reduce_scatter(x, ("tp",), "sum", 1)
        output: reduce_scatter
        output: reduce_scatter
        """
    )


def test_an_all_reduce_of_which_users_keep_other_pieces_stays() -> None:
    assert "all_reduce(x" in printed(fuse_collectives(reduced_and_sliced(1, 0)))


def test_a_masked_mean_is_divided_before_it_is_reduced() -> None:
    """The count is there early; what is divided may be added to other losses, and one reduction is of them all."""

    def mean(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).sum() / mask.sum()

    program = compiled(mean, Mesh(dp=2), {"x": P("dp"), "mask": P("dp")}, x=value(8), mask=value(8))
    assert [(found.kind, found.axes, found.local_shape_in) for found in program.collectives] == [
        ("all_reduce", ("dp",), ())
    ] * 2
    count, loss = (node for node in program.program.graph.nodes if is_collective(node))
    assert count in loss.all_input_nodes[0].all_input_nodes


def test_a_mean_that_is_read_before_its_sum_is_there_is_reduced_as_it_is() -> None:
    def means(x: Tensor, y: Tensor) -> Tensor:
        count = y.sum()
        return (x / count).sum() / count + (x / count).exp().sum() / count

    program = compiled(means, Mesh(dp=2), {"x": P("dp"), "y": P("dp")}, x=value(8), y=value(8))
    assert [found.local_shape_in for found in program.collectives] == [(), ()]
