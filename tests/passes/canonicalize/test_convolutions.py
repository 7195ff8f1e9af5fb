"""Convolutions as a pair of tensor parallelism: channels cut by one are summed over by the next, norms between too."""

import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.verify import difference


class Pair(nn.Module):
    """Two convolutions with biases, with a norm of 4 groups between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu()).square().mean()


def test_no_channel_is_gathered_between_two_convolutions_and_a_bias_is_added_once():
    model, x = Pair(), torch.randn(4, 3, 8, 8)
    program = shardc.compile(model, Mesh(dp=2, tp=2), {"x": P("dp"), "up.weight": P("tp")}, args=(x,))
    over_tp = [(found.kind, found.phase, found.local_shape_in) for found in program.collectives if "tp" in found.axes]
    assert over_tp == [("all_reduce", "forward", (2, 5, 4, 4))]
    assert str(program.shardings["down.weight"]) == "[_, _@tp, _, _]"
    loss, gradients = program.simulate(x)
    expected = model(x)
    expected.backward()
    assert difference(loss, expected.detach()) < 1e-6
    for name, parameter in model.named_parameters():
        assert difference(gradients[name], parameter.grad) < 1e-6, name
