"""Gradients reach parameters and optimizers as autograd and torch.optim define it."""

import pytest
import torch
from parallel_models import MEGATRON, MLP, batch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardc
from shardc.language.mesh import Mesh
from shardc.runtime.comm.distributed import make_device_mesh

MESH = Mesh(dp=2, tp=2)


def pair():
    torch.manual_seed(0)
    alone = MLP().double()
    return alone, shardc.parallelize(alone, make_device_mesh(MESH), MEGATRON)


def loss_of(model, seed=0):
    return model(*(tensor.double() for tensor in batch(seed)))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(parallel, alone):
    for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, atol=1e-12, rtol=0)


def run_hooks():
    """What each kind of hook was told of, in three backwards; a node's hook is found though no tensor has it."""
    told = []
    alone, parallel = pair()
    loss_of(parallel)  # parameters take their shardings
    for model in (alone, parallel):
        first, second, third, _ = model.parameters()
        first.register_hook(lambda gradient: gradient * 2)
        second.register_post_accumulate_grad_hook(lambda leaf: told.append(whole(leaf.grad).sum().item()))
        node = third.view_as(third).grad_fn.next_functions[0][0]
        node.register_prehook(lambda gradients: tuple(gradient * 3 for gradient in gradients))
        for step in range(3):
            loss_of(model, step).backward()
        model.node = node
    assert_same_gradients(parallel, alone)
    assert told[:3] == pytest.approx(told[3:], abs=1e-12)


def run_graphs():
    """A parameter of two calls in one backward, gradients kept or dropped between; a graph of gradients is refused."""
    alone, parallel = pair()
    for model in (alone, parallel):
        (loss_of(model, 0) + loss_of(model, 1)).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        before = [whole(gradient).clone() for gradient in kept]
        model.zero_grad()
        loss = loss_of(model, 2)
        loss.backward(retain_graph=True)
        loss.backward()
        assert all(torch.equal(whole(gradient), then) for gradient, then in zip(kept, before, strict=True))
    assert_same_gradients(parallel, alone)
    parallel.zero_grad()
    loss = loss_of(parallel)
    gradient, *_ = torch.autograd.grad(loss, list(parallel.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match=r"has no gradient itself\n  leave create_graph out"):
        (loss + gradient.square().sum().full_tensor()).backward()
    asked = list(parallel.parameters())[:2]
    parallel.zero_grad()
    found = torch.autograd.grad(loss_of(parallel), asked)
    loss_of(parallel).backward(inputs=asked[:1])
    assert torch.equal(whole(found[0]), whole(asked[0].grad))
    assert asked[1].grad is None


def test_hooks_see_every_gradient(gloo):
    gloo.run(run_hooks)


def test_gradients_accumulate_and_can_be_requested_as_with_autograd(gloo):
    gloo.run(run_graphs)


STEPPERS = {  # torch has fused kernels for DTensors of these two
    "adam": lambda leaves: torch.optim.Adam(leaves, amsgrad=True, fused=True),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=torch.tensor(0.1), fused=True),
}


def leaf_of(value: Tensor, mesh, placement) -> DTensor:
    return distribute_tensor(value, mesh, [placement]).detach().requires_grad_()


def run_fused(name, gradients):
    """Steps of leaves whose gradients lie as they do, or otherwise, as DTensors of one device's values."""
    torch.manual_seed(1)
    mesh = make_device_mesh(Mesh(tp=4))
    values = [torch.randn(8, 4, dtype=torch.float64) for _ in range(4)]
    alone = [value.clone().requires_grad_() for value in values[:2]]
    leaves = [leaf_of(value, mesh, lies) for value, lies in zip(values, (Shard(0), Replicate()), strict=False)]
    steppers = [STEPPERS[name](list(tensors)) for tensors in (alone, leaves)]
    for step in range(3):
        for mine, theirs, value, lies in zip(leaves, alone, values[2:], gradients, strict=True):
            theirs.grad = value * (step + 1)
            mine.grad = distribute_tensor(theirs.grad, mesh, [lies])
        for stepper in steppers:
            stepper.step()
    for mine, theirs in zip(leaves, alone, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", STEPPERS)
def test_a_fused_step_of_dtensors_is_that_of_one_device(gloo, name):
    gloo.run(run_fused, name, (Shard(0), Replicate()))


def test_a_fused_step_with_differently_sharded_gradients_is_left_to_dtensor(gloo):
    gloo.run(run_fused, "adamw", (Replicate(), Shard(1)))


def test_a_model_trains_by_fused_steps_like_one_device(gloo):
    gloo.run(run_model)


def run_model():
    alone, parallel = pair()
    for model in (alone, parallel):
        stepper = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
        for step in range(3):
            stepper.zero_grad()
            loss_of(model, step).backward()
            stepper.step()
    for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, atol=1e-9, rtol=0)
