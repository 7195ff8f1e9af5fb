"""The parallel module trains like the user's own: on virtual ranks, and on gloo with DTensor parameters."""

import copy
import gc
import itertools
import re
import warnings
import weakref

import pytest
import torch
from gloo_pool import ByPath
from one_device import assert_same, assert_same_state
from parallel_models import (
    FSDP,
    MEGATRON,
    MLP,
    OPTIMIZERS,
    TIED,
    Detached,
    PerRow,
    Shared,
    Summed,
    TiedModel,
    batch,
    doubles,
    ids,
    whole,
)
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.profiler import ProfilerActivity, profile

import shardc
from shardc.language.errors import ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.program.program import SMALL_OUTPUT
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.comm.launch import launch
from shardc.runtime.module.conversion import shard_batch
from shardc.runtime.tensor.global_tensor import GlobalTensor

MESH = Mesh(dp=2, tp=2)
MEGATRON_ALONE = {"down.weight": P(None, "tp")}


def models(model=MLP, annotations=MEGATRON, mesh=MESH, **options):
    """The user's model in float64, and the same one on the mesh."""
    torch.manual_seed(0)
    alone = model().double()
    return alone, shardc.parallelize(alone, mesh, annotations, **options)


def train(parallel, alone, make_optimizer, steps=4, clip=None):
    optimizers = make_optimizer(parallel.parameters()), make_optimizer(alone.parameters())
    for step in range(steps):
        losses = [model(*doubles(step)) for model in (parallel, alone)]
        assert_same(*losses)
        for loss, model, optimizer in zip(losses, (parallel, alone), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            if clip:
                assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
            optimizer.step()
    assert_same_state(parallel, alone)


class TestOnVirtualRanks:
    @pytest.mark.parametrize("annotations", [MEGATRON, FSDP])
    @pytest.mark.parametrize("optimizer", ["adamw foreach", "sgd"])
    def test_it_trains_like_one_device(self, annotations, optimizer):
        alone, parallel = models(annotations=annotations)
        train(parallel, alone, OPTIMIZERS[optimizer])

    def test_the_users_model_is_left_as_it_was(self):
        alone, parallel = models()
        before = copy.deepcopy(alone.state_dict())
        parallel(*doubles(0)).backward()
        OPTIMIZERS["sgd"](parallel.parameters()).step()
        assert all(torch.equal(tensor, before[name]) for name, tensor in alone.state_dict().items())
        assert all(parameter.grad is None for parameter in alone.parameters())

    def test_names_modules_and_attributes_are_those_of_the_model(self):
        alone, parallel = models(TiedModel, TIED)
        assert [name for name, _ in parallel.named_modules()] == [name for name, _ in alone.named_modules()]
        assert parallel.head.weight is parallel.embedding.weight
        assert not parallel.scale.requires_grad
        assert isinstance(parallel.dropout, nn.Dropout) and parallel.fused.out_features == 24
        with pytest.raises(AttributeError, match="no attribute 'absent'"):
            _ = parallel.absent

    def test_buffers_are_written_back_and_frozen_parameters_get_no_gradient(self):
        alone, parallel = models(TiedModel, TIED)
        for model in (alone, parallel):
            model.dropout.p = 0.0
        for step in range(3):
            outputs = [model(**ids(step)) for model in (parallel, alone)]
            assert_same(outputs[0].loss, outputs[1].loss)
            assert type(outputs[0]).__name__ == "Output" and outputs[0].count == 3
            assert_same(outputs[0].logits, outputs[1].logits)
            for output in outputs:
                output.loss.backward()
        assert parallel.calls == 3 and parallel.scale.grad is None
        assert_same(parallel.embedding.weight.grad, alone.embedding.weight.grad)
        assert_same_state(parallel, alone)

    def test_gradients_accumulate_like_torchs(self):
        alone, parallel = models()
        for model in (alone, parallel):
            model(*doubles(0)).backward()
            loss = model(*doubles(1))
            (2 * loss).backward(retain_graph=True)
            loss.backward()
        assert_same(parallel.up.weight.grad, alone.up.weight.grad)

    def test_a_second_backward_needs_retain_graph(self):
        _, parallel = models()
        loss = parallel(*doubles(0))
        loss.backward()
        with pytest.raises(RuntimeError, match="say retain_graph=True"):
            loss.backward()

    def test_an_optimizer_step_before_the_backward_is_refused(self):
        _, parallel = models()
        first, second = parallel(*doubles(0)), parallel(*doubles(1))
        first.backward()
        OPTIMIZERS["sgd"](parallel.parameters()).step()
        with pytest.raises(RuntimeError, match="changed in place"):
            second.backward()

    def test_a_forward_without_a_backward_is_forgotten(self):
        alone, parallel = models()
        parallel(*doubles(0))
        train(parallel, alone, OPTIMIZERS["sgd"], steps=1)

    def test_a_forward_without_a_backward_frees_what_it_saved(self):
        _, parallel = models()
        loss = parallel(*doubles(0))
        saved = weakref.ref(next(value for value in loss.grad_fn.saved.envs[0] if isinstance(value, torch.Tensor)))
        gc.disable()
        del loss
        gc.enable()
        assert saved() is None

    def test_autocast_is_part_of_what_is_compiled(self):
        alone, _ = models()
        alone = alone.float()
        parallel = shardc.parallelize(alone, MESH, MEGATRON)
        plain = parallel(*batch(0))
        gradients = []
        for model in (parallel, alone):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*batch(0))
            assert loss.item() != plain.item()
            loss.backward()
            gradients.append(model.up.weight.grad)
        torch.testing.assert_close(*gradients, atol=1e-2, rtol=1e-2)
        assert parallel(*batch(0)).item() == plain.item()

    def test_inference_mode_runs_the_forward(self):
        alone, parallel = models(TiedModel, TIED)
        for model in (alone, parallel):
            model.dropout.p = 0.0
            with torch.inference_mode():
                model(**ids(0))
        assert_same_state(parallel, alone)

    def test_inputs_that_require_grad_get_their_gradients(self):
        alone, parallel = models()
        gradients = []
        for model in (parallel, alone):
            x, y = doubles(0)
            x.requires_grad_()
            model(x * 2, y).backward()
            gradients.append(x.grad)
        assert_same(*gradients)

    def test_every_output_without_a_scalar_is_differentiable(self):
        alone, parallel = models(Summed, {"x": P("dp")})
        for model in (parallel, alone):
            y, _ = model(doubles(0)[0])
            y.square().sum().backward()
            _, z = model(doubles(1)[0])
            z.sum().backward()
        assert_same(parallel.linear.weight.grad, alone.linear.weight.grad)

    def test_a_gradient_that_reaches_logits_is_refused_unless_asked_for(self):
        _, parallel = models(TiedModel, TIED)
        output = parallel(**ids(0))
        with pytest.raises(ShardingError) as caught:
            (output.loss + output.logits.sum()).backward()
        assert str(caught.value).splitlines() == [
            "output 'logits': a gradient reaches it in backward",
            "  it was compiled as not differentiable, to keep a dense gradient out of every step",
            "  say differentiable=('logits',) to parallelize, or detach it",
        ]
        alone, parallel = models(TiedModel, TIED, differentiable=("logits",))
        for model in (parallel, alone):
            model.dropout.p = 0.0
            output = model(**ids(0))
            (output.loss + output.logits.sum()).backward()
        assert_same(parallel.out.weight.grad, alone.out.weight.grad)

    def test_outputs_need_gradients_where_the_models_do(self):
        alone, parallel = models(Detached, {"x": P("dp")}, differentiable=("1",))
        x, _ = doubles(0)
        needed = [each.requires_grad for each in alone(x)]
        assert needed == [True, True, False, False, False] == [each.requires_grad for each in parallel(x)]
        for model in (parallel, alone):
            sum(each.sum() for each in model(x) if each.requires_grad).backward()
        assert_same(parallel.linear.weight.grad, alone.linear.weight.grad)

    def test_without_gradients_only_the_forward_is_compiled(self):
        alone, parallel = models()
        with torch.no_grad():
            assert_same(parallel(*doubles(0)), alone(*doubles(0)))
        assert all(output.kind == "output" for output in parallel.program.program.outputs)
        alone.requires_grad_(False)
        frozen = shardc.parallelize(alone, MESH, MEGATRON)
        assert not frozen(*doubles(0)).requires_grad

    def test_eval_turns_dropout_off_and_leaves_buffers(self):
        alone, parallel = models(TiedModel, TIED)
        parallel.eval()
        assert_same(parallel(**ids(0)).logits, alone.eval()(**ids(0)).logits)
        assert parallel.calls == 0 and parallel.step == 0

    def test_dropout_depends_on_seed_and_step_alone(self):
        def losses(mesh, seed):
            _, parallel = models(TiedModel, TIED, mesh)
            parallel.seed = seed
            return [parallel(**ids(0)).loss.item() for _ in range(2)]

        first, second = losses(MESH, 0)
        assert first != second
        assert losses(Mesh(dp=1, tp=4), 0) == pytest.approx([first, second], abs=1e-12)
        assert losses(MESH, 1)[0] != first

    def test_a_new_signature_is_compiled_anew_and_an_old_one_is_not(self):
        alone, parallel = models(args=doubles(0))
        first = parallel.program
        assert_same(parallel(*doubles(0, rows=8)), alone(*doubles(0, rows=8)))
        assert parallel.program is not first
        parallel(*doubles(1))
        assert parallel.program is first
        parallel.up.bias.requires_grad_(False)
        parallel(*doubles(1)).backward()
        assert parallel.up.bias.grad is None

    def test_many_signatures_are_warned_of(self, monkeypatch):
        monkeypatch.setattr("shardc.runtime.module.runtime.MAX_PROGRAMS", 2)
        monkeypatch.setattr("shardc.runtime.module.call_sizes.MAX_REGIONS", 0)
        _, parallel = models()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for rows in (2, 4, 8):
                parallel(*doubles(0, rows))
        assert ["compiled for more than 2 signatures" in str(warning.message) for warning in caught] == [True]

    def test_there_is_no_program_before_the_first_call(self):
        _, parallel = models()
        with pytest.raises(RuntimeError, match="call the module once"):
            _ = parallel.program

    def test_an_unknown_runtime_is_refused(self):
        with pytest.raises(ShardingError) as caught:
            models(runtime="virtal")
        assert str(caught.value).splitlines() == [
            "parallelize: runtime='virtal'",
            "  there is no such runtime",
            "  did you mean virtual?",
        ]

    def test_a_mesh_larger_than_the_job_is_refused(self):
        with pytest.raises(ShardingError, match=r"(?s)has 4 ranks\n  the job has 1\n  start it with torchrun"):
            models(runtime="distributed")

    def test_a_copy_trains_apart(self):
        alone, parallel = models()
        parallel(*doubles(0)).backward()
        twin = copy.deepcopy(parallel)
        train(twin, alone, OPTIMIZERS["sgd"], steps=2)
        assert not torch.equal(twin.up.weight, parallel.up.weight)


def on_gloo(model=MLP, annotations=MEGATRON, **options):
    return models(model, annotations, make_device_mesh(MESH), **options)


def run_training(name, annotations, clip):
    alone, parallel = on_gloo(annotations=annotations)
    train(parallel, alone, OPTIMIZERS[name], clip=clip)
    placements = {name: parameter.placements for name, parameter in parallel.named_parameters()}
    return placements, [type(parameter.grad) for parameter in parallel.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtensor_parameters_train_like_one_device(gloo, name):
    for placements, kinds in gloo.run(run_training, name, MEGATRON, 0.05):
        assert placements == {
            "up.weight": (Replicate(), Shard(0)),
            "up.bias": (Replicate(), Shard(0)),
            "down.weight": (Replicate(), Shard(1)),
            "down.bias": (Replicate(), Replicate()),
        }
        assert set(kinds) == {GlobalTensor}


def test_parameters_cut_over_the_batch_axis_train_like_one_device(gloo):
    for placements, _ in gloo.run(run_training, "adamw foreach", FSDP, None):
        assert set(placements.values()) == {(Shard(0), Replicate())}


def run_tied():
    alone, parallel = on_gloo(TiedModel, TIED)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (parallel, alone)]
    for step in range(2):
        outputs = []
        for model, optimizer in zip((parallel, alone), optimizers, strict=True):
            model.dropout.p = 0.0
            outputs.append(model(**ids(step)))
            optimizer.zero_grad()
            outputs[-1].loss.backward()
            model.clip_grad_norm_(0.1) if model is parallel else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert_same(outputs[0].loss, outputs[1].loss)
        assert_same(outputs[0].logits, outputs[1].logits)
    assert_same_state(parallel, alone)
    assert parallel.head.weight is parallel.embedding.weight and parallel.scale.grad is None
    assert type(outputs[0].loss) is torch.Tensor and isinstance(outputs[0].logits, DTensor)
    return parallel.fused.weight.placements, outputs[0].logits.placements


def test_tied_frozen_fused_and_mutated_tensors_live_on_the_mesh(gloo):
    for weight, logits in gloo.run(run_tied):
        assert weight == (Replicate(), _StridedShard(0, split_factor=3))
        assert logits[0] == Shard(0)


def run_states():
    """state_dict, load_state_dict, deepcopy and DTensor inputs and outputs."""
    alone, parallel = on_gloo(args=doubles(0))
    other, twin = on_gloo(args=doubles(0))
    for parameter in other.parameters():
        parameter.data.add_(1)
    parallel.load_state_dict(other.state_dict())
    assert_same_state(parallel, other)
    twin.load_state_dict(parallel.state_dict())
    assert_same_state(copy.deepcopy(twin), other)
    alone.load_state_dict({name: whole(tensor) for name, tensor in twin.state_dict().items()})
    x, y = doubles(3)
    mesh = make_device_mesh(MESH)
    row = mesh.get_coordinate()[0]
    own = {"pair": tuple(tensor.chunk(2)[row].requires_grad_() for tensor in (x, y)), "epoch": 3}
    batch = shard_batch(own, mesh, P("dp"))
    assert batch["epoch"] == 3 and type(batch["pair"]) is tuple
    mine = batch["pair"]
    mine[0].retain_grad()
    x.requires_grad_()
    parallel(*mine).backward()
    alone(x, y).backward()
    assert_same(mine[0].grad, x.grad)
    assert mine[0].grad.placements == (Shard(0), Replicate())
    assert_same(parallel.up.weight.grad, alone.up.weight.grad)
    again = [tensor.detach().requires_grad_() for tensor in doubles(4)]
    parallel(*again).backward()
    theirs = [tensor.detach().requires_grad_() for tensor in again]
    alone(*theirs).backward()
    assert type(again[0].grad) is torch.Tensor
    assert_same(again[0].grad, theirs[0].grad)


def run_outputs():
    """A cut output is a DTensor whose gradient may lie otherwise; one that is asked for whole is plain."""
    alone, parallel = on_gloo(Summed, {"x": P("dp"), "linear.weight": P("tp")})
    x = doubles(0)[0]
    y, z = parallel(x)
    assert isinstance(y, DTensor) and y.placements[0] == Shard(0)
    (y.sum() + z.square().sum()).full_tensor().backward()
    a, b = alone(x)
    (a.sum() + b.square().sum()).backward()
    assert_same(parallel.linear.weight.grad, alone.linear.weight.grad)
    _, whole = on_gloo(Summed, {"x": P("dp"), "output:*": P()})
    assert all(type(tensor) is torch.Tensor for tensor in whole(x))
    assert_same(whole(x)[0], a)


def run_small_outputs():
    """A vector of few elements is plain, and trains; a long one and one that an annotation cuts stay cut."""
    weights = {"x": P("dp"), "linear.weight": P("tp")}
    for rows in (8, 7):  # of 4 ranks, where 7 are uneven
        alone, parallel = on_gloo(PerRow, weights, differentiable=("0", "1", "2"))
        results = [model(*doubles(0, rows)) for model in (parallel, alone)]
        assert [type(each) for each in results[0]] == [torch.Tensor, torch.Tensor, GlobalTensor]
        for loss, losses, y in results:
            (loss + losses[1] + losses.norm() + y.square().mean()).backward()
        assert_same(results[0][1], results[1][1])
        assert_same(parallel.linear.weight.grad, alone.linear.weight.grad)
    _, cut = on_gloo(PerRow, {"x": P("dp"), "output:1": P("dp")})
    assert cut(*doubles(0))[1].placements == (Shard(0), Replicate())
    long = doubles(0, SMALL_OUTPUT + 1)
    assert isinstance(parallel(*long)[1], GlobalTensor)
    assert_same(parallel(*long)[1], alone(*long)[1])


def run_added():
    """What a rank is told of a parameter that was put into a module that trains on a mesh."""
    parallel = on_gloo()[1]
    parallel(*doubles(0))
    parallel.up = nn.Linear(8, 16).double()
    with pytest.raises(ShardingError) as told:
        parallel(*doubles(0))
    return str(told.value)


def run_shared():
    """Gradients of equal value have memory of their own, and torch averages the model; then a loss is tampered with."""
    alone, parallel = on_gloo(Shared, {"x": P("dp")})
    average = [torch.optim.swa_utils.AveragedModel(model, use_buffers=True) for model in (parallel, alone)]
    for step in range(2):
        for model, averaged in zip((parallel, alone), average, strict=True):
            model(doubles(step)[0])[0].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.optim.SGD(model.parameters(), 0.5).step()
            averaged.update_parameters(model)
    assert_same(parallel.a.grad, alone.a.grad)
    assert_same(parallel.b.grad, alone.b.grad)
    assert_same(average[0].module.a, average[1].module.a)
    assert_same(average[0](doubles(2)[0])[0], average[1](doubles(2)[0])[0])
    loss, y = parallel(doubles(0)[0])
    y.detach().add_(1)
    trained = on_gloo()[1]
    losses = [trained(*doubles(step)) for step in range(2)]
    losses[0].backward()
    torch.optim.SGD(trained.parameters(), 0.5).step()
    return [refusal(loss) for loss in (loss, losses[1])]


def refusal(loss):
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


def test_gradients_are_apart_and_what_the_backward_needs_must_not_change(gloo):
    for output, parameter in gloo.run(run_shared):
        assert "a tensor of shape [4, 8]\n  that was changed in place after forward" in output
        assert "a tensor of shape [8, 16]\n  that was changed in place after forward" in parameter


def test_a_parameter_that_is_no_dtensor_is_refused_on_every_rank(gloo):
    (told,) = set(gloo.run(run_added))
    assert "parameter 'up.weight': a plain tensor\n  it was put into the module that parallelize returned" in told


def test_state_dicts_copies_and_dtensors_of_the_user_go_in_and_out(gloo):
    gloo.run(run_states)


def test_small_outputs_are_plain(gloo):
    gloo.run(run_small_outputs)


def test_outputs_keep_their_sharding_unless_an_annotation_asks_for_them_whole(gloo):
    gloo.run(run_outputs)


def backward_code():
    """The code of a data parallel backward of several buckets."""
    blocks = ((nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    model, args, bucket = nn.Sequential(*itertools.chain(*blocks)), (torch.ones(8, 64),), 4 * 2**16
    mesh = make_device_mesh(Mesh(dp=2))
    parallel = shardc.parallelize(model, mesh, {"input": P("dp")}, args=args, compile="inductor", bucket=bucket)
    from torch._inductor.utils import run_and_get_code  # takes seconds

    _, codes = run_and_get_code(lambda: parallel(*args).to_local().sum().backward())
    return max(codes, key=lambda code: code.count("all_reduce_.default"))


def run_inductor():
    """The losses of a few steps, compiled and alone; and what was counted as sent."""
    torch.manual_seed(0)
    alone = MLP()
    parallel = shardc.parallelize(alone, make_device_mesh(Mesh(tp=2)), MEGATRON_ALONE, compile="inductor")
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (parallel, alone)]
    losses = []
    for step in range(4):
        for model, optimizer in zip((parallel, alone), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(*batch(step)))
            losses[-1].backward()
            optimizer.step()
    counted = parallel.shardc.conversion.comm.traffic[0].bytes["all_reduce"]
    announced = sum(each.wire_bytes for each in parallel.program.collectives)
    return [loss.item() for loss in losses], counted, announced, backward_code()


@pytest.mark.sweep
@pytest.mark.xdist_group("gloo")  # one job of several processes at a time
def test_inductor_runs_both_parts_on_two_ranks():
    for losses, counted, announced, code in launch(ByPath(__file__, "run_inductor"), 2):
        assert losses[::2] == pytest.approx(losses[1::2], abs=1e-6)
        assert counted == 4 * announced > 0
        calls = re.findall(r"^ +(?:extern_kernels\.(\w+)|torch\.ops\._c10d_functional\.(\w+))", code, re.MULTILINE)
        order = [product or collective for product, collective in calls]
        assert "mm" in order[order.index("all_reduce_") : order.index("wait_tensor")], "a bucket waits for the last op"


@pytest.mark.sweep
def test_inductor_draws_the_same_dropout() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(x)

    compiled, eager = (
        shardc.parallelize(Dropped(), Mesh(dp=2), {"x": P("dp")}, compile=how) for how in ("inductor", "eager")
    )
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(8, 16)), eager(torch.ones(8, 16)))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        compiled(torch.ones(8, 16))
    assert "forward/(model)/inductor" in {event.name for event in found.events()}


def test_a_number_of_a_module_that_changes_is_seen_by_the_next_call() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.scale).sum()

    model = shardc.parallelize(Scaled(), Mesh(dp=2), {"x": P("dp")})
    x = torch.randn(4, 4)
    before = model(x)
    model.scale = 3.0
    torch.testing.assert_close(model(x), 3 * before)
    model.scale = 1.0
    torch.testing.assert_close(model(x), before)
    assert len(model.shardc.variants) == 2, "a signature that was seen is not compiled again"


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_model_with_a_computed_weight_is_parallelized():
    model, x = nn.utils.weight_norm(nn.Linear(6, 4)), torch.randn(4, 6)
    parallel = shardc.parallelize(model, Mesh(tp=2), {"weight_v": P("tp")})
    parallel(x).sum().backward()
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, parameter.grad)
