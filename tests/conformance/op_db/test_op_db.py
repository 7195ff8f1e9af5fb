"""A share of PyTorch's operator samples, and the search for the cuts that an op allows."""

from __future__ import annotations

import pytest
import torch

from conformance.op_db.run import run_variant
from conformance.op_db.sample import Sample
from conformance.op_db.shardable import allowed_cuts

VARIANTS = (
    "cumsum",
    "fft.rfft",
    "gather",
    "index_add",
    "linalg.svd",
    "matmul",
    "nn.functional.conv2d",
    "nn.functional.dropout",
    "nn.functional.layer_norm",
    "nn.functional.mse_loss",
    "sort",
)


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [pytest.param(False, marks=pytest.mark.share), True], ids=["even", "uneven"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_right_on_both_meshes(name: str, uneven: bool) -> None:
    result = run_variant(name, uneven=uneven, count=1)
    assert (result.outcome, result.detail) == ("right", "")
    assert result.facts["runs"] == 2 and not result.facts["fallbacks"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add", "cat", "cumsum", "matmul", "repeat", "sort", "sum"])
def test_a_variant_is_right_on_empty_operands_dims_of_1_no_dims_and_other_dtypes(name: str) -> None:
    result = run_variant(name, odd=True, count=1)
    assert (result.outcome, result.detail) == ("right", "")
    assert result.facts["runs"] >= 6


def test_undefined_values_count_as_apart() -> None:
    assert run_variant("empty_like", count=1).outcome == "apart"


def cuts(call: object, *shapes: tuple[int, ...]) -> set[tuple[int | None, ...]]:
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    return set(allowed_cuts(Sample(tensors, lambda *xs: [call(*xs)]), most=9))


def test_every_factor_of_a_product_can_be_cut() -> None:
    assert cuts(torch.matmul, (4, 6), (6, 8)) == {(0, None), (1, 0), (None, 1)}


def test_a_softmax_cannot_be_cut_along_its_dim() -> None:
    assert cuts(lambda x: x.softmax(0), (4, 6)) == {(1,)}


def test_a_sum_can_be_cut_and_a_mean_cannot() -> None:
    assert cuts(torch.sum, (4,)) == {(0,)}
    assert cuts(torch.mean, (4,)) == set()
