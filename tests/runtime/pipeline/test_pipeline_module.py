"""The module of a pipeline on gloo: a rank has the parameters of its stages; norms, scalers and state span all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardc
from shardc import Mesh
from shardc.options import Pipeline
from shardc.program.stages import stages_of
from shardc.runtime.comm.distributed import make_device_mesh


def model() -> nn.Module:
    """Blocks between a layer and itself again: a weight that the first and the last stage hold."""
    torch.manual_seed(0)
    first = nn.Linear(6, 6, bias=False)
    blocks = (each for _ in range(4) for each in (nn.Linear(6, 6), nn.Tanh()))
    return Loss(nn.Sequential(first, *blocks, first)).double()


class Loss(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def data() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()


def new_pipeline(schedule: str = "1f1b") -> tuple[Any, Any]:
    """The model on all ranks in a pipeline, and itself."""
    mesh = make_device_mesh(Mesh(pp=4))
    pipeline = Pipeline(microbatches=4, schedule=schedule, cuts=("layers.3", "layers.5", "layers.7"))
    return shardc.parallelize(model(), mesh, pipeline=pipeline, args=(data(),)), model()


def run_training() -> tuple[list[str], float]:
    piped, whole = new_pipeline()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (piped, whole)]
    worst = 0.0
    for _ in range(5):
        losses = [each(data()) for each in (piped, whole)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        norms = [piped.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(whole.parameters(), 0.01)]
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, abs(float(losses[0] - losses[1])), abs(float(norms[0] - norms[1])))
    return [name for name, _ in piped.named_parameters()], worst


def test_a_rank_holds_its_stages_parameters_and_clips_by_the_norm_of_all(gloo):
    names, worst = zip(*gloo.run(run_training), strict=True)
    assert max(worst) < 1e-12
    shared = "layers.0.weight"
    assert [shared in each for each in names] == [True, False, False, True]
    assert sorted({name for each in names for name in each}) == sorted(name for name, _ in model().named_parameters())
    assert sum(map(len, names)) == len(list(model().parameters())) + 1


def run_state() -> list[float]:
    piped, whole = new_pipeline("gpipe")
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(1.5)
        expected = float(whole(data()))
        piped.load_state_dict(whole.state_dict())  # the whole model's
        found = [float(piped(data())), float(copy.deepcopy(piped)(data()))]
        mine = {name: value.clone() for name, value in piped.state_dict().items()}
        for parameter in piped.parameters():
            parameter.zero_()
        piped.load_state_dict(mine)  # this rank's
        found.append(float(piped(data())))
    with pytest.raises(RuntimeError, match="which the model does not have"):
        piped.load_state_dict({**mine, "none": torch.ones(1)})
    return [abs(each - expected) for each in found]


def test_state_is_loaded_from_the_whole_models_and_from_ones_own(gloo):
    assert max(worst for each in gloo.run(run_state) for worst in each) < 1e-12


def run_three_backwards() -> float:
    piped, whole = new_pipeline()
    for each in (piped, whole):
        loss = each(data())
        for i in range(3):
            loss.backward(retain_graph=i < 2)
    names = dict(whole.named_parameters())
    return max(float((each.grad.full_tensor() - names[n].grad).abs().max()) for n, each in piped.named_parameters())


def test_three_backwards_through_one_step_add_up(gloo):
    assert max(gloo.run(run_three_backwards)) < 1e-12


def run_overflow() -> tuple[float, bool]:
    piped, _ = new_pipeline()
    optimizer, scaler = torch.optim.SGD(piped.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(piped(data())).backward()
    parameters = list(piped.parameters())
    if dist.get_rank() == 3:
        parameters[0].grad.fill_(float("inf"))
    before = [each.to_local().clone() for each in parameters]
    scaler.step(optimizer)
    scaler.update()
    after = [each.to_local() for each in parameters]
    return scaler.get_scale(), all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_an_overflow_in_one_stage_makes_all_skip(gloo):
    assert gloo.run(run_overflow) == [(512.0, True)] * 4


def run_frozen(has_overflow: bool) -> tuple[float, list[bool], float]:
    """The scale after a step, which of this rank's parameters moved, and how far they are off one device."""
    frozen, whole = model(), model()
    for each in (frozen, whole):
        for layer in each.layers[:3]:  # the first stage, but for the weight that the last one holds too
            layer.requires_grad_(False)
    mesh = make_device_mesh(Mesh(pp=4))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pipeline = Pipeline(microbatches=4, cuts=("layers.3", "layers.5", "layers.7"), loss_scale=scaler)
    piped = shardc.parallelize(frozen, mesh, pipeline=pipeline, args=(data(),))
    before = {name: each.detach().to_local().clone() for name, each in piped.named_parameters()}
    optimizer = torch.optim.SGD(piped.parameters(), lr=0.1)
    scaler.scale(piped(data())).backward()
    if has_overflow and dist.get_rank() == 2:
        next(each for each in piped.parameters() if each.grad is not None).grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    after = {name: each.detach().to_local() for name, each in piped.named_parameters()}
    whole(data()).backward()
    torch.optim.SGD([each for each in whole.parameters() if each.requires_grad], lr=0.1).step()
    expected = dict(whole.named_parameters())
    off = max(float((after[name] - expected[name].detach()).abs().max()) for name in after)
    return scaler.get_scale(), [not torch.equal(before[name], after[name]) for name in after], off


def test_a_scaler_steps_and_skips_with_a_stage_that_has_no_gradient(gloo):
    results = gloo.run(run_frozen, False)
    assert all(scale == 1024.0 and off < 1e-12 for scale, _, off in results)
    assert not any(results[0][1]) and all(any(moved) for _, moved, _ in results[1:3])
    assert [(scale, any(moved)) for scale, moved, _ in gloo.run(run_frozen, True)] == [(512.0, False)] * 4


class Long(nn.Module):
    """Layers whose work grows with the square of a row's length, and layers whose work grows with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.squares, self.lines = (nn.ModuleList(nn.Linear(6, 6) for _ in range(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.squares:
            x = layer(torch.softmax(x @ x.transpose(1, 2), -1) @ x)
        for layer in self.lines:
            x = layer(x).tanh()
        return x.square().mean()


def run_longer() -> tuple[list[str], float]:
    """A step of short rows, an evaluation and a step of long ones, by whose work the stages would be others."""
    model = Long().double()
    mesh = make_device_mesh(Mesh(dp=2, pp=2))
    pipeline = Pipeline(microbatches=2, balance="flops")
    piped, whole = shardc.parallelize(model, mesh, pipeline=pipeline), copy.deepcopy(model)
    worst = 0.0
    for length, trains in ((2, True), (64, False), (64, True)):
        x = torch.randn(4, length, 6, generator=torch.Generator().manual_seed(1)).double()
        with torch.set_grad_enabled(trains):
            losses = [each(x) for each in (piped, whole)]
        worst = max(worst, abs(float(losses[0] - losses[1])))
        for loss in losses if trains else ():
            loss.backward()
    names = dict(whole.named_parameters())
    far = (each.grad.full_tensor() - names[name].grad for name, each in piped.named_parameters())
    return [name for name, _ in piped.named_parameters()], max(worst, *(float(each.abs().max()) for each in far))


def test_parameters_stay_where_they_are_whatever_a_later_call_weighs(gloo):
    cuts = [stages_of(shardc.compile(
        Long(), Mesh(pp=2), args=(torch.ones(4, length, 6),), pipeline=Pipeline(microbatches=2, balance="flops")
    ).program).holders for length in (2, 64)]  # fmt: skip
    assert cuts[0] != cuts[1]
    for rank, (names, worst) in enumerate(gloo.run(run_longer)):
        assert worst < 1e-12 and set(names) == {name for name, held in cuts[0].items() if held == {rank % 2}}


def run_norm() -> tuple[float, float]:
    """The norm of gradients of which the first stage has none, and on one device."""
    frozen = model()
    for layer in frozen.layers[:3]:
        layer.requires_grad_(False)
    mesh = make_device_mesh(Mesh(pp=4))
    pipeline = Pipeline(microbatches=4, cuts=("layers.3", "layers.5", "layers.7"))
    piped, whole = shardc.parallelize(frozen, mesh, pipeline=pipeline), copy.deepcopy(frozen)
    for each in (piped, whole):
        each(data()).backward()
    return float(piped.clip_grad_norm_(0.01)), float(nn.utils.clip_grad_norm_(whole.parameters(), 0.01))


def test_the_norm_is_that_of_all_stages_where_one_has_no_gradient(gloo):
    for norm, expected in gloo.run(run_norm):
        assert abs(norm - expected) < 1e-12
