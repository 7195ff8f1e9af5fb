"""ZeRO: parameters, gradients and optimizer state are stored in shards; the numbers are those of one device."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel_models import DATA, MESHES, MLP, batch, doubles, whole

import shardc
from shardc.language.errors import ShardingError
from shardc.language.mesh import Mesh
from shardc.language.sharding import DimSharding, Sharding, TensorType
from shardc.options import Zero
from shardc.passes.reshard.store import stored_sharding
from shardc.runtime.comm.distributed import make_device_mesh

STAGES = (1, 2, 3)


def kinds(compiled):
    return Counter((found.phase, found.kind, *found.axes) for found in compiled.collectives)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MESHES)
def test_gradients_are_those_of_one_device(name, stage):
    mesh, annotations = MESHES[name]
    model, (x, y) = MLP().double(), [tensor.double() for tensor in batch(0)]
    compiled = shardc.compile(model, mesh, annotations, args=(x, y), zero=Zero(stage=stage))
    loss, gradients = compiled.simulate(x, y)
    expected = model(x, y)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    for each, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[each], parameter.grad, atol=1e-12, rtol=0)


def test_stages_1_and_2_gather_once_a_step_and_3_where_a_parameter_is_used():
    for stage in STAGES:
        compiled = shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), zero=Zero(stage=stage))
        gathers = {(phase, kind): n for (phase, kind, _), n in kinds(compiled).items() if kind == "all_gather"}
        if stage == 3:  # the backward needs one weight again: that of the second layer, for the first one's gradient
            assert gathers == {("forward", "all_gather"): 2, ("backward", "all_gather"): 1}
        else:
            assert gathers == {("update", "all_gather"): 1}
        assert kinds(compiled)["backward", "reduce_scatter", "dp"] == 1
        assert not kinds(compiled)["backward", "all_reduce", "dp"]


def test_every_parameter_is_stored_in_shards_and_computed_on_as_without_zero():
    for mesh, annotations in MESHES.values():
        plain = shardc.compile(MLP(), mesh, annotations, args=batch(0))
        stored = shardc.compile(MLP(), mesh, annotations, args=batch(0), zero=Zero())
        for name in dict(MLP().named_parameters()):
            assert "dp" in str(stored.shardings[name])
            assert stored.program.computed[name] == plain.shardings[name]


@given(st.lists(st.integers(1, 9), max_size=3), st.data())
def test_a_stored_shard_is_no_larger_and_a_dtensor_can_hold_it(shape, data):
    mesh = Mesh(dp=2, tp=3)
    dims = [DimSharding()] * len(shape)
    if shape and data.draw(st.booleans()):
        dims[data.draw(st.integers(0, len(shape) - 1))] = DimSharding((mesh.axis("tp"),))
    lies, type_ = Sharding(mesh, tuple(dims)), TensorType(tuple(shape), torch.float32)
    stored = stored_sharding(type_, lies, (mesh.axis("dp"),))
    assert stored.storable(type_.shape) == stored
    sizes = [TensorType(each.local_shape(type_.shape), torch.float32).numel for each in (stored, lies)]
    assert sizes[0] < sizes[1] or stored == lies
    if any(size >= 2 and not cut.axes for size, cut in zip(shape, dims, strict=True)):
        assert stored != lies


def test_an_unknown_axis_or_stage_is_named():
    with pytest.raises(ShardingError, match=r"Zero\('db'\)(.|\n)*did you mean dp"):
        shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), zero=Zero(axis="db"))
    with pytest.raises(ShardingError, match="stage=4(.|\n)*say 1, 2 or 3"):
        Zero(stage=4)


@pytest.mark.parametrize("stage", STAGES)
def test_strict_allows_what_zero_gathers(stage):
    shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), zero=Zero(stage=stage), strict=True)


@pytest.mark.parametrize(("stage", "parameters", "gradients"), [(1, 280, 280), (2, 280, 70), (3, 70, 70)])
def test_memory_counts_what_is_kept_between_steps(stage, parameters, gradients):
    """280 numbers in all: 8 to 16 to 8, with biases; optimizer state is that of a piece."""
    memory = shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), zero=Zero(stage=stage)).memory
    found = memory["parameters"], memory["gradients"], memory["optimizer"]
    assert found == (4 * parameters, 4 * gradients, 2 * 4 * 70)


class Lamb(torch.optim.Optimizer):
    """A user's own optimizer: layer-wise scaled Adam, by plain tensor ops."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            first = state["first"] = 0.9 * state.get("first", torch.zeros_like(parameter)) + 0.1 * parameter.grad
            second = 0.99 * state.get("second", torch.zeros_like(parameter)) + 0.01 * parameter.grad**2
            state["second"] = second
            update = first / (second.sqrt() + 1e-6)
            parameter -= self.param_groups[0]["lr"] * parameter.norm() / update.norm() * update


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "lamb": lambda parameters: Lamb(parameters, lr=0.01),
}


def run_training(mesh, annotations, stage, optimizer):
    """Three steps of two microbatches, one evaluation after each; how often gathers ran between them."""
    torch.manual_seed(0)
    alone = MLP().double()
    parallel = shardc.parallelize(alone, make_device_mesh(mesh), annotations, zero=Zero(stage=stage))
    models = alone, parallel
    steppers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(stepper, 1, 0.5) for stepper in steppers]
    traffic, gathers = parallel.shardc.conversion.comm.traffic[0], []
    for step in range(3):
        traffic.clear()
        losses = [[model(*doubles(2 * step + i)) for i in range(2)] for model in models]
        norms = []
        for model, stepper, scheduler, mine in zip(models, steppers, schedulers, losses, strict=True):
            for loss in mine:
                loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            stepper.step()
            scheduler.step()
            stepper.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(whole(norms[1]), norms[0], atol=1e-12, rtol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(parallel(*doubles(9)), alone(*doubles(9)), atol=1e-12, rtol=0)
        gathers.append(traffic.calls["all_gather"])
    for theirs, mine in zip(alone.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, atol=1e-12, rtol=0)
    return gathers


CASES = [
    pytest.param(name, stage, marks=pytest.mark.sweep if stage < 3 else []) for name in OPTIMIZERS for stage in STAGES
]


@pytest.mark.parametrize(("optimizer", "stage"), CASES)
def test_training_equals_one_device_and_gathers_once_a_step(gloo, stage, optimizer):
    for mesh, annotations in MESHES.values():
        counted = gloo.run(run_training, mesh, annotations, stage, optimizer)
        assert all(each == counted[0] for each in counted)
        if stage < 3:  # four parameters, in one bucket: before the first forward, and after each step
            assert counted[0] == [2, 1, 1]
