"""1-bit Adam: the steps of torch's Adam with a variance that is kept, or renewed from time to time, on every mesh."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Mesh, Momentum, P, Pipeline, ShardingError, Zero
from shardc.language.errors import OptionError, OrderError
from shardc.ops import codes
from shardc.wire import CODECS, Codec, find_codec

LOSSLESS = "lossless feedback"
STEPS = 12
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
PLANS = {
    "data": ({"dp": 4}, {}),
    "data and tensor": ({"dp": 2, "tp": 2}, {"up.weight": P("tp"), "down.weight": P(None, "tp")}),
    "two axes of data, one coded": ({"node": 2, "dp": 2}, {"x": P(("node", "dp"))}),
}


@pytest.fixture
def lossless() -> Iterator[None]:
    with lossless_codec():
        yield


@contextmanager
def lossless_codec() -> Iterator[None]:
    """A codec with feedback that leaves out nothing."""
    find_codec.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CODECS, LOSSLESS, Codec(LOSSLESS, 1, 1, 0.0, has_feedback=True))
        patch.setitem(codes.CASTS, LOSSLESS, torch.float64)
        yield
    find_codec.cache_clear()


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 60), nn.Linear(60, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batches(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 40, generator=generator).to(dtype) for _ in range(STEPS)]


def expected(
    option: Momentum, steps: int = STEPS, further: int | None = None, data: Sequence[Sequence[Tensor]] = ()
) -> list[Tensor]:
    """The parameters of one device, whose variance is renewed in steps with whole gradients alone; ``further``: one.

    A gradient counts for the steps since the last one, at most ``every``.
    ``data``: for each step the batches whose losses are added; by default one batch.
    """
    model = net(torch.float64)
    first, second = OPTIONS["betas"]  # type: ignore[misc]
    states = [[torch.zeros_like(each) for _ in range(2)] for each in model.parameters()]
    counted = 0
    for i, xs in enumerate(data or [[x] for x in batches(torch.float64)[:steps]]):
        is_renewed = option.every is not None and (i - option.after + 1) % option.every == 0
        is_whole = i < option.after or is_renewed or i == further
        num_steps = min(i + 1 - counted, option.every or 1)
        counted += num_steps * is_whole
        gradients = torch.autograd.grad(torch.stack([model(x) for x in xs]).sum(), list(model.parameters()))
        with torch.no_grad():
            for parameter, (mean, variance), gradient in zip(model.parameters(), states, gradients, strict=True):
                mean.lerp_(gradient, 1 - first)
                if is_whole:
                    kept = second**num_steps
                    variance.mul_(kept).addcmul_(gradient, gradient, value=1 - kept)
                parameter.mul_(1 - OPTIONS["lr"] * OPTIONS["weight_decay"])  # type: ignore[operator]
                deviation = (variance / (1 - second**counted)).sqrt() + 1e-8
                change = mean / (1 - first ** (i + 1)) / deviation
                if i >= option.after:
                    change.clamp_(-1, 1)
                parameter.sub_(OPTIONS["lr"] * change)  # type: ignore[operator]
    return [each.detach() for each in model.parameters()]


@pytest.mark.usefixtures("lossless")
@pytest.mark.parametrize("option", [Momentum(4), Momentum(3, every=2), Momentum(5, every=3)], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_without_loss_the_steps_are_those_of_an_adam_whose_variance_is_kept(name: str, option: Momentum) -> None:
    """Also with calls that do not train in between, and of a copy that goes on by itself."""
    sizes, annotations = PLANS[name]
    parallel = shardc.parallelize(
        net(torch.float64), Mesh(**sizes), {"x": P("dp"), **annotations}, wire={"dp": LOSSLESS}, momentum=option
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), **OPTIONS)
    for i, x in enumerate(batches(torch.float64)):
        optimizer.zero_grad()
        parallel(x).backward()
        optimizer.step()
        with torch.no_grad():
            assert parallel(x).isfinite()
        if i == 6:
            copy.deepcopy(parallel)(x).backward()
    for (path, found), wanted in zip(parallel.named_parameters(), expected(option), strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-10, atol=1e-12, msg=path)


class Table(nn.Module):
    """A table of which some rows are read."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(600, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids).square().mean()


def test_what_had_no_gradient_stays_where_it_is() -> None:
    """Codes of a row that was not read are not zero, and its variance is: a step over its root would be huge."""
    torch.manual_seed(0)
    parallel = shardc.parallelize(Table(), Mesh(dp=2), {"ids": P("dp")}, wire={"dp": "1bit"}, momentum=Momentum(2))
    before = parallel.rows.weight.detach().clone()
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    read = torch.randint(300, (6, 40), generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        optimizer.zero_grad()
        parallel(read).backward()
        optimizer.step()
    was_read = torch.zeros(600, dtype=torch.bool).index_fill(0, read.flatten(), True)
    moved = (parallel.rows.weight.detach() - before).abs().amax(1)
    assert not moved[~was_read].any()
    assert moved[was_read].all() and moved.isfinite().all()


RENEWED = Momentum(4, every=3, before={"dp": "int8"})


@pytest.mark.parametrize("option", [Momentum(5), RENEWED], ids=str)
def test_ranks_of_a_job_take_the_same_steps_and_go_on_from_a_checkpoint(
    gloo: GlooPool, tmp_path: Path, option: Momentum
) -> None:
    """To the bit, whichever of the steps comes after it."""
    mesh = Mesh(dp=2, tp=2)
    wanted = train(mesh, option, tmp_path / "virtual")
    assert gloo.run(on_ranks, option, tmp_path / "gloo", None) == [wanted] * 4
    for step in (4, 6, 7, 8):
        assert train(mesh, option, tmp_path / "gloo", resumed=step) == wanted, step
    assert gloo.run(on_ranks, option, tmp_path / "virtual", 8) == [wanted] * 4


def on_ranks(option: Momentum, folder: Path, resumed: int | None) -> list[bytes]:
    return train(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), option, folder, resumed)


def train(mesh: Any, option: Momentum, folder: Path, resumed: int | None = None) -> list[bytes]:
    """The bits of the parameters; a checkpoint a step, or the steps after one of them."""
    annotations, data = {"x": P("dp"), **PLANS["data and tensor"][1]}, batches(torch.float32)
    parallel = shardc.parallelize(
        net(torch.float32), mesh, annotations, args=(data[0],), wire={"dp": "1bit"}, momentum=option
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), **OPTIONS)  # type: ignore[arg-type]
    if resumed is not None:
        shardc.load(folder / f"step-{resumed:08}", parallel, optimizer)
    for i in range(resumed or 0, STEPS):
        optimizer.zero_grad()
        parallel(data[i]).backward()
        optimizer.step()
        if resumed is None and i in (3, 5, 6, 7):
            shardc.save(folder, parallel, optimizer, step=i + 1).wait()
    return [whole(each).detach().numpy().tobytes() for each in parallel.parameters()]


@pytest.mark.parametrize("wire", [{"node": "1bit"}, {"node": "1bit", "dp": "1bit"}, {"gradients": "1bit"}], ids=str)
def test_a_momentum_is_sent_over_two_axes(wire: dict[str, str]) -> None:
    model, (x, *_) = net(torch.float32), batches(torch.float32)
    data = {"x": P(("node", "dp"))}
    plan = shardc.compile(model, Mesh(node=2, dp=2), data, args=(x,), wire=wire, momentum=Momentum(2))
    assert {put.name for put in plan.program.inputs if put.kind == "momentum"} >= {"up.weight", "down.weight"}
    assert not plan.program.notes


def test_parameters_whose_momentum_is_not_sent_are_named() -> None:
    model, (x, *_) = net(torch.bfloat16), batches(torch.bfloat16)
    plan = shardc.compile(model, Mesh(dp=2), {"x": P("dp")}, args=(x,), wire={"dp": "1bit"}, momentum=Momentum(2))
    assert any("sends no momentum of" in note and "up.weight" in note for note in plan.program.notes)


def test_bytes_of_200_steps_are_a_fifth_of_those_of_fp16() -> None:
    """Of 40 steps with whole gradients in int8, and then of 1 bit; with a whole one in eight later as well."""
    model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), torch.randn(8, 256)
    half = shardc.compile(model, Mesh(dp=4), {"input": P("dp")}, args=(x,), wire={"dp": "fp16"})
    sent = {}
    for name, changes in {
        "fp16": {}, "int8": {"wire": {"dp": "int8"}}, "1bit": {"wire": {"dp": "1bit"}, "momentum": Momentum(40)},
    }.items():  # fmt: skip
        plan = half.recompile(**changes)
        sent[name] = sum(each.wire_bytes for each in plan.collectives)
    assert 200 * sent["fp16"] > 4.8 * (40 * sent["int8"] + 160 * sent["1bit"])
    assert 200 * sent["fp16"] > 4.8 * (60 * sent["int8"] + 140 * sent["1bit"])


def started(option: Momentum, make: Any, **options: Any) -> tuple[Any, Any, Tensor]:
    """A module and an optimizer after the steps with whole gradients, and a batch."""
    parallel = shardc.parallelize(net(torch.float32), Mesh(dp=2), {"x": P("dp")}, wire={"dp": "1bit"}, momentum=option)
    optimizer, (x, *_) = make(parallel.parameters(), **options), batches(torch.float32)
    for _ in range(option.after):
        optimizer.zero_grad()
        parallel(x).backward()
        optimizer.step()
    return parallel, optimizer, x


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.99)}, "Momentum(..., beta=0.8)"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "use AdamW"),
        (torch.optim.NAdam, {}, "neither torch.optim.Adam nor AdamW"),
        (torch.optim.SGD, {}, "neither torch.optim.Adam nor AdamW"),
    ],
)
def test_an_optimizer_that_does_something_else_is_refused(make: Any, options: dict[str, Any], said: str) -> None:
    """At the first step of all."""
    with pytest.raises(ShardingError) as caught:
        started(Momentum(2), make, **options)
    assert said in str(caught.value)


def test_what_has_no_momentum_is_refused() -> None:
    parallel, optimizer, x = started(Momentum(2), torch.optim.AdamW)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(OrderError, match="set_to_none"):
        parallel(x).backward()
    optimizer.zero_grad()
    parallel(x).backward()
    nn.utils.clip_grad_norm_(parallel.parameters(), 1e-3)
    with pytest.raises(OrderError, match="a momentum cannot be added to it"):
        parallel(x).backward()
    optimizer.zero_grad()
    parallel(x).backward()
    parallel.up.weight.grad = parallel.up.weight.grad / 2
    with pytest.raises(OrderError, match="a momentum cannot be added to it"):
        parallel(x).backward()
    optimizer.zero_grad()
    with pytest.raises(ShardingError, match="a closure"):
        optimizer.step(lambda: parallel(x))
    parallel(x).backward()  # after an error, and after a batch that is dropped
    optimizer.zero_grad()
    parallel(x).backward()
    optimizer.step(None)  # as Accelerate calls it


def test_two_modules_have_one_optimizer(gloo: GlooPool) -> None:
    """Ranks reduce the gradients of both in one order."""
    first, *others = gloo.run(train_two)
    assert others == [first] * 3


def train_two() -> list[bytes]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    coder, decoder = [
        shardc.parallelize(nn.Linear(64, 64), mesh, {"input": P("dp")}, wire={"dp": "1bit"}, momentum=Momentum(2))
        for _ in range(2)
    ]
    optimizer = torch.optim.AdamW([*coder.parameters(), *decoder.parameters()], lr=1e-3)
    for step in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        decoder(coder(x).tanh()).square().mean().backward()
        optimizer.step()
    return [whole(each).detach().numpy().tobytes() for each in (*coder.parameters(), *decoder.parameters())]


COUNTS = (1, 1, 1, 1, 1, 3, 3, 2, 4, 4, 1, 3)  # backwards of a step
WAYS = ("one by one", "as one loss", "of other sizes", "of one row", "read in between", "dropped before")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_has_the_gradients_of_all_backwards_and_the_momentum_once(gloo: GlooPool, way: str, name: str) -> None:
    """On virtual ranks, which reduce in each backward, and on those of a job, which do when a gradient is read.

    A batch of one row is on all ranks, which then send nothing.
    """
    sizes, annotations = PLANS[name]
    step_by_backwards(Mesh(**sizes), annotations, way)
    gloo.run(on_gloo, sizes, annotations, way)


def on_gloo(sizes: dict[str, int], annotations: dict[str, P], way: str) -> None:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    step_by_backwards(mesh, annotations, way)


def step_by_backwards(mesh: Any, annotations: dict[str, P], way: str) -> None:
    """Take steps of several backwards, and compare the parameters with those of one device."""
    option, generator = Momentum(4, every=5), torch.Generator().manual_seed(2)
    sizes = {"of other sizes": (4, 8, 12, 4), "of one row": (4, 1, 1, 4)}.get(way, (4,) * 4)
    rows = [sizes[:each][:: 1 - 2 * (i % 2)] for i, each in enumerate(COUNTS)]  # in turn from the first and to it
    data = [[torch.randn(size, 40, generator=generator).double() for size in of_step] for of_step in rows]
    with lossless_codec():
        parallel = shardc.parallelize(
            net(torch.float64), mesh, {"x": P("dp"), **annotations}, wire={"dp": LOSSLESS}, momentum=option
        )
        optimizer = torch.optim.AdamW(parallel.parameters(), **OPTIONS)  # type: ignore[arg-type]
        for xs in data:
            optimizer.zero_grad()
            if way == "dropped before":
                parallel(xs[0]).backward()
                optimizer.zero_grad()
            if way == "as one loss":
                torch.stack([parallel(x) for x in xs]).sum().backward()
            else:
                for x in xs:
                    parallel(x).backward()
                    assert way != "read in between" or whole(parallel.up.weight.grad).isfinite().all()
            optimizer.step()
        for (path, found), wanted in zip(parallel.named_parameters(), expected(option, data=data), strict=True):
            torch.testing.assert_close(whole(found.detach()), wanted, rtol=1e-10, atol=1e-12, msg=path)


def test_a_loss_that_is_scaled_is_refused() -> None:
    parallel, optimizer, x = started(Momentum(2), torch.optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(parallel(x)).backward()
    with pytest.raises(ShardingError, match="GradScaler"):
        scaler.step(optimizer)


@pytest.mark.usefixtures("lossless")
@pytest.mark.parametrize("is_copy", [False, True])
def test_states_of_torch_and_copies_go_on(is_copy: bool) -> None:
    """An optimizer that is not known yet does its first step with a whole gradient, and its own bias correction."""
    option, data = Momentum(4), batches(torch.float64)
    make = lambda model: shardc.parallelize(  # noqa: E731
        model, Mesh(dp=2), {"x": P("dp")}, wire={"dp": LOSSLESS}, momentum=option
    )
    parallel = make(net(torch.float64))
    optimizer = torch.optim.AdamW(parallel.parameters(), **OPTIONS)  # type: ignore[arg-type]

    def step(module: nn.Module, by: torch.optim.Optimizer, x: Tensor) -> None:
        by.zero_grad()
        module(x).backward()
        by.step()

    for x in data[:8]:
        step(parallel, optimizer, x)
    twin = copy.deepcopy(parallel) if is_copy else make(Net().double())
    twin.load_state_dict(parallel.state_dict())
    other = torch.optim.AdamW(twin.parameters(), **OPTIONS)  # type: ignore[arg-type]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x in data[8:10]:
        step(twin, other, x)
    for found, wanted in zip(twin.parameters(), expected(option, 10, further=8), strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-10, atol=1e-12)
    assert [int(each["variance_steps"]) for each in other.state.values()] == [5] * 4


@pytest.mark.usefixtures("lossless")
def test_adam_without_the_option_goes_on_with_the_rates_of_the_last_step() -> None:
    """Its bias correction counts steps, of which the variance has seen a few: unless it is scaled, steps are larger."""
    data, steps = batches(torch.float64), 8
    parallel = shardc.parallelize(
        net(torch.float64), Mesh(dp=2), {"x": P("dp")}, wire={"dp": LOSSLESS}, momentum=Momentum(2)
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), **OPTIONS)  # type: ignore[arg-type]
    for x in data[:steps]:
        optimizer.zero_grad()
        parallel(x).backward()
        optimizer.step()
    plain = net(torch.float64)
    plain.load_state_dict(parallel.state_dict())
    before = [each.detach().clone() for each in plain.parameters()]
    other = torch.optim.AdamW(plain.parameters(), **OPTIONS)  # type: ignore[arg-type]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain(data[steps]).backward()
    other.step()
    beta1, beta2 = OPTIONS["betas"]  # type: ignore[misc]
    for parameter, old, of_sent in zip(plain.parameters(), before, optimizer.state.values(), strict=True):
        renewed = float(of_sent["variance_steps"])
        assert renewed < steps and parameter.grad is not None
        unbiased = of_sent["exp_avg_sq"] / (1 - beta2**renewed) * (1 - beta2**steps)
        variance = beta2 * unbiased + (1 - beta2) * parameter.grad.square()
        first = of_sent["exp_avg"].lerp(parameter.grad, 1 - beta1) / (1 - beta1 ** (steps + 1))
        deviation = (variance / (1 - beta2 ** (steps + 1))).sqrt() + 1e-8
        lr, decay = OPTIONS["lr"], OPTIONS["weight_decay"]
        wanted = old * (1 - lr * decay) - lr * first / deviation  # type: ignore[operator]
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("lossless")
def test_a_parameter_that_is_frozen_on_the_way_leaves_the_others_as_they_are() -> None:
    parallel = shardc.parallelize(
        net(torch.float64), Mesh(dp=2), {"x": P("dp")}, wire={"dp": LOSSLESS}, momentum=Momentum(4, every=2)
    )
    optimizer, sent = torch.optim.AdamW(parallel.parameters(), **OPTIONS), []  # type: ignore[arg-type]
    for i, x in enumerate(batches(torch.float64)):
        if i == 5:
            next(parallel.parameters()).requires_grad_(False)
        optimizer.zero_grad()
        sent.append(parallel.shardc.feedback.sends_momentum)
        parallel(x).backward()
        optimizer.step()
    assert sent == [False] * 4 + [True, False] * 4


def test_what_was_sent_before_a_checkpoint_is_loaded_is_of_no_later_step(tmp_path: Path) -> None:
    parallel, optimizer, x = started(Momentum(2), torch.optim.AdamW)
    shardc.save(tmp_path, parallel, optimizer).wait()
    parallel(x).backward() if parallel.zero_grad() is None else None
    shardc.load(tmp_path, parallel, optimizer)
    assert not parallel.shardc.feedback.momentum.sent


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wire": {"dp": "int8"}}, "nothing is sent in a codec with feedback"),
        ({"wire": {"dp": "1bit"}, "zero": Zero("dp", 1)}, "leave zero out"),
        ({"wire": {"dp": "1bit"}, "pipeline": Pipeline("pp", 2)}, "leave pipeline out"),
        ({}, "nothing is sent in a codec with feedback"),
    ],
)
def test_other_options_must_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        shardc.parallelize(Net(), Mesh(dp=2, pp=2), {"x": P("dp")}, momentum=Momentum(5), **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [{"after": 0}, {"after": True}, {"after": 5, "every": 1}, {"after": 5, "beta": 1}]
)
def test_a_momentum_of_wrong_numbers_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="Momentum: "):
        Momentum(**arguments)


def test_elements_whose_gradients_grow_move_by_at_most_a_learning_rate() -> None:
    """Their variance is kept from steps with small gradients: Adam's step would be a hundred times as large."""
    model = nn.Linear(16, 1, bias=False)
    parallel = shardc.parallelize(model, Mesh(dp=2), {"input": P("dp")}, wire={"dp": "1bit"}, momentum=Momentum(2))
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    for size in (1.0, 1.0, 1e4, 1e4, 1e4):
        before = parallel.weight.detach().clone()
        optimizer.zero_grad()
        parallel(torch.full((4, 16), size)).sum().backward()
        optimizer.step()
    assert 0.009 < (parallel.weight.detach() - before).abs().max() < 0.010001
