"""keep_dims: every matrix product is a dot over the model's own dims."""

from __future__ import annotations

import torch
from printed import after, block, compiled, parameter, printed, value
from torch import Tensor
from torch.nn import functional as F

from shardc import Mesh

MESH = Mesh(dp=2)


def test_a_linear_of_a_batch_and_a_sequence_never_merges_them() -> None:
    """Nor do its gradients: the weight's is a contraction over both dims, the bias's a sum over both."""
    program = compiled(
        lambda x, w, b: F.linear(x, w, b),
        MESH,
        train=True,
        x=parameter(4, 8, 6),
        w=parameter(10, 6),
        b=parameter(10),
    )
    assert "addmm: f32[32, 10] = addmm(b, reshape, permute)" in printed(program.at("canonicalize"))
    assert printed(program.at("keep_dims")) == block(
        """
        x: f32[4, 8, 6]
        w: f32[10, 6]
        b: f32[10]
        tangent(output): f32[4, 8, 10]
        dot: f32[4, 8, 10] = dot(x, w, "a b c, d c -> a b d")
        add: f32[4, 8, 10] = add(dot, b)
        dot_1: f32[4, 8, 6] = dot(tangent(output), w, "a b c, c d -> a b d")
        dot_2: f32[10, 6] = dot(tangent(output), x, "a b c, a b d -> c d")
        sum_2: f32[10] = sum(tangent(output), [0, 1], False)
        output: add
        gradient x: dot_1
        gradient w: dot_2
        gradient b: sum_2
        """
    )


def test_the_products_of_attention_keep_batch_and_heads_apart() -> None:
    def attend(a_query: Tensor, b_key: Tensor, c_value: Tensor) -> Tensor:
        return F.softmax(a_query @ b_key.transpose(-1, -2), -1) @ c_value

    tensors = {"a_query": value(2, 4, 8, 6), "b_key": value(2, 4, 8, 6), "c_value": value(2, 4, 8, 6)}
    assert after("keep_dims", attend, MESH, **tensors) == block(
        """
        a_query: f32[2, 4, 8, 6]
        b_key: f32[2, 4, 8, 6]
        c_value: f32[2, 4, 8, 6]
        permute: f32[2, 4, 6, 8] = permute(b_key, [0, 1, 3, 2])
        dot: f32[2, 4, 8, 8] = dot(a_query, permute, "a b c d, a b d e -> a b c e")
        _softmax: f32[2, 4, 8, 8] = _softmax(dot, -1, False)
        dot_1: f32[2, 4, 8, 6] = dot(_softmax, c_value, "a b c d, a b d e -> a b c e")
        output: dot_1
        """
    )


def test_heads_that_the_model_splits_and_merges_stay_views_of_its_own() -> None:
    def heads(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
        split = (x @ w).view(4, 8, 2, 3).transpose(1, 2).relu()
        return split.transpose(1, 2).reshape(4, 8, 6) @ o

    assert after("keep_dims", heads, MESH, x=value(4, 8, 5), w=parameter(5, 6), o=parameter(6, 5)) == block(
        """
        w: f32[5, 6]
        o: f32[6, 5]
        x: f32[4, 8, 5]
        dot: f32[4, 8, 6] = dot(x, w, "a b c, c d -> a b d")
        reshape_2: f32[4, 8, 2, 3] = reshape(dot, [4, 8, 2, 3])
        permute: f32[4, 2, 8, 3] = permute(reshape_2, [0, 2, 1, 3])
        relu: f32[4, 2, 8, 3] = relu(permute)
        permute_1: f32[4, 8, 2, 3] = permute(relu, [0, 2, 1, 3])
        reshape_3: f32[4, 8, 6] = reshape(permute_1, [4, 8, 6])
        dot_1: f32[4, 8, 5] = dot(reshape_3, o, "a b c, c d -> a b d")
        output: dot_1
        """
    )


def test_dims_that_the_user_merged_stay_merged() -> None:
    assert after("keep_dims", lambda x, w: x.flatten(0, 1) @ w, MESH, x=value(4, 8, 6), w=parameter(6, 10)) == block(
        """
        w: f32[6, 10]
        x: f32[4, 8, 6]
        reshape: f32[32, 6] = reshape(x, [32, 6])
        dot: f32[32, 10] = dot(reshape, w, "a b, b c -> a c")
        output: dot
        """
    )


def test_the_addend_of_a_product_is_added_after_it() -> None:
    """As one op, each shard of a cut contraction would add it."""

    def add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.baddbmm(c, a, b, alpha=0.5)

    assert after("keep_dims", add, MESH, a=value(2, 5, 4), b=value(2, 4, 3), c=value(2, 5, 3)) == block(
        """
        a: f32[2, 5, 4]
        b: f32[2, 4, 3]
        c: f32[2, 5, 3]
        dot: f32[2, 5, 3] = dot(a, b, "a b c, a c d -> a b d")
        mul: f32[2, 5, 3] = mul(dot, 0.5)
        add: f32[2, 5, 3] = add(mul, c)
        output: add
        """
    )
