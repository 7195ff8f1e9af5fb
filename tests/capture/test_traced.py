"""Views by strides are captured as views by dims or as indices, valid for any tensor."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import shardc
from shardc import Mesh, P
from shardc.capture.capture import capture
from shardc.capture.decompositions import TRACED_AS
from shardc.capture.values.refusals import Unfit
from shardc.program.node import op_name
from shardc.program.traffic import fallbacks_of

aten = torch.ops.aten
as_strided, as_strided_scatter = TRACED_AS[aten.as_strided.default], TRACED_AS[aten.as_strided_scatter.default]


def drawn(draw: random.Random):
    """A tensor, perhaps transposed, and a view of its storage by size, strides and offset."""
    shape = [draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(0, 3))]
    x = (
        torch.arange(float(torch.Size(shape).numel()))
        .reshape(shape)
        .permute(draw.sample(range(len(shape)), len(shape)))
    )
    if draw.random() < 0.5:
        order = draw.sample(range(x.ndim), x.ndim)
        return x, [x.shape[dim] for dim in order], [x.stride(dim) for dim in order], None
    size = [draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(0, 3))]
    return x, size, [draw.choice([0, 1, 2, 3, 4, 6]) for _ in size], draw.choice([None, 0, 1])


def fits(x, size, stride, offset) -> bool:
    last = (offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return last < x.numel()


CASES = [case for case in (drawn(random.Random(seed)) for seed in range(400)) if fits(*case)]


def test_a_view_by_strides_is_the_same_view():
    assert len(CASES) > 200
    for x, *view in CASES:
        assert torch.equal(as_strided(x, *view), torch.as_strided(x, *view)), (x.shape, x.stride(), view)


def test_a_scatter_by_strides_writes_the_right_elements():
    for x, *view in CASES:
        found = torch.as_strided(x, *view)
        if found.unique().numel() == found.numel():
            source = -1 - torch.rand(view[0])
            expected = torch.as_strided_scatter(x, source, *view)
            assert torch.equal(as_strided_scatter(x, source, *view), expected), (x.shape, x.stride(), view)


def test_a_tensor_with_gaps_has_no_such_view():
    with pytest.raises(Unfit, match=r"as_strided of a tensor that has gaps: shape \(3, 2\), strides"):
        as_strided(torch.zeros(3, 4)[:, :2], [2, 2], [1, 4])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_ops_that_keep_the_batch_cut(layer, train):
    torch.manual_seed(0)
    model, x = layer(6, 4, 2, batch_first=True), torch.randn(4, 3, 6)
    program = shardc.compile(model, Mesh(dp=2), {"input": P("dp")}, args=(x,), train=train)
    assert not fallbacks_of(program.program)
    assert {found.kind for found in program.collectives} <= {"all_reduce"}
    torch.testing.assert_close(program.simulate(x)[0][0], model(x)[0].detach())


def test_a_mean_over_positions_that_is_a_view_by_strides_keeps_the_batch_cut():
    model, x = nn.AdaptiveAvgPool2d(1), torch.randn(4, 6, 3, 3)
    program = shardc.compile(model, Mesh(dp=2), {"input": P("dp")}, args=(x,), train=False)
    assert not program.collectives
    assert "as_strided" not in {op_name(node.target) for node in program.at("capture").calls}


def test_the_norm_of_a_cut_weight_is_ops_that_keep_its_rows_cut():
    torch.manual_seed(0)
    model, x = weight_norm(nn.Linear(6, 4)).double(), torch.randn(3, 6, dtype=torch.float64)
    expected = model(x)
    expected.sum().backward()
    program = shardc.compile(model, Mesh(tp=2), {"parametrizations.weight.original1": P("tp")}, args=(x,))
    assert not fallbacks_of(program.program)
    assert not program.collectives
    found, gradients = program.simulate(x)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "enlarge",
    [
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: F.interpolate(x, (12, 8), None, "bilinear"),
        torch.nn.Upsample(scale_factor=2),
        lambda x: torch.ops.aten.upsample_nearest2d(x, [12, 8]),
    ],
)
def test_an_image_is_enlarged_by_one_op(enlarge):
    class Enlarges(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return enlarge(x)

    calls = [op_name(node.target) for node in capture(Enlarges(), (torch.randn(2, 3, 6, 4),), {}).program.calls]
    assert len(calls) == 1 and "upsample" in calls[0]
