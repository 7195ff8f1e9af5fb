"""A mean loss whose rows are cut reduces one number: canonicalize makes it a sum and a division."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh, P

WEIGHT = torch.arange(1.0, 6.0, dtype=torch.float64)
LOSSES = {
    "mse": F.mse_loss,
    "mse sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.1),
    "cross entropy of probabilities": F.binary_cross_entropy,
    "weighted": lambda x, y: F.binary_cross_entropy(x, y, weight=WEIGHT),
    "with logits": F.binary_cross_entropy_with_logits,
    "with logits, weighted": lambda x, y: F.binary_cross_entropy_with_logits(x, y, WEIGHT, pos_weight=WEIGHT),
}


class Model(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(6, 5, dtype=torch.float64), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x).sigmoid(), y)


def assert_equal_to_eager(program: shardc.Compiled, args: tuple[Tensor, ...]) -> None:
    outcome, gradients = program.simulate(*args)
    expected = program.model(*args)
    expected.backward()
    torch.testing.assert_close(outcome, expected, rtol=0, atol=1e-12)
    for name, parameter in program.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_of_cut_rows_equals_one_device_and_reduces_one_number(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, args = Model(loss), (torch.randn(8, 6).double(), torch.rand(8, 5).double())
    program = shardc.compile(model, Mesh(dp=4), {"x": P("dp"), "y": P("dp")}, args=args)
    assert_equal_to_eager(program, args)
    moved = [(each.kind, each.local_shape_out) for each in program.collectives]
    assert moved == [("all_reduce", ()), ("all_reduce", (5 * 6 + 5,))]


CLASS_WEIGHT = torch.arange(1.0, 9.0, dtype=torch.float64)
CLASS_LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "weighted": {"weight": CLASS_WEIGHT},
    "weighted sum": {"weight": CLASS_WEIGHT, "reduction": "sum"},
    "ignored": {"ignore_index": 3},
    "ignored and weighted": {"ignore_index": 3, "weight": CLASS_WEIGHT},
    "smoothed": {"label_smoothing": 0.1},
}


class Classifier(nn.Module):
    """Logits with the classes last, or second as images have them, or alone."""

    def __init__(self, options: dict[str, object], at: int) -> None:
        super().__init__()
        self.linear, self.options, self.at = nn.Linear(6, 8, dtype=torch.float64), options, at

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.linear(x)
        if self.at == 2:
            return F.cross_entropy(logits.transpose(1, 2), y, **self.options)  # type: ignore[arg-type]
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), **self.options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"weight": CLASS_WEIGHT}], ids=["mean", "weighted"])
def test_a_batch_of_which_no_target_counts_has_no_gradient_though_its_mean_is_no_number(
    options: dict[str, object],
) -> None:
    """As on one device, where training goes on."""
    model = Classifier({"ignore_index": 3, **options}, 1)
    args = torch.randn(4, 6, 6).double(), torch.full((4, 6), 3)
    annotations = {"x": P("dp"), "y": P("dp"), "linear.weight": P("tp")}
    program = shardc.compile(model, Mesh(dp=2, tp=2), annotations, args=args)
    loss, gradients = program.simulate(*args)
    assert loss.isnan() and model(*args).isnan()
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("options", CLASS_LOSSES.values(), ids=CLASS_LOSSES)
@pytest.mark.parametrize("at", [1, 2], ids=["rows of classes", "classes second"])
def test_cross_entropy_over_cut_rows_and_classes_equals_one_device(options: dict[str, object], at: int) -> None:
    torch.manual_seed(0)
    model, args = Classifier(options, at), (torch.randn(4, 6, 6).double(), torch.randint(8, (4, 6)))
    annotations = {"x": P("dp"), "y": P("dp"), "linear.weight": P("tp")}
    program = shardc.compile(model, Mesh(dp=2, tp=2), annotations, args=args)
    assert_equal_to_eager(program, args)
    assert not any(program.at("propagate").rule(node).is_fallback for node in program.at("propagate").calls)
    assert {each.kind for each in program.collectives} == {"all_reduce"}, "no logits are gathered"


class Likelihoods(nn.Module):
    """Logarithms of a softmax, and the cross entropy of some targets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.linear(x).log_softmax(-1)
        return found, F.nll_loss(found.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_gradient_of_a_cross_entropy_is_added_to_another_in_their_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x, y = Likelihoods().to(dtype), torch.randn(4, 2, 6).to(dtype), torch.arange(8).view(4, 2) % 5
    parallel = shardc.parallelize(copy.deepcopy(model), Mesh(dp=4), {"x": P("dp")}, differentiable=("0", "1"))
    for each in (model, parallel):
        found, loss = each(x, y)
        (loss + found.mean()).backward()
    for ours, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-2 if dtype == torch.bfloat16 else 1e-12, rtol=0)


def test_no_value_as_large_as_logits_of_two_bytes_has_four() -> None:
    model, args = Classifier({}, 1).bfloat16(), (torch.randn(8, 4, 6).bfloat16(), torch.randint(8, (8, 4)))
    program = shardc.compile(model, Mesh(dp=4), {"x": P("dp"), "y": P("dp")}, args=args).program
    found = [type_ for node in program.calls for type_ in program.types(node) if type_ and type_.shape == (8, 8)]
    assert {type_.dtype for type_ in found} == {torch.bfloat16}


@pytest.mark.parametrize("mesh", [Mesh(dp=4), Mesh(dp=2, tp=2)], ids=str)
def test_a_loss_of_logarithms_in_two_bytes_of_logits_in_four_equals_one_device(mesh: Mesh) -> None:
    """As fairseq writes it."""

    class Cast(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.nll_loss(super().forward(x).float().log_softmax(-1).type_as(x), y)

    torch.manual_seed(0)
    model, x, y = Cast(6, 8).bfloat16(), torch.randn(32, 6).bfloat16(), torch.randint(8, (32,))
    parallel = shardc.parallelize(copy.deepcopy(model), mesh, {"x": P("dp"), "y": P("dp")})
    losses = [each(x, y) for each in (model, parallel)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for ours, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-3, rtol=2e-2)
