"""Products on oneDNN: torch's, of whatever strides and whoever looks on, and only where they are faster."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from gpt import DATA, GPT, Config
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import shardc
from shardc import Mesh
from shardc.ops.contraction import BoundDot
from shardc.runtime.execute import instruction as onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
CPU = torch.device("cpu")
EPYC = {"cpu_name": "AMD EPYC", "avx512_f": True}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


LEFT = {
    "rows": random(24, 40),
    "columns": random(40, 24).t(),
    "cut": random(24, 80)[:, :40],
    "every": random(48, 40)[::2],
}
RIGHT = {
    "plain": random(40, 56),
    "turned": random(56, 40).t(),
    "cut": random(40, 60)[:, :56],
    "one": random(40, 1).expand(40, 56),
}
BIAS = {"none": None, "plain": random(56), "strided": random(112)[::2], "one": random(1).expand(56)}


@pytest.mark.parametrize("bias", BIAS)
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("left", LEFT)
def test_a_product_is_torchs_for_all_strides(left: str, right: str, bias: str) -> None:
    expected = LEFT[left].double() @ RIGHT[right].double()
    if (added := BIAS[bias]) is not None:
        expected = expected + added.double()
    torch.testing.assert_close(onednn.linear(LEFT[left], RIGHT[right], added), expected.float(), atol=1e-5, rtol=1e-5)


def test_only_large_products_of_several_rows_and_columns_are_its() -> None:
    assert onednn.choose(256, 256, 256) is onednn.linear
    assert onednn.choose(64, 64, 64) is None
    assert onednn.choose(1, 4096, 4096) is onednn.choose(4096, 4096, 1) is onednn.choose(4096, 1, 4096) is None


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch says so wherever flags of oneDNN are set
def test_only_on_processors_where_it_is_faster() -> None:
    with mock.patch.object(torch.cpu, "get_capabilities", return_value=EPYC):
        assert onednn.is_faster(torch.float32, CPU) == torch.backends.mkl.is_available()
        assert not onednn.is_faster(torch.float64, CPU)
        assert not onednn.is_faster(torch.float32, torch.device("cuda"))
        with torch.backends.mkldnn.flags(enabled=False):
            assert not onednn.is_faster(torch.float32, CPU)
    for other in ({"cpu_name": "Intel Xeon", "avx512_f": True}, {"cpu_name": "AMD EPYC", "avx512_f": False}, {}):
        with mock.patch.object(torch.cpu, "get_capabilities", return_value=other):
            assert not onednn.is_faster(torch.float32, CPU)


def test_who_counts_flops_sees_the_product_that_torch_would_have_made() -> None:
    with FlopCounterMode(display=False) as counter:
        onednn.linear(LEFT["rows"], RIGHT["plain"])
    assert counter.get_total_flops() == 2 * 24 * 40 * 56


def test_a_bound_contraction_asks_once_for_its_shapes_what_multiplies() -> None:
    asked = mock.Mock(return_value=onednn.linear)
    bound = BoundDot("b t k, n k -> b t n", asked)
    x, weight = random(2, 12, 40), random(56, 40)
    for _ in range(2):
        torch.testing.assert_close(bound(x, weight), x @ weight.t())
    asked.assert_called_once_with(24, 40, 56)
    assert bound.product_text("a", "b") == "linear(a, b).view((2, 12, 56))"


def test_a_model_trains_as_on_one_device() -> None:
    """On four virtual ranks, the first step as instructions, the others as code."""
    model, batch = GPT(Config(layers=1)), tuple(torch.randint(128, (2, 4, 32)))
    plain = copy.deepcopy(model)
    linear = mock.Mock(side_effect=onednn.linear)
    with (
        mock.patch.object(torch.cpu, "get_capabilities", return_value=EPYC),
        mock.patch.object(torch.backends.mkl, "is_available", return_value=True),
        mock.patch.object(onednn, "LARGE", 1),
        mock.patch.object(onednn, "WIDE", 1),
        mock.patch.object(onednn, "linear", linear),
        mock.patch("shardc.runtime.execute.code.linear", linear),
    ):
        parallel = shardc.parallelize(model, Mesh(dp=4), DATA, args=batch)
        calls = list[int]()
        for _ in range(3):
            loss, expected = parallel(*batch), plain(*batch)
            loss.backward(), expected.backward()
            torch.testing.assert_close(loss.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
            calls.append(linear.call_count)
    for (name, ours), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5, msg=name)
    assert calls[0] > 0 and calls == [calls[0], 2 * calls[0], 3 * calls[0]]
