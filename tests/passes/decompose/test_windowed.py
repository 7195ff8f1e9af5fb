"""Ops that look at neighbours along a cut dim give the right numbers and exchange edges alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc import Mesh, P

Op = Callable[..., Tensor]


class Model(nn.Module):
    """An op of an input and parameters."""

    def __init__(self, op: Op, *parameters: Tensor) -> None:
        super().__init__()
        self.op = op
        self.parameters_ = nn.ParameterList([nn.Parameter(parameter) for parameter in parameters])

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, *self.parameters_)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def check(
    op: Op, mesh: Mesh, spec: P, x: Tensor, *parameters: Tensor, moves: Sequence[str] | None = None
) -> shardc.Compiled:
    """Values and all gradients equal those of one device; ``moves``: the kinds of collectives in the forward."""
    model, x = Model(op, *parameters), x.clone().requires_grad_()
    compiled = shardc.compile(model, mesh, {"x": spec}, args=(x,))
    expected = model(x)
    tangent = torch.randn_like(expected)
    found, gradients = compiled.simulate(x, grad_outputs={"output": tangent})
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)
    named = {"x": x, **dict(model.named_parameters())}
    for name, whole in zip(named, torch.autograd.grad(expected, list(named.values()), tangent), strict=True):
        torch.testing.assert_close(gradients[name], whole, rtol=0, atol=1e-11)
    if moves is not None:
        assert [each.kind for each in compiled.collectives if each.phase == "forward"] == list(moves)
    return compiled


EDGES = ("collective_permute",)
HEIGHT = P(None, None, "x")


def test_a_convolution_over_a_cut_height_moves_a_row_each_way() -> None:
    """And so it is with a stride, with two dims cut, and beside a cut batch. DTensor gives wrong numbers for it."""
    x, weight = random(2, 4, 16, 16), random(8, 4, 3, 3)
    compiled = check(lambda x, w: F.conv2d(x, w, padding=1), Mesh(x=4), HEIGHT, x, weight, moves=EDGES)
    assert compiled.collectives[0].wire_bytes == 2 * (2 * 4 * 16) * 8, "two rows"
    assert str(compiled.shardings["output"]) == "[_, _, _@x, _]"
    compiled = check(lambda x, w: F.conv2d(x, w, padding=1, stride=2), Mesh(x=4), HEIGHT, x, weight, moves=EDGES)
    assert compiled.collectives[0].wire_bytes == (2 * 4 * 16) * 8, "one row"
    check(lambda x, w: F.conv2d(x, w, padding=1), Mesh(x=2, y=2), P(None, None, "x", "y"), x, weight, moves=EDGES * 2)
    check(lambda x, w: F.conv2d(x, w, padding=1), Mesh(d=2, x=2), P("d", None, "x"), x, weight, moves=EDGES)


def test_the_weights_gradient_takes_the_windows_that_forward_took() -> None:
    x, weight = random(2, 4, 16, 16), random(8, 4, 3, 3)
    compiled = check(lambda x, w: F.conv2d(x, w, padding=1), Mesh(x=4), HEIGHT, x, weight)
    kinds = [each.kind for each in compiled.collectives]
    assert kinds == ["collective_permute", "all_reduce", "collective_permute"], "the input's gradient gives edges back"


def test_an_edge_wider_than_a_chunk_comes_from_several_ranks() -> None:
    check(lambda x, w: F.conv1d(x, w, padding=6), Mesh(x=8), P(None, None, "x"), random(2, 2, 16), random(2, 2, 13))


POOLS: list[Op] = [
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    lambda x: F.max_pool2d(x, 3, stride=1, padding=1, dilation=1),
    lambda x: F.max_pool2d(x, (3, 2), stride=(2, 2), ceil_mode=True),
    lambda x: F.avg_pool2d(x, 2),
    lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
    lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False),
    lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, divisor_override=5),
    lambda x: F.avg_pool2d(x, 3, stride=2, ceil_mode=True),
]


@pytest.mark.parametrize("op", POOLS)
@pytest.mark.parametrize(("mesh", "spec"), [(Mesh(x=4), P(None, None, "x")), (Mesh(x=2, y=2), P("y", None, None, "x"))])
@pytest.mark.parametrize("sizes", [(16, 8), (13, 11)])
def test_pools_take_edges_alone(op: Op, mesh: Mesh, spec: P, sizes: tuple[int, int]) -> None:
    compiled = check(op, mesh, spec, random(2, 3, *sizes))
    assert {each.kind for each in compiled.collectives} <= {"collective_permute"}


def test_an_adaptive_pool_takes_edges_alone_where_its_windows_are_alike() -> None:
    x = random(2, 3, 16, 9)
    compiled = check(lambda x: F.adaptive_avg_pool2d(x, (4, 3)), Mesh(x=2, y=2), P(None, None, "x", "y"), x)
    assert {each.kind for each in compiled.collectives} == {"collective_permute"}, "3 columns of 3 on 2 ranks"
    check(lambda x: F.adaptive_avg_pool2d(x, (5, 9)), Mesh(x=4), P(None, None, "x"), x)


def test_indices_of_a_max_pool_are_those_of_the_whole_plane() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.max_pool2d(x, 3, stride=2, padding=1, return_indices=True)

    x = random(2, 3, 15, 9)
    compiled = shardc.compile(Pool(), Mesh(x=2, y=2), {"x": P(None, None, "x", "y")}, args=(x,), train=False)
    found, _ = compiled.simulate(x)
    for one, other in zip(found, Pool()(x), strict=True):
        assert torch.equal(one, other)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_convolutions_of_every_kind(data: st.DataObject) -> None:
    """One to three places, strided, dilated, grouped, transposed, with a bias or without."""

    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    ndim, groups, is_transposed = number(1, 3), number(1, 2), data.draw(st.booleans())
    kernel, stride, dilation, padding = ([number(low, 3) for _ in range(ndim)] for low in (1, 1, 1, 0))
    sizes = [number(1, 13) for _ in range(ndim)]
    extra: dict[str, list[int]] = {}
    if is_transposed:
        extra["output_padding"] = [number(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
        padding = [min(p, (k - 1) * d) for p, k, d in zip(padding, kernel, dilation, strict=True)]
    x, weight = random(2, 2 * groups, *sizes), random(2 * groups, 2, *kernel)
    bias = [random(2 * groups)] * number(0, 1)
    name = f"conv{'_transpose' if is_transposed else ''}{ndim}d"

    def op(x: Tensor, *parameters: Tensor) -> Tensor:
        return getattr(F, name)(
            x, *parameters, stride=stride, padding=padding, dilation=dilation, groups=groups, **extra
        )

    try:
        op(x, weight, *bias)
    except RuntimeError:
        return  # the kernel is larger than the input
    mesh, spec = data.draw(st.sampled_from(MESHES[ndim]))
    check(op, mesh, spec, x, weight, *bias)


MESHES = {
    1: [(Mesh(x=2), P(None, None, "x")), (Mesh(x=4), P(None, None, "x")), (Mesh(d=2, x=2), P("d", None, "x"))],
    2: [
        (Mesh(x=4), P(None, None, "x")),
        (Mesh(x=2, y=2), P(None, None, "x", "y")),
        (Mesh(x=2, y=2), P(None, None, None, ("x", "y"))),
    ],
    3: [(Mesh(x=2), P(None, None, None, "x")), (Mesh(x=2, y=2), P(None, None, "x", None, "y"))],
}  # fmt: skip


@pytest.mark.parametrize(("height", "groups"), [(16, 1), (15, 1), (13, 2)])
def test_a_kernel_larger_than_the_result_is_summed_over_where_it_lies(height: int, groups: int) -> None:
    """As in the gradient of a weight: one all_reduce, and edges where the result has more than one place."""

    class Correlation(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return F.conv2d(x, w, b, padding=(2 if height < 16 else 0, 0), groups=groups)

    args = random(2, 4, 16, 8), random(6, 4 // groups, height - height % 4, 8), random(6)
    cut = {"x": P(None, None, "x"), "w": P(None, None, "x")}
    compiled = shardc.compile(Correlation(), Mesh(x=4), cut, args=args, train=False)
    found, _ = compiled.simulate(*args)
    torch.testing.assert_close(found, Correlation()(*args), rtol=0, atol=1e-11)
    kinds = [each.kind for each in compiled.collectives]
    assert kinds == ["all_reduce"] if height == 16 else ["collective_permute", "all_reduce"]


def test_groups_may_be_cut() -> None:
    x, weight = random(2, 8, 8, 8), random(16, 2, 3, 3)
    check(lambda x, w: F.conv2d(x, w, padding=1, groups=4), Mesh(x=4), P(None, "x"), x, weight, moves=[])
    check(lambda x, w: F.conv_transpose2d(x, w, groups=4), Mesh(x=2), P(None, "x"), x, random(8, 3, 3, 3), moves=[])
    check(
        lambda x, w: F.conv2d(x, w, padding=1, groups=8),
        Mesh(x=2, y=4),
        P(None, "y", "x"),
        x,
        random(8, 1, 3, 3),
        moves=EDGES,
    )


RESAMPLINGS: list[Op] = [
    lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    lambda x: F.interpolate(x, scale_factor=(3, 1.5), mode="nearest-exact"),
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: F.interpolate(x, size=(3 * x.shape[2], 5), mode="bilinear"),
    lambda x: F.interpolate(x.mean(-1), scale_factor=3, mode="linear"),
    lambda x: F.interpolate(x.unsqueeze(1), scale_factor=(1, 2, 2), mode="trilinear"),
]


@pytest.mark.parametrize("op", RESAMPLINGS)
@pytest.mark.parametrize("rows", [16, 9])
def test_enlarging_by_a_whole_factor_takes_edges_alone(op: Op, rows: int) -> None:
    compiled = check(op, Mesh(x=4), P(None, None, "x"), random(2, 3, rows, 4))
    assert {each.kind for each in compiled.collectives if each.phase == "forward"} <= {"collective_permute"}
    check(op, Mesh(x=2, y=2), P(None, None, "x", "y"), random(2, 3, rows, 6))


def test_enlarging_by_another_factor_is_right_too() -> None:
    check(lambda x: F.interpolate(x, size=(7, 7), mode="bilinear"), Mesh(x=2), P(None, None, "x"), random(2, 3, 6, 4))
    check(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), Mesh(x=2), P(None, None, "x"), random(2, 3, 6, 4))
    op = lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)  # noqa: E731
    check(op, Mesh(x=2), P(None, None, "x"), random(2, 3, 6, 4))


SHIFTS: list[Op] = [
    lambda x: x[1:],
    lambda x: x[3:9],
    lambda x: x[2:11:2],
    lambda x: x[-5:],
    lambda x: x[: x.shape[0] // 2],
    lambda x: F.pad(x, (0, 0, 1, 1)),
    lambda x: F.pad(x, (2, 1, -3, 2)),
    lambda x: F.pad(x, (0, 0, 0, 7), value=3.0),
    lambda x: torch.roll(x, 1, 0),
    lambda x: torch.roll(x, (-7, 2), (0, 1)),
    lambda x: x.flip(0),
    lambda x: x.flip(0, 1),
    lambda x: torch.cat([x[:4] * 2, x[:-4]]),
    lambda x: torch.cat([x, x * 2, x[:5]]),
    lambda x: torch.stack(x.chunk(2)).sum(0) if x.shape[0] % 2 == 0 else x,
    lambda x: x.split(3)[1] * 2 + x.split(3)[0],
    lambda x: x.unfold(0, 3, 2),
    lambda x: F.pad(x.T, (2, 3), mode="reflect"),
    lambda x: F.pad(x.T, (2, 3), mode="replicate"),
    lambda x: torch.slice_scatter(x, x[:4] * 2, 0, 3, 7),
    lambda x: x.diff(dim=0),
]


@pytest.mark.parametrize("op", SHIFTS)
@pytest.mark.parametrize("rows", [16, 13])
def test_an_op_along_a_cut_dim_exchanges_edges_alone(op: Op, rows: int) -> None:
    compiled = check(op, Mesh(x=4), P("x"), random(rows, 6))
    assert {each.kind for each in compiled.collectives if each.phase == "forward"} <= {"collective_permute"}
    check(op, Mesh(x=2, y=2), P(("x", "y"), None), random(rows, 6))


@pytest.mark.parametrize(("rows", "ranks", "factor"), [(7, 2, 2), (8, 4, 2), (5, 4, 3), (6, 4, 2), (3, 4, 2)])
def test_rows_with_zeros_between_them_are_not_gathered(rows: int, ranks: int, factor: int) -> None:
    """Chunks of what is stuffed begin elsewhere than the chunks of the rows where sizes do not divide."""

    def stuffed(x: Tensor) -> Tensor:
        shape = [*x.shape[:2], rows * factor, x.shape[3]]
        return F.pad(x.unsqueeze(3), (0, 0, 0, factor - 1)).reshape(shape)[:, :, : (rows - 1) * factor + 1]

    x, weight = random(2, 4, rows, 6), random(8, 4, 3, 3)
    model = Model(lambda x, w: F.conv2d(stuffed(x), w, padding=1), weight)
    ends = {"x": HEIGHT, "output:*": HEIGHT}
    compiled = shardc.compile(model, Mesh(x=ranks), ends, args=(x,), train=False)
    torch.testing.assert_close(compiled.simulate(x)[0], model(x).detach(), rtol=0, atol=1e-12)
    assert {each.kind for each in compiled.collectives} == {"collective_permute"}


def test_a_pipelines_shift_is_one_collective_permute_of_a_row() -> None:
    class Shift(nn.Module):
        def forward(self, first: Tensor, state: Tensor) -> Tensor:
            return torch.cat([first.unsqueeze(0), state[:-1]])

    args = random(6), random(4, 6)
    compiled = shardc.compile(Shift(), Mesh(x=4), {"state": P("x"), "output:output": P("x")}, args=args, train=False)
    assert torch.equal(compiled.simulate(*args)[0], Shift()(*args))
    assert [(each.kind, each.wire_bytes) for each in compiled.collectives] == [("collective_permute", 6 * 8)]


class UNet(nn.Module):
    """Down, up and across: convolutions, norms over all places, a pool, two ways to enlarge."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.low = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.up = nn.Conv2d(16, 2, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.groups, self.batch = nn.GroupNorm(2, 8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        high = F.silu(self.groups(self.first(x)))
        low = F.relu(self.batch(self.low(F.max_pool2d(high, 2))))
        enlarged = self.up(low) + F.interpolate(low, scale_factor=2, mode="bilinear")
        return F.mse_loss(self.last(torch.cat([high, enlarged], 1)), y)


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [(Mesh(x=4), P(None, None, "x")), (Mesh(d=2, x=3), P("d", None, "x")), (Mesh(x=2, y=2), P(None, None, "x", "y"))],
)
def test_a_unet_over_cut_places_moves_edges_and_sums_alone(mesh: Mesh, spec: P) -> None:
    torch.manual_seed(0)
    model, x, y = UNet().double(), random(4, 3, 20, 12), random(4, 2, 20, 12)
    compiled = shardc.compile(model, mesh, {"x": spec}, args=(x, y))
    found, gradients = compiled.simulate(x, y)
    loss = model(x, y)
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-12)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), whole in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(gradients[name], whole, rtol=0, atol=1e-12)
    assert {each.kind for each in compiled.collectives} == {"collective_permute", "all_reduce"}


@pytest.mark.parametrize("spec", [P(None, "x"), P(None, None, "x"), P(None, None, None, "x"), P("x")])
def test_a_group_norm_over_what_it_averages_reduces_two_sums_a_group(spec: P) -> None:
    x, weight, bias = random(3, 8, 5, 6), random(8), random(8)
    compiled = check(lambda x, w, b: F.group_norm(x, 2, w, b), Mesh(x=4), spec, x, weight, bias)
    moved = [each.bytes for each in compiled.collectives]  # of x 5760 bytes; gradients of rows and channels go together
    assert sum(moved) <= 8 * 8 * 8, moved
    check(lambda x: F.group_norm(x, 4), Mesh(x=4), spec, x)
    check(lambda x: F.group_norm(x.transpose(2, 3) * 2, 4), Mesh(x=4), spec, x)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "constant"])
@pytest.mark.parametrize("pads", [(2, 1, 0, 0), (0, 0, 1, 2), (2, 2, 2, 2)], ids=str)
def test_a_pad_of_one_dim_leaves_the_other_cut(mode: str, pads: tuple[int, ...]) -> None:
    """An op that is taken apart along one dim is not found again along it."""
    moves = EDGES if any(pads[2:]) else ()
    check(lambda x: F.pad(x, pads, mode=mode) * 2, Mesh(x=3), HEIGHT, random(2, 3, 9, 7), moves=moves)


@pytest.mark.parametrize(("size", "dim"), [(16, 0), (13, 0), (13, -1), (5, 1)])
def test_a_running_sum_along_a_cut_dim_moves_a_total_of_each_rank(size: int, dim: int) -> None:
    shape = [3, 3, 3]
    shape[dim] = size
    spec = P(*("x" if i == dim % 3 else None for i in range(3)))
    found = check(lambda x: x.cumsum(dim), Mesh(x=4), spec, random(*shape), moves=["reduce_scatter"])
    assert [each.bytes for each in found.collectives] == [4 * 9 * 8] * 2, "forward and back"
    assert str(found.shardings["output"]) == str(found.shardings["x"])


@pytest.mark.parametrize(("size", "dim"), [(160, 0), (130, 0), (130, -1)])
def test_a_running_logsumexp_along_a_cut_dim_moves_a_total_of_each_rank(size: int, dim: int) -> None:
    """As scans of states in the log space do: forward, and back for gradients of either sign."""
    shape = [3, 3, 3]
    shape[dim] = size
    spec = P(*("x" if i == dim % 3 else None for i in range(3)))
    found = check(lambda x: x.logcumsumexp(dim), Mesh(x=4), spec, random(*shape), moves=["all_to_all"])
    assert max(each.bytes for each in found.collectives) == 4 * 9 * 8 and len(found.collectives) == 3
    assert str(found.shardings["output"]) == str(found.shardings["x"])


def test_a_running_logsumexp_of_almost_nothing_is_that_of_one_device() -> None:
    x = random(13, 3)
    x[:7] = -1e300
    check(lambda x: x.logcumsumexp(0).exp(), Mesh(x=4), P("x"), x)


def test_a_scan_in_log_space_sends_states_alone() -> None:
    """As that of a minimal GRU (Feng et al. 2024): what is sent does not grow with the length."""

    def states(x: Tensor, w: Tensor) -> Tensor:
        gate = x @ w
        kept = -F.softplus(gate).cumsum(0)
        return (kept + (F.logsigmoid(gate) + x.abs().log() - kept).logcumsumexp(0)).exp()

    sent = {
        sum(each.wire_bytes for each in check(states, Mesh(x=4), P("x"), random(size, 3), random(3, 3)).collectives)
        for size in (64, 96)
    }
    assert len(sent) == 1


def test_the_gradient_of_a_parameter_may_come_through_windows() -> None:
    check(lambda x, w: x * w.cumsum(0), Mesh(x=4), P("x"), random(13, 3), random(13, 3))
    check(lambda x, w: x * w.roll(2, 0), Mesh(x=4), P("x"), random(13, 3), random(13, 3))
