"""Codes with feedback: what they leave out of gradients is kept, added in the next step, saved and loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import shardc
from shardc import Mesh, P, Zero, compile
from shardc.language.errors import OptionError
from shardc.program.coding.nodes import left_out
from shardc.program.communication import is_collective, values_received, values_sent
from shardc.runtime.simulator import simulate
from shardc.wire import codec_named

CODECS = ("1bit", "topk:0.02")


class Net(nn.Module):
    """Two linear layers over 60 features, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(60, 90), nn.Linear(90, 60), nn.Linear(60, 35, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(x + self.down(torch.relu(self.up(x)))), y)


def net(dtype: torch.dtype = torch.float64) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Net().to(dtype), (torch.randn(24, 60, dtype=dtype), torch.randint(35, (24,)))


DATA, TENSOR = (
    {"x": P("dp"), "y": P("dp")},
    {"up.weight": P("tp"), "down.weight": P(None, "tp"), "head.weight": P("tp")},
)
BOTH = {"x": P(("node", "dp")), "y": P(("node", "dp"))}
PLANS: dict[str, tuple[Mesh, dict[str, P], dict[str, Any], tuple[str, ...]]] = {
    "data": (Mesh(dp=4), DATA, {}, ("dp",)),
    "data, uneven": (Mesh(dp=5), DATA, {"bucket": 4000}, ("dp",)),
    "data and tensor": (Mesh(dp=2, tp=3), DATA | TENSOR, {}, ("dp",)),
    "two axes of data": (Mesh(node=2, dp=2), BOTH, {}, ("node", "dp")),
    "two axes of data, one coded": (Mesh(node=2, dp=3), BOTH, {}, ("node",)),
    "two axes of data, the other coded": (Mesh(node=2, dp=3), BOTH, {}, ("dp",)),
    "stage 1": (Mesh(dp=3), DATA, {"zero": Zero("dp", 1)}, ("dp",)),
    "stage 2": (Mesh(dp=4, tp=2), DATA | TENSOR, {"zero": Zero("dp", 2), "bucket": 4000}, ("dp",)),
    "stage 3": (Mesh(dp=7), DATA, {"zero": Zero("dp", 3)}, ("dp",)),
    "stage 3 of two axes": (Mesh(node=2, dp=2), BOTH, {"zero": Zero(("node", "dp"), 3)}, ("node", "dp")),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_and_what_is_left_out_are_the_whole_gradient(name: str, codec: str) -> None:
    """Of a gradient and what was left out before, each rank's own, nothing is lost and nothing comes twice."""
    mesh, annotations, options, axes = PLANS[name]
    model, call = net()
    wire = dict.fromkeys(axes, codec)
    compiled = compile(model, mesh, annotations, args=call, wire=wire, **options)
    assert any(node.target is left_out for node in compiled.whole.calls)
    program, generator = compiled.program, torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(value.shape, generator=generator, dtype=value.dtype) / 100 if put.kind == "residual" else value
        for put, value in zip(program.inputs, compiled.inputs(program, call), strict=True)
    ]
    before = {put.name: value for put, value in zip(program.inputs, inputs, strict=True) if put.kind == "residual"}
    ends = zip(program.outputs, simulate(program, inputs), strict=True)
    results = {(output.kind, output.name): value for output, value in ends if value is not None}
    wanted = torch.autograd.grad(model(*call), list(model.parameters()))
    assert before.keys() >= {"up.weight", "down.weight", "head.weight"}
    for (path, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        found = results["gradient", path]
        for each in (each for each in before if each.partition(":")[0] == path):  # one for each sum
            assert results["residual", each].shape == before[each].shape
            assert not torch.allclose(found, gradient, rtol=0.1)
            found, gradient = found + results["residual", each].sum(0), gradient + before[each].sum(0)
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-8, msg=path)


@pytest.mark.parametrize("count", [2, 5])
def test_a_rank_adds_its_own_piece_of_a_sum_as_it_is(count: int) -> None:
    """Its residual has what is left out of the sum there: one sign for both errors would carry neither well."""
    model, (x, y) = net()
    x, y = x[: 4 * count], y[: 4 * count]
    compiled = compile(model, Mesh(dp=count), DATA, args=(x, y), wire={"dp": "1bit"}, bucket=1)
    program, name = compiled.program, "head.weight"
    before = torch.randn(count, *model.head.weight.shape, dtype=torch.float64) / 100
    inputs = [
        before if (put.kind, put.name) == ("residual", name) else value
        for put, value in zip(program.inputs, compiled.inputs(program, (x, y)), strict=True)
    ]
    ends = zip(program.outputs, simulate(program, inputs), strict=True)
    results = {(output.kind, output.name): value for output, value in ends}
    own = [
        torch.autograd.grad(model(*each) / count, [model.head.weight])[0]
        for each in zip(x.chunk(count), y.chunk(count), strict=True)
    ]
    block = codec_named("1bit").block
    flat = (torch.stack(own) + before).flatten(1)
    pieces = nn.functional.pad(flat, (0, -flat.shape[1] % (block * count))).view(count, count, -1, block)
    arrived, ranks = _signs(pieces), torch.arange(count)
    arrived[ranks, ranks] = pieces[ranks, ranks]
    total, residual = arrived.sum(0), pieces - arrived
    residual[ranks, ranks] = total - _signs(total)
    gradient = _signs(total).flatten()[: flat.shape[1]].view_as(own[0])
    torch.testing.assert_close(results["gradient", name], gradient)
    torch.testing.assert_close(results["residual", name], residual.flatten(1)[:, : flat.shape[1]].view_as(before))


def _signs(blocks: Tensor) -> Tensor:
    """What codes of one bit say of blocks: the mean magnitude, with the sign of each value."""
    return torch.where(blocks >= 0, 1, -1) * blocks.abs().mean(-1, keepdim=True)


@pytest.mark.parametrize("codec", CODECS)
def test_replicas_stay_equal_where_sums_of_two_steps_hold_tensors_of_other_ranks(codec: str) -> None:
    """A block of codes has elements of one tensor, in every step: else what a rank has of one decided on another."""
    model, call = net()
    annotations = {"x": P("dp", None), "y": P("dp"), "up.weight": P("tp"), "down.weight": P(None, "tp")}
    mesh = Mesh(node=2, dp=2, tp=3)
    data = {"x": P(("node", "dp")), "y": P(("node", "dp"))}
    compiled = compile(model, mesh, annotations | data, args=call, wire={"node": codec})
    gradients = compiled.simulate(*call)[1]  # which compares replicas
    assert all(each is not None and each.isfinite().all() for each in gradients.values())


def test_residuals_have_the_names_of_their_gradients_behind_a_bucket_too() -> None:
    """With stages of ZeRO over other axes sums follow sums; frozen parameters let the others keep theirs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
    x = torch.randn(8, 4, 64, dtype=torch.float64)
    zero = Zero("dp", 1)
    annotations = {"input": P("dp", "cp")}
    parallel = shardc.parallelize(model, Mesh(dp=2, cp=2), annotations, zero=zero, wire={"dp": "1bit"})
    parallel(x).square().mean().backward()
    residuals = {name: each.sum(0) for name, (each,) in parallel.shardc.feedback.residuals.by_name().items()}
    model(x).square().mean().backward()
    assert residuals.keys() == dict(model.named_parameters()).keys()
    for (name, own), other in zip(model.named_parameters(), parallel.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        torch.testing.assert_close(other.grad + residuals[name], own.grad, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(("codec", "stage"), [("1bit", None), ("topk:0.02", 2), ("1bit", 3)])
def test_ranks_of_a_job_train_as_virtual_ranks_and_go_on_from_a_checkpoint(
    gloo: GlooPool, tmp_path: Path, codec: str, stage: Literal[2, 3] | None
) -> None:
    """On the same mesh to the bit as without a stop, whether the call is compiled before the checkpoint is loaded."""
    expected = _trained(Mesh(dp=2, tp=2), codec, stage, tmp_path / "virtual")
    assert gloo.run(_on_ranks, codec, stage, tmp_path / "gloo") == [expected] * 4
    assert _resumed(Mesh(dp=2, tp=2), codec, stage, tmp_path / "gloo", is_compiled=True) == expected
    assert gloo.run(_resumed_on_ranks, codec, stage, tmp_path / "virtual") == [expected] * 4


def _on_ranks(codec: str, stage: Any, folder: Path) -> list[bytes]:
    return _trained(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), codec, stage, folder)


def _resumed_on_ranks(codec: str, stage: Any, folder: Path) -> list[bytes]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _resumed(mesh, codec, stage, folder, is_compiled=False)


def _parallel(mesh: Any, codec: str, stage: Any, is_compiled: bool = True) -> tuple[Any, Any, Any]:
    model, call = net(torch.float32)
    zero = None if stage is None else Zero("dp", stage)
    given = {"args": call} if is_compiled else {}
    annotations = DATA | (TENSOR if "tp" in Mesh.of(mesh).axis_names else {})
    parallel = shardc.parallelize(model, mesh, annotations, wire={"dp": codec}, zero=zero, **given)
    return parallel, torch.optim.SGD(parallel.parameters(), 0.1), call


def _step(parallel: Any, optimizer: Any, call: Any) -> None:
    optimizer.zero_grad()
    parallel(*call).backward()
    optimizer.step()


def _trained(mesh: Any, codec: str, stage: Any, folder: Path) -> list[bytes]:
    """The bits of the parameters after three steps; saved after the second."""
    parallel, optimizer, call = _parallel(mesh, codec, stage)
    for i in range(3):
        if i == 2:
            shardc.save(folder, parallel, optimizer).wait()
        _step(parallel, optimizer, call)
    return _bits(parallel)


def _resumed(mesh: Any, codec: str, stage: Any, folder: Path, is_compiled: bool) -> list[bytes]:
    """The same of the last step alone."""
    parallel, optimizer, call = _parallel(mesh, codec, stage, is_compiled)
    shardc.load(folder, parallel, optimizer)
    _step(parallel, optimizer, call)
    return _bits(parallel)


def _bits(parallel: nn.Module) -> list[bytes]:
    return [whole(each).detach().numpy().tobytes() for each in parallel.parameters()]


def test_a_gradient_that_is_not_asked_for_leaves_its_residual(gloo: GlooPool) -> None:
    """Of an input alone, of one parameter, or of some that backward names; also while other sums wait."""
    _ask_for_some(Mesh(dp=2, tp=2))
    gloo.run(_ask_for_some_on_ranks)


def _ask_for_some_on_ranks() -> None:
    _ask_for_some(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def _ask_for_some(mesh: Any) -> None:
    model, (x, y) = net()
    parallel = shardc.parallelize(model, mesh, DATA | TENSOR, wire={"dp": "1bit"}, args=(x, y))
    for _ in range(3):
        for each in (model, parallel):
            each(x, y).backward()
            each(x, y).backward(inputs=[each.up.weight])
        other = x.clone().requires_grad_()
        torch.autograd.grad(parallel(other, y), [other])
    found = parallel.shardc.feedback.residuals.by_name()
    for name, parameter in model.named_parameters():
        total = whole(parallel.get_parameter(name).grad) + sum(whole(each).sum(0) for each in found[name])
        torch.testing.assert_close(total, parameter.grad, rtol=1e-6, atol=1e-8, msg=name)
    before = whole(found["up.bias"][0]).clone()
    torch.autograd.grad(parallel(x, y), [parallel.head.weight])
    assert torch.equal(whole(found["up.bias"][0]), before)


@pytest.mark.parametrize("bucket", [1, 2**25])
def test_what_a_collective_with_feedback_receives_is_known(bucket: int) -> None:
    model, call = net(torch.float32)
    program = compile(model, Mesh(node=2, dp=2), BOTH, args=call, wire={"node": "1bit"}, bucket=bucket).whole
    for node in filter(is_collective, program.calls):
        assert len(values_received(node)) == len(values_sent(node))


@pytest.mark.parametrize("stage", [None, 1, 2])
def test_codes_of_several_backwards_are_sent_once(gloo: GlooPool, stage: Literal[1, 2] | None) -> None:
    """Under stage 2 in each, but for small gradients. Either way these and what is left out are the sums."""
    counts = (1, 1, 3, 3, 2, 4, 4)
    for found in gloo.run(_sent_by_backwards, stage, counts):
        assert [round(each) for each in found] == [*(counts if stage == 2 else (1, 1, 2, 1, 1, 2, 1))]


def _sent_by_backwards(stage: Literal[1, 2] | None, counts: Sequence[int]) -> tuple[float, ...]:
    """For each step of several backwards, how many times the bytes of codes of one backward it has sent."""
    (model, _), mesh = net(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    zero = None if stage is None else Zero("dp", stage)
    parallel = shardc.parallelize(model, mesh, DATA | TENSOR, wire={"dp": "1bit"}, zero=zero)
    traffic, generator, found = parallel.shardc.conversion.comm.traffic[0], torch.Generator().manual_seed(1), []
    before = dict.fromkeys(dict(model.named_parameters()), 0.0)
    for count in counts:
        traffic.clear()
        for each in (model, parallel):
            each.zero_grad()
        for _ in range(count):
            x, y = torch.randn(8, 60, generator=generator).double(), torch.randint(35, (8,), generator=generator)
            for each in (model, parallel):
                each(x, y).backward()
        gradients = {name: whole(each.grad) for name, each in parallel.named_parameters()}
        residuals = {name: whole(each).sum(0) for name, (each,) in parallel.shardc.feedback.residuals.by_name().items()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name] + residuals[name] - before[name], parameter.grad, msg=name)
        codes = [each for each in parallel.program.collectives if each.codec and each.kind == "all_to_all"]
        found.append(traffic.bytes["all_to_all"] / sum(each.wire_bytes for each in codes))
        before = residuals
    return tuple(found)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 3, "tp": 2}, {"dp": 8}])
def test_a_checkpoint_is_loaded_on_another_mesh_with_the_same_sums(tmp_path: Path, sizes: dict[str, int]) -> None:
    """Without another mesh's ranks each has an equal part; a module that sends values has none."""
    parallel, first, call = _parallel(Mesh(dp=4), "1bit", 2)
    for _ in range(2):
        _step(parallel, first, call)
    shardc.save(tmp_path, parallel, first).wait()
    sums = {name: each.sum(0) for name, (each,) in parallel.shardc.feedback.residuals.by_name().items()}
    other, optimizer, _ = _parallel(Mesh(**sizes), "1bit", None)
    _step(other, optimizer, call)  # whose residuals are replaced
    shardc.load(tmp_path, other, optimizer)
    found = other.shardc.feedback.residuals.by_name()
    assert found.keys() == sums.keys()
    for name, (each,) in found.items():
        assert len(each) == sizes["dp"]
        torch.testing.assert_close(each.sum(0), sums[name])
    for is_compiled in (True, False):
        again, optimizer, _ = _parallel(Mesh(**sizes), "1bit", None, is_compiled)
        shardc.load(tmp_path, again, optimizer)
        if not is_compiled:
            again(*call)
        shardc.save(tmp_path / f"{is_compiled}", again, optimizer).wait()  # before any backward
        shardc.load(tmp_path / f"{is_compiled}", parallel, first)
        for name, (each,) in parallel.shardc.feedback.residuals.by_name().items():
            torch.testing.assert_close(each.sum(0), sums[name])
    plain = shardc.parallelize(net(torch.float32)[0], Mesh(dp=2), DATA, args=call)
    shardc.load(tmp_path, plain)
    assert plain(*call).isfinite()


def test_a_gradient_that_is_no_number_leaves_nothing_behind() -> None:
    """After an overflow the next step is as good as any."""
    parallel, optimizer, (x, y) = _parallel(Mesh(dp=2), "1bit", None)
    parallel(x * torch.inf, y).backward()
    assert not all(each.grad.isfinite().all() for each in parallel.parameters())
    assert all(each.isfinite().all() for (each,) in parallel.shardc.feedback.residuals.by_name().values())
    _step(parallel, optimizer, (x, y))
    assert parallel(x, y).isfinite()


def test_feedback_is_for_gradients_and_for_what_a_key_names() -> None:
    """Parameters and activations are sent as they are, where a key is an axis alone."""
    model, call = net(torch.float32)
    mesh, zero = Mesh(dp=2, tp=2), Zero("dp", 3)
    compiled = compile(model, mesh, DATA | TENSOR, args=call, zero=zero, wire={"dp": "1bit", "tp": "topk:0.1"})
    coded = {(each.axes, each.phase) for each in compiled.collectives if each.codec}
    assert coded == {(("dp",), "backward")}
    assert any("wire names 'tp'" in note for note in compiled.program.notes)
    named = compiled.recompile(wire={"dp parameters": "1bit", "tp activations": "topk:0.1"})
    assert {each.axes for each in named.collectives if each.codec} == {("dp",), ("tp",)}
    assert not any(put.kind == "residual" for put in named.program.inputs)


@pytest.mark.parametrize("name", ["topk", "topk:0", "topk:0.6", "topk:x", "2bit", "topk:nan"])
def test_a_name_of_no_codec_is_refused(name: str) -> None:
    model, call = net(torch.float32)
    with pytest.raises(OptionError, match="there is no such codec"):
        compile(model, Mesh(dp=2), DATA, args=call, wire={"dp": name})


def test_training_reaches_the_loss_of_values() -> None:
    """With 1 bit, and with one of a hundred values: without feedback neither would."""
    losses = {codec: _final_loss(codec) for codec in (None, "1bit", "topk:0.01")}
    assert losses["1bit"] < 1.02 * losses[None]
    assert losses["topk:0.01"] < 1.1 * losses[None]


def _final_loss(codec: str | None) -> float:
    torch.manual_seed(0)
    model, teacher, found = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(32, 8), 0.0
    parallel = shardc.parallelize(model, Mesh(dp=4), {"input": P("dp")}, wire={"dp": codec} if codec else None)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    for i in range(300):
        x = torch.randn(32, 32)
        loss = (parallel(x) - (x @ teacher).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += loss.item() / 50 if i >= 250 else 0.0
    return found


@pytest.mark.parametrize(("codec", "row"), [("1bit", "0.035"), ("topk:0.02", "0.015")])
def test_a_dump_has_the_bytes_and_the_error_of_the_codec(codec: str, row: str) -> None:
    model, call = net(torch.float32)
    text = compile(model, Mesh(dp=2), DATA, args=call, wire={"dp": codec}).dump()
    assert re.search(rf"^ *{re.escape(codec)} .* {row} +\d\d\.\d\d%$", text, re.MULTILINE)


def test_residuals_are_written_over_and_held_once(gloo: GlooPool) -> None:
    """So a step takes memory for what was left out, and not for what is left out besides."""
    model, call = net(torch.float32)
    plain = compile(model, Mesh(dp=4), DATA, args=call, wire={"dp": "int8"}, bucket=1)
    fed = plain.recompile(wire={"dp": "1bit"})
    assert fed.memory["residuals"] == 4 * sum(each.numel() for each in model.parameters())
    largest = 4 * max(each.numel() for each in model.parameters())
    assert fed.memory["peak"] - plain.memory["peak"] <= fed.memory["residuals"] + 3 * largest
    assert gloo.run(_places_of_residuals) == [True] * 4


def _places_of_residuals() -> bool:
    """Whether residuals keep their memory over a step, and get other values."""
    parallel, optimizer, call = _parallel(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), "1bit", None)
    results: list[Tensor] = []
    _step(parallel, optimizer, call)
    residuals = [each for (each,) in parallel.shardc.feedback.residuals.by_name().values()]
    before = [(each._local_tensor.data_ptr(), each._local_tensor.clone()) for each in residuals]
    runner = next(iter(parallel.shardc.variants.values())).latest.runner
    backward = runner.backward

    def watched(*args: Any) -> Any:
        rows = backward(*args)
        results.extend(value for value in rows[0] if value is not None)
        return rows

    runner.backward = watched
    _step(parallel, optimizer, call)
    places = {value.data_ptr() for value in results}
    return all(
        place in places and not torch.equal(each._local_tensor, old)
        for each, (place, old) in zip(residuals, before, strict=True)
    )
