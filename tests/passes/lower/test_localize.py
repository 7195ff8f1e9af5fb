"""localize: the program in local shapes, one text for every rank."""

from __future__ import annotations

import torch
from printed import block, compiled, parameter, printed, value
from torch import Tensor

import shardc
from shardc import Mesh, P
from shardc.program.traffic import fallbacks_of

MESH = Mesh(dp=2, tp=2)


def test_sizes_that_ops_name_become_local_and_marks_go() -> None:
    def spread(x: Tensor, w: Tensor) -> Tensor:
        y = shardc.annotate(x @ w, P("dp"))
        return (y.view(8, 3, 2).permute(1, 0, 2) + torch.ones(8, 2)).expand(4, 3, 8, 2)

    program = compiled(spread, MESH, {"x": P("dp"), "w": P(None, "tp")}, x=value(8, 6), w=parameter(6, 6))
    assert printed(program.at("fuse_collectives")) == block(
        """
        w: f32[6, 6@tp]
        x: f32[8@dp, 6]
        dot: f32[8@dp, 6@tp] = dot(x, w, "a b, b c -> a c")
        all_gather_tp: f32[8@dp, 6] = all_gather(dot, ("tp",), 1)
        annotate: f32[8@dp, 6] = shardc.annotate(all_gather_tp, "dp")
        reshape: f32[8@dp, 3, 2] = reshape(annotate, [8, 3, 2])
        permute_1: f32[3, 8@dp, 2] = permute(reshape, [1, 0, 2])
        full: f32[8@dp, 2] = full([8, 2], 1, dtype=float32)
        add: f32[3, 8@dp, 2] = add(permute_1, full)
        expand_1: f32[4, 3, 8@dp, 2] = expand(add, [4, 3, 8, 2])
        output: expand_1
        """
    )
    assert printed(program.at("localize")) == block(
        """
        w: f32[6, 3]
        x: f32[4, 6]
        dot: f32[4, 3] = dot(x, w, "a b, b c -> a c")
        all_gather_tp: f32[4, 6] = all_gather(dot, ("tp",), 1)
        reshape: f32[4, 3, 2] = reshape(all_gather_tp, [4, 3, 2])
        permute_1: f32[3, 4, 2] = permute(reshape, [1, 0, 2])
        full: f32[4, 2] = full([4, 2], 1, dtype=float32)
        add: f32[3, 4, 2] = add(permute_1, full)
        expand_1: f32[4, 3, 4, 2] = expand(add, [4, 3, 4, 2])
        output: expand_1
        """
    )


def test_blocks_are_split_where_they_lie() -> None:
    """Each rank holds a piece of each of three blocks, side by side: a split of 8 is one of 4."""

    def attention(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).split(8, -1)
        return q * k + v

    program = compiled(attention, MESH, {"w": P(None, shardc.blocks(3, "tp"))}, x=value(8, 6), w=parameter(6, 24))
    assert printed(program.at("localize")) == block(
        """
        w: f32[6, 12]
        x: f32[8, 6]
        dot: f32[8, 12] = dot(x, w, "a b, b c -> a c")
        split: (f32[8, 4], f32[8, 4], f32[8, 4]) = split(dot, 4, -1)
        mul: f32[8, 4] = mul(getitem, getitem_1)
        add: f32[8, 4] = add(mul, getitem_2)
        output: add
        """
    )


def test_a_forward_and_backward_over_cut_weights_name_no_global_size_that_is_cut() -> None:
    program = compiled(
        lambda x, w: (x @ w).relu().sum(),
        Mesh(dp=2),
        {"x": P("dp"), "w": P("dp")},
        train=True,
        x=value(8, 6),
        w=parameter(6, 16),
    )
    assert printed(program.at("localize")) == block(
        """
        w: f32[3, 16]
        x: f32[4, 6]
        tangent(output): f32[]
        all_gather_dp: f32[6, 16] = all_gather(w, ("dp",), 0)
        dot: f32[4, 16] = dot(x, all_gather_dp, "a b, b c -> a c")
        relu: f32[4, 16] = relu(dot)
        sum_1: f32[] = sum(relu)
        all_reduce_dp: f32[] = all_reduce(sum_1, ("dp",), "sum")
        expand_1: f32[4, 16] = expand(tangent(output), [4, 16])
        threshold_backward: f32[4, 16] = threshold_backward(expand_1, relu, 0)
        dot_1: f32[6, 16] = dot(x, threshold_backward, "a b, a c -> b c")
        reduce_scatter_dp: f32[3, 16] = reduce_scatter(dot_1, ("dp",), "sum", 0)
        output: all_reduce_dp
        gradient w: reduce_scatter_dp
        """
    )


def test_ops_run_whole_are_told_of_local_programs_with_windows_too() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 3, 3, padding=1), torch.nn.Flatten())
    program = shardc.compile(model, Mesh(tp=2), {"input": P(None, None, "tp")}, args=(torch.randn(2, 3, 8),))
    assert any("windows" in str(node.target) for node in program.program.calls)
    assert fallbacks_of(program.program) == []
