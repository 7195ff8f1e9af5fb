"""canonicalize: losses, means, draws and views in few kinds of op, each with an honest rule."""

from __future__ import annotations

import pytest
import torch
from printed import Function, after, block, compiled, parameter, printed, value
from torch import Tensor
from torch.nn import functional as F

import shardc
from shardc import Mesh, P

MESH = Mesh(dp=2)


def test_a_cross_entropy_is_a_gather_and_a_sum_over_the_rows_whose_target_counts() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, ignore_index=5)

    assert after("canonicalize", loss, MESH, x=value(8, 6), y=torch.arange(8) % 6) == block(
        """
        x: f32[8, 6]
        y: i64[8]
        _log_softmax: f32[8, 6] = _log_softmax(x, 1, False)
        ne: bool[8] = ne(y, 5)
        scalar_tensor: i64[] = scalar_tensor(0, dtype=int64)
        where: i64[8] = where(ne, y, scalar_tensor)
        _to_copy: f32[8] = _to_copy(ne, dtype=float32)
        unsqueeze: i64[8, 1] = unsqueeze(where, 1)
        gather: f32[8, 1] = gather(_log_softmax, 1, unsqueeze)
        squeeze: f32[8] = squeeze(gather, 1)
        scalar_tensor_1: f32[] = scalar_tensor(0.0, dtype=float32)
        where_1: f32[8] = where(ne, squeeze, scalar_tensor_1)
        mul: f32[8] = mul(where_1, _to_copy)
        neg: f32[8] = neg(mul)
        sum_1: f32[] = sum(_to_copy, [0])
        sum_2: f32[] = sum(neg, [0])
        div: f32[] = div(sum_2, sum_1)
        output: div
        """
    )


def test_the_gradient_of_a_cross_entropy_is_a_scatter_of_which_rows_and_columns_may_be_cut() -> None:
    program = compiled(F.cross_entropy, MESH, train=True, input=parameter(8, 6), target=torch.arange(8) % 6)
    assert printed(program.at("canonicalize"), "backward") == block(
        """
        ne_1: bool[8] = ne(target, -100)
        scalar_tensor_2: i64[] = scalar_tensor(0, dtype=int64)
        where_2: i64[8] = where(ne_1, target, scalar_tensor_2)
        div_1: f32[] = div(tangent(output), sum_1)
        neg_1: f32[] = neg(div_1)
        scalar_tensor_3: f32[] = scalar_tensor(0.0, dtype=float32)
        where_3: f32[8] = where(ne_1, neg_1, scalar_tensor_3)
        unsqueeze_1: i64[8, 1] = unsqueeze(where_2, 1)
        unsqueeze_2: f32[8, 1] = unsqueeze(where_3, 1)
        arange: i64[6] = arange(6)
        exp: f32[8, 6] = exp(_log_softmax)
        neg_2: f32[8, 1] = neg(unsqueeze_2)
        mul_1: f32[8, 6] = mul(exp, neg_2)
        scatter_added_at: f32[8, 6] = scatter_added_at(mul_1, unsqueeze_1, unsqueeze_2, arange, 1)
        gradient input: scatter_added_at
        """
    )


def test_a_mean_is_a_sum_and_a_division() -> None:
    assert after("canonicalize", lambda x: (x.mean(), x.mean(1, keepdim=True)), MESH, x=value(8, 6)) == block(
        """
        x: f32[8, 6]
        sum_1: f32[] = sum(x, [0, 1], False, dtype=float32)
        div: f32[] = div(sum_1, 48)
        sum_2: f32[8, 1] = sum(x, (1,), True, dtype=float32)
        div_1: f32[8, 1] = div(sum_2, 6)
        output: div
        output: div_1
        """
    )


def test_a_mean_loss_is_a_sum_loss_whose_gradient_is_divided_before() -> None:
    assert after("canonicalize", F.mse_loss, MESH, train=True, input=parameter(8, 6), target=value(8, 6)) == block(
        """
        input: f32[8, 6]
        target: f32[8, 6]
        tangent(output): f32[]
        mse_loss_1: f32[] = mse_loss(input, target, 2)
        div: f32[] = div(mse_loss_1, 48)
        div_1: f32[] = div(tangent(output), 48)
        mse_loss_backward_1: f32[8, 6] = mse_loss_backward(div_1, input, target, 2)
        output: div
        gradient input: mse_loss_backward_1
        """
    )


def test_dropout_compares_numbers_drawn_by_global_index() -> None:
    """Each index is made of one arange a dim, which ordinary rules cut: no op needs to know its rank."""
    assert after("canonicalize", lambda x: F.dropout(x, 0.25), MESH, x=value(8, 6)) == block(
        """
        x: f32[8, 6]
        random: i64[2]
        scalar_tensor: i64[] = scalar_tensor(0, dtype=int64)
        arange: i64[8] = arange(8)
        mul: i64[8] = mul(arange, 6)
        reshape_2: i64[8, 1] = reshape(mul, [8, 1])
        add: i64[8, 1] = add(scalar_tensor, reshape_2)
        arange_1: i64[6] = arange(6)
        mul_1: i64[6] = mul(arange_1, 1)
        reshape_3: i64[1, 6] = reshape(mul_1, [1, 6])
        add_1: i64[8, 6] = add(add, reshape_3)
        uniform: f32[8, 6] = uniform(random, 2393831924, add_1)
        lt: bool[8, 6] = lt(uniform, 0.75)
        _to_copy: f32[8, 6] = _to_copy(lt, dtype=float32)
        mul_2: f32[8, 6] = mul(x, _to_copy)
        mul_3: f32[8, 6] = mul(mul_2, 1.3333333333333333)
        output: mul_3
        """
    )


def test_an_index_by_the_arange_of_each_dim_is_removed_and_any_other_index_stays() -> None:
    def pick(x: Tensor) -> Tensor:
        every, diagonal = torch.arange(8), torch.arange(8)
        return x[every[:, None], torch.arange(8)] * x[every, diagonal]

    assert after("canonicalize", pick, MESH, x=value(8, 8)) == block(
        """
        x: f32[8, 8]
        arange: i64[8] = arange(8, dtype=int64)
        arange_1: i64[8] = arange(8, dtype=int64)
        index_1: f32[8] = index(x, (arange, arange_1))
        mul: f32[8, 8] = mul(x, index_1)
        output: mul
        """
    )


def test_copies_go_views_are_reshapes_and_transposes_one_permute() -> None:
    def shuffle(x: Tensor) -> Tensor:
        x = x.transpose(0, 1).t().contiguous().view(4, 2, 6)
        return x.transpose(0, 2).permute(1, 0, 2).clone().to(torch.float32) * 2

    assert after("canonicalize", shuffle, MESH, x=value(8, 6)) == block(
        """
        x: f32[8, 6]
        reshape: f32[4, 2, 6] = reshape(x, [4, 2, 6])
        permute_3: f32[2, 6, 4] = permute(reshape, [1, 2, 0])
        mul: f32[2, 6, 4] = mul(permute_3, 2)
        output: mul
        """
    )


def test_a_concatenation_drops_empty_operands_of_any_rank_and_keeps_the_dtype() -> None:
    """The key-value cache of transformers begins as an empty tensor of one dim."""

    def grow(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        empty = x.new_empty(0, dtype=torch.float64)
        return torch.cat([empty, x], -2), torch.cat([x, empty, y[:, :0], y], 1)

    assert after("canonicalize", grow, MESH, x=value(2, 3, 4), y=value(2, 3, 4)) == block(
        """
        x: f32[2, 3, 4]
        y: f32[2, 3, 4]
        _to_copy: f64[2, 3, 4] = _to_copy(x, dtype=float64)
        cat_2: f32[2, 6, 4] = cat([x, y], 1)
        _to_copy_1: f64[2, 6, 4] = _to_copy(cat_2, dtype=float64)
        output: _to_copy
        output: _to_copy_1
        """
    )


def test_an_op_that_needs_only_a_shape_is_a_constant() -> None:
    assert after("canonicalize", lambda x, w: torch.zeros_like(x @ w) + 1, MESH, x=value(8, 6), w=value(6, 4)) == block(
        """
        full: f32[8, 4] = full([8, 4], 0, dtype=float32)
        add: f32[8, 4] = add(full, 1)
        output: add
        """
    )


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("mask_dims", [1, 2])
def test_a_number_put_where_a_mask_says_stays_cut(mask_dims: int, adds: bool) -> None:
    def put(x: Tensor, mask: Tensor) -> Tensor:
        return torch.index_put(x * 2, (mask,), torch.tensor([0.5], dtype=x.dtype), adds)

    inputs = {"x": value(4, 6), "mask": value(4, 6)[(...,) if mask_dims == 2 else (..., 0)] > 0}
    model = Function(put, inputs)
    annotations = {"x": P("a", "b"), "mask": P(*("a", "b")[:mask_dims])}
    program = shardc.compile(model, Mesh(a=2, b=2), annotations, kwargs=inputs)
    assert torch.equal(program.simulate(**inputs)[0], model(**inputs))
    assert not program.collectives
