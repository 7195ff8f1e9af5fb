"""Mixed precision: fp32 masters, casts before gathers, reductions in a dtype of their own."""

import math

import pytest
import torch
from cases import few
from parallel_models import DATA, MESHES, MLP, TIED, TiedModel, batch, ids, whole
from torch import nn

import shardc
from shardc.language.errors import CaptureError, ShardingError
from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.options import Precision, Zero
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.simulator import interpret

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
STAGES = (None, 1, 2, 3)


def zero_of(stage):
    return None if stage is None else Zero(stage=stage)


def moved(compiled):
    """Each kind of collective in each phase, with the dtype that it moves."""
    return {
        (found.phase, found.kind, str(found.dtype)) for found in compiled.collectives if found.kind != "shard_slice"
    }


def by_hand(model, dtype, args):
    """Outputs and fp32 gradients of the model cast whole to a dtype, as one does without a library."""
    cast = type(model)().to(dtype)
    cast.load_state_dict(model.state_dict())
    output = cast(*(arg.to(dtype) for arg in args))
    output.backward()
    return output, {name: parameter.grad.float() for name, parameter in cast.named_parameters()}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_what_is_captured_computes_the_bits_of_a_model_cast_by_hand(dtype):
    """What runs rounds once more, between a product and its bias."""
    model, args = MLP(), batch(0)
    compiled = shardc.compile(model, Mesh(dp=1), DATA, args=args, precision=Precision(dtype))
    output, gradients = by_hand(model, dtype, args)
    captured = compiled.run(interpret, compiled.at("capture"), args, {})
    for (loss, found), atol in ((captured, 0), (compiled.simulate(*args), 1e-2)):
        torch.testing.assert_close(loss, output, atol=atol, rtol=0)
        torch.testing.assert_close(found, gradients, atol=atol, rtol=0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MESHES)
def test_the_casts_of_float64_to_float32_are_those_of_one_device(name, stage):
    mesh, annotations = MESHES[name]
    model, args = MLP().double(), [tensor.double() for tensor in batch(0)]
    precision = Precision(FP32, reduce=FP64)
    compiled = shardc.compile(model, mesh, annotations, args=args, zero=zero_of(stage), precision=precision)
    loss, gradients = compiled.simulate(*args)
    expected, wanted = compiled.run(interpret, compiled.at("canonicalize"), args, {})
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    for each in wanted:
        assert gradients[each].dtype == FP64
        torch.testing.assert_close(gradients[each], wanted[each], atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_gathers_move_what_is_computed_in_and_reductions_what_is_reduced_in(stage):
    for reduce in (FP32, BF16):
        precision = Precision(BF16, reduce)
        compiled = shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), zero=zero_of(stage), precision=precision)
        gathers = {None: set(), 3: {("forward", "all_gather"), ("backward", "all_gather")}}
        reduction = "all_reduce" if stage is None else "reduce_scatter"
        assert moved(compiled) == {
            ("forward", "all_reduce", "float32"),  # the loss, summed wide
            ("backward", reduction, str(reduce).removeprefix("torch.")),
            *((*each, "bfloat16") for each in gathers.get(stage, {("update", "all_gather")})),
        }


@pytest.mark.parametrize("stage", STAGES)
def test_the_bytes_of_gathers_halve(stage):
    def gathered(precision):
        compiled = shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), zero=zero_of(stage), precision=precision)
        return sum(found.wire_bytes for found in compiled.collectives if found.kind == "all_gather")

    assert 2 * gathered(Precision(BF16)) == gathered(None)


def test_a_parameter_is_cast_once_and_the_copy_is_kept():
    for stage in STAGES:
        compiled = shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), zero=zero_of(stage), precision=Precision())
        program = compiled.program
        kept = {
            output.name: node
            for output, node in zip(program.outputs, program.results, strict=True)
            if output.kind == "computed"
        }
        assert kept.keys() == dict(MLP().named_parameters()).keys()
        assert {program.type(node).dtype for node in kept.values()} == {BF16}
        assert {len(node.users) for kind, node in program.named_inputs.items() if kind[0] == "parameter"} == {1}


def test_gradients_arrive_in_their_parameters_dtype_or_as_said():
    for gradients, arrives in ((None, FP32), (BF16, BF16)):
        precision = Precision(BF16, BF16, gradients)
        found = shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), precision=precision).simulate(*batch(0))[1]
        assert {gradient.dtype for gradient in found.values()} == {arrives}


def test_precision_handles_ties_frozen_parameters_blocks_dropout_and_buffers():
    model, kwargs = TiedModel(), ids(0)
    compiled = shardc.compile(model, Mesh(dp=2, tp=2), TIED, kwargs=kwargs, zero=Zero(), precision=Precision())
    output, gradients = compiled.simulate(**kwargs)
    expected, wanted = compiled.run(interpret, compiled.at("canonicalize"), (), kwargs)
    assert output.logits.dtype == BF16
    torch.testing.assert_close(output.loss, expected.loss, atol=0, rtol=1e-2)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == FP32
        torch.testing.assert_close(gradient, wanted[name], atol=2e-2 * float(wanted[name].abs().max()), rtol=0)
    buffers = {given.name: given.type.dtype for given in compiled.program.inputs if given.kind == "buffer"}
    assert buffers == {"seen": FP32, "calls": torch.int64}


class Positions(nn.Module):
    """A floating buffer makes what is computed float32 again, and a norm of the user's own casts by hand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("place", torch.arange(8.0))

    def forward(self, x):
        x = self.first(x) + self.place
        x = x.float() / x.float().square().mean(-1, keepdim=True).sqrt()
        return self.second(x).float().square().mean()


def test_a_module_casts_inputs_that_became_wider():
    x = batch(0)[0]
    compiled = shardc.compile(Positions(), Mesh(dp=4), {"x": P("dp")}, args=(x,), precision=Precision())
    assert compiled.simulate(x)[0].dtype == FP32


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x)))).float().square().mean()


@pytest.mark.parametrize("stage", [None, 3])
def test_a_batch_norm_keeps_its_parameters_beside_its_running_statistics(stage):
    model, x = Normed(), batch(0, rows=16)[0]
    compiled = shardc.compile(model, Mesh(dp=4), {"x": P("dp")}, args=(x,), zero=zero_of(stage), precision=Precision())
    loss, gradients = compiled.simulate(x)
    expected = Normed()
    expected.load_state_dict(model.state_dict())
    wanted = expected(x)
    torch.testing.assert_close(loss, wanted.detach(), atol=0, rtol=1e-2)
    assert {gradient.dtype for gradient in gradients.values()} == {FP32}
    program = compiled.program
    ends = zip(program.outputs, program.results, strict=True)
    assert {program.type(node).dtype for output, node in ends if output.name == "norm.running_mean"} == {FP32}


class Losses(nn.Module):
    """Sums beyond what float16 has, of which only the means are asked for."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x, y):
        x = (x.abs() + 10) * self.scale
        rows, targets = x.repeat(2048, 1), y.argmax(-1).repeat(2048)
        losses = (
            rows.mean(),
            nn.functional.mse_loss(rows, -rows),
            nn.functional.binary_cross_entropy_with_logits(rows, rows * 0),
            nn.functional.cross_entropy(rows * 16, targets),
        )
        return sum(loss.float() for loss in losses)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_means_are_those_of_float32_though_sums_overflow(dtype):
    args = batch(0)
    compiled = shardc.compile(Losses(), Mesh(dp=4), DATA, args=args, precision=Precision(dtype))
    loss = compiled.simulate(*args)[0]
    torch.testing.assert_close(loss, Losses()(*args).detach(), atol=0, rtol=1e-2)


class Head(nn.Module):
    """A cut vocabulary of more words than float16 has a number for, all as likely."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1 << 17, bias=False)
        nn.init.constant_(self.head.weight, 0.125)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(x), y)


def test_the_softmax_of_a_cut_vocabulary_is_summed_wide():
    args = (batch(0)[0], torch.arange(4))
    cut = {"head.weight": P("tp")}
    compiled = shardc.compile(Head(), Mesh(tp=4), cut, args=args, train=False, precision=Precision(torch.float16))
    assert not any(found.kind == "all_gather" for found in compiled.collectives)
    assert float(compiled.simulate(*args)[0]) == pytest.approx(math.log(1 << 17), rel=1e-3)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.5)
        return (x * self.scale).sum()


def test_a_parameter_changed_in_forward_is_named():
    for precision in (None, Precision()):
        with pytest.raises(CaptureError, match="parameter 'scale'(.|\n)*changes it in place"):
            shardc.compile(Scaled(), Mesh(dp=2), {"x": P("dp")}, args=(batch(0)[0],), precision=precision)


def test_an_invalid_dtype_or_option_is_named():
    with pytest.raises(ShardingError, match="compute=torch.int32(.|\n)*no floating dtype(.|\n)*say torch.bfloat16"):
        Precision(torch.int32)
    with pytest.raises(ShardingError, match="reduce='bf16'(.|\n)*no floating dtype"):
        Precision(reduce="bf16")
    with pytest.raises(ShardingError, match=r"precision=torch.bfloat16(.|\n)*say precision=shardc.Precision"):
        shardc.compile(MLP(), Mesh(dp=4), DATA, args=batch(0), precision=BF16)


def other_bytes(traffic, compiled):
    """Bytes counted in a step, and those announced, of the kinds where they differ."""
    announced = {}
    for found in compiled.collectives:
        announced[found.kind] = announced.get(found.kind, 0) + found.wire_bytes
    return {kind: (traffic.bytes[kind], count) for kind, count in announced.items() if traffic.bytes[kind] != count}


def train(stage, compute, reduce, dtype):
    """Twenty steps beside one device under the same precision: losses of both, and bytes that were not announced."""
    torch.manual_seed(0)
    model, precision = MLP().to(dtype), Precision(compute, reduce)
    alone = shardc.parallelize(model, Mesh(dp=1), DATA, precision=precision)
    parallel = shardc.parallelize(model, make_device_mesh(Mesh(dp=4)), DATA, zero=zero_of(stage), precision=precision)
    steppers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (alone, parallel)]
    traffic, losses, unannounced = parallel.shardc.conversion.comm.traffic[0], [], {}
    for step in range(20):
        args = [tensor.to(dtype) for tensor in batch(step % 4)]
        for each, stepper in zip((alone, parallel), steppers, strict=True):
            traffic.clear()
            loss = each(*args)
            loss.backward()
            losses.append(float(loss))
            stepper.step()
            stepper.zero_grad()
        if step > 2:
            unannounced |= other_bytes(traffic, parallel.program)
    assert {parameter.dtype for parameter in parallel.parameters()} == {dtype}
    return losses[::2], losses[1::2], unannounced


@pytest.mark.parametrize("stage", few(STAGES, 1, 3))
@pytest.mark.parametrize(("compute", "reduce", "dtype", "rtol"), [(BF16, FP32, FP32, 1e-2), (FP32, FP64, FP64, 1e-5)])
def test_twenty_steps_are_those_of_one_device(gloo, stage, compute, reduce, dtype, rtol):
    for alone, parallel, unannounced in gloo.run(train, stage, compute, reduce, dtype):
        torch.testing.assert_close(torch.tensor(parallel), torch.tensor(alone), atol=0, rtol=rtol)
        assert alone[-1] < 0.9 * alone[0]
        assert not unannounced


class Gain(nn.Module):
    """The first parameter lies whole on every rank; the gradient of each element of the second is that input's sum."""

    def __init__(self):
        super().__init__()
        self.shift, self.gain = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return ((x * self.gain).sum(-1) + self.shift).float().sum()


SCALED = {
    "dp": (Mesh(dp=4), {"x": P("dp")}, None),
    "tp": (Mesh(tp=4), {"gain": P("tp")}, None),
    **{f"zero {stage}": (Mesh(dp=4), {"x": P("dp")}, Zero(stage=stage)) for stage in (1, 2, 3)},
}


def run_scaled(mesh, annotations, zero):
    """A step whose gradient overflows in one element, a step that does not: scales, norms and parameters."""
    precision = Precision(torch.float16, torch.float16)
    parallel = shardc.parallelize(Gain(), make_device_mesh(mesh), annotations, zero=zero, precision=precision)
    stepper = torch.optim.AdamW(parallel.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    found = []
    for largest in (60000.0, 1.0):
        x = torch.ones(4, 8)
        x[:, 7] = largest
        scaler.scale(parallel(x)).backward()
        overflows = not bool(parallel.gain.grad._local_tensor.isfinite().all())
        scaler.unscale_(stepper)
        norm = torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        found.append((overflows, scaler.get_scale(), float(whole(norm)), float(whole(parallel.gain.detach())[0])))
    return found


@pytest.mark.parametrize("plan", SCALED)
def test_an_overflow_on_one_rank_makes_all_skip_the_step(gloo, plan):
    ranks = gloo.run(run_scaled, *SCALED[plan])
    assert sum(first[0] for first, _ in ranks) == (4 if plan == "dp" else 1)  # the ranks whose piece is not finite
    for (_, scale, _, gain), (is_infinite, later, norm, moved) in ranks:
        assert (scale, gain) == (128.0, 0.0)
        assert (is_infinite, later, norm) == (False, 128.0, 12.0)  # of nine elements of 4
        assert moved == pytest.approx(-0.5, rel=1e-3)


def run_narrow_gradients():
    """Gradients that arrive in bf16, by an optimizer that takes them."""
    parallel = shardc.parallelize(
        MLP(), make_device_mesh(Mesh(dp=4)), DATA, zero=Zero(stage=2), precision=Precision(BF16, BF16, BF16)
    )
    stepper = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    losses, evaluated = [], []
    for _ in range(10):
        for _ in range(2):
            loss = parallel(*batch(0))
            loss.backward()
        assert {parameter.grad.dtype for parameter in parallel.parameters()} == {BF16}
        stepper.step()
        stepper.zero_grad()
        losses.append(float(loss))
        with torch.no_grad():
            evaluated.append(float(parallel(*batch(0))))
    return losses, evaluated


def test_gradients_may_arrive_in_a_narrow_dtype(gloo):
    for losses, evaluated in gloo.run(run_narrow_gradients):
        assert losses[-1] < 0.5 * losses[0]
        assert evaluated[:-1] == losses[1:]
