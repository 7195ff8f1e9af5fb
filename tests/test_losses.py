"""A mean loss whose rows are cut reduces one number: canonicalize makes it a sum and a division."""

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


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_of_cut_rows_equals_one_device_and_reduces_one_number(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, args = Model(loss), (torch.randn(8, 6).double(), torch.rand(8, 5).double())
    program = shardc.compile(model, Mesh(dp=4), {"x": P("dp"), "y": P("dp")}, args=args)
    outcome, gradients = program.simulate(*args)
    expected = model(*args)
    expected.backward()
    torch.testing.assert_close(outcome, expected, rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)
    moved = [(each.kind, each.local_shape_out) for each in program.collectives]
    assert moved == [("all_reduce", ()), ("all_reduce", (5, 6)), ("all_reduce", (5,))]
