"""A loss is a plain tensor with its value, before and after backward: nothing needs to wait for it."""

import pytest
import torch
from parallel_models import DATA, MLP, doubles
from torch import Tensor

import shardc
from shardc.language.mesh import Mesh
from shardc.runtime.comm.distributed import make_device_mesh


def train(zero):
    """Losses of steps and microbatches, read by ``torch.tensor``, which takes their memory as it is."""
    torch.manual_seed(0)
    alone = MLP().double()
    parallel = shardc.parallelize(alone, make_device_mesh(Mesh(dp=4)), DATA, zero=zero)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, parallel)]
    for microbatches in (1, 1, 3, 3, 2, 1):
        losses = []
        for model, optimizer in zip((alone, parallel), optimizers, strict=True):
            before, after = [], []
            for i in range(microbatches):
                loss = model(*doubles(i))
                assert type(loss) is Tensor
                before.append(torch.tensor([loss, loss / microbatches]))
                (loss / microbatches).backward()
                after.append(torch.tensor([loss, loss.detach() / microbatches]))
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(torch.stack(before), torch.stack(after))
            losses.append(torch.stack(before))
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    with torch.no_grad():
        assert type(parallel(*doubles(0))) is Tensor


@pytest.mark.parametrize("zero", [None, shardc.Zero(stage=1), shardc.Zero(stage=2), shardc.Zero(stage=3)], ids=str)
def test_a_loss_is_a_plain_tensor_that_has_its_value_when_the_call_returns(gloo, zero):
    gloo.run(train, zero)
