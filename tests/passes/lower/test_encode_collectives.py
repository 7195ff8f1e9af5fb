"""Collectives that send codes: numbers, bytes, order, and what is sent as it is."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Literal

import pytest
import torch
from gloo_pool import GlooPool
from gpt import GPT, Config, gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_models import whole
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import shardc
from shardc import Mesh, P, Pipeline, Remat, Zero, compile
from shardc.api import Compiled
from shardc.language.errors import OptionError
from shardc.ops import codes
from shardc.ops.codes import decode_rows, encode_rows
from shardc.program.coding import content
from shardc.program.coding.nodes import CODINGS, decode, encode
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.simulator import interpret, simulate
from shardc.wire import CODECS, CONTENTS, Codec, codec_named, key_of

LOSSLESS = "lossless"
EVERYTHING = dict.fromkeys(CONTENTS, LOSSLESS)
MOST = {"bf16": 0.5, "fp16": 0.5, "fp8": 0.27, "int8": 0.27, "int4": 0.14, "1bit": 0.04}  # of the bytes of float32


class Net(nn.Module):
    """Two linear layers over 60 features, with a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(60, 90), nn.Linear(90, 60)
        self.norm, self.head = nn.LayerNorm(60), nn.Linear(60, 35, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.norm(x + self.down(torch.relu(self.up(x))))), y)


def sent_by(compiled: Compiled) -> int:
    """The bytes that a rank sends in a step."""
    return sum(each.times * each.wire_bytes for each in compiled.collectives)


def net(dtype: torch.dtype = torch.float64) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Net().to(dtype), (torch.randn(24, 60, dtype=dtype), torch.randint(35, (24,)))


@pytest.fixture
def lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that loses nothing, for any number of values, so that coded programs must have the numbers of others."""
    monkeypatch.setitem(CODECS, LOSSLESS, Codec(LOSSLESS, 1, 1, 0.0))
    monkeypatch.setitem(codes.CASTS, LOSSLESS, torch.float64)
    monkeypatch.setattr(content, "FEWEST", 0)


DATA = {"x": P("dp"), "y": P("dp")}
TENSOR = {"up.weight": P("tp"), "down.weight": P(None, "tp"), "head.weight": P("tp")}
PLANS: dict[str, tuple[Mesh, dict[str, P], dict[str, Any]]] = {
    "data": (Mesh(dp=4), DATA, {}),
    "data, uneven": (Mesh(dp=5), DATA, {"bucket": 4000}),
    "data and tensor": (Mesh(dp=2, tp=3), DATA | TENSOR, {}),
    "tensor, sequence": (Mesh(tp=2), TENSOR | {"norm.weight": P("tp")}, {}),
    "two axes of data": (Mesh(node=2, dp=2), {"x": P(("node", "dp")), "y": P(("node", "dp"))}, {}),
    "two axes of data, one coded": (
        Mesh(node=2, dp=3),
        {"x": P(("node", "dp")), "y": P(("node", "dp"))},
        {"wire": {"node": LOSSLESS}},
    ),
    "stage 1": (Mesh(dp=3), DATA, {"zero": Zero("dp", 1)}),
    "stage 2": (Mesh(dp=4, tp=2), DATA | TENSOR, {"zero": Zero("dp", 2), "bucket": 4000}),
    "stage 3": (Mesh(dp=7), DATA, {"zero": Zero("dp", 3)}),
    "stage 3, recomputed": (Mesh(dp=2, tp=2), DATA | TENSOR, {"zero": Zero(), "remat": Remat("up", collectives=True)}),
    "pipeline": (Mesh(pp=2, dp=2), DATA, {"pipeline": Pipeline("pp", 3), "zero": Zero()}),
    "pipeline, tensor": (Mesh(pp=2, tp=2), TENSOR, {"pipeline": Pipeline("pp", 4, "zb-h1")}),
}


@pytest.mark.usefixtures("lossless")
@pytest.mark.parametrize("name", PLANS)
def test_without_loss_the_numbers_are_those_of_one_device(name: str) -> None:
    """Also over two backwards whose reductions run once."""
    mesh, annotations, options = PLANS[name]
    model, call = net()
    parallel = shardc.parallelize(model, mesh, annotations, args=call, **{"wire": EVERYTHING, **options})
    assert {node.target for node in parallel.program.whole.calls} & CODINGS
    for times in (1, 2):
        parallel.zero_grad()
        for _ in range(times):
            loss = parallel(*call)
            loss.backward()
        expected = model(*call)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        for (path, parameter), gradient in zip(parallel.named_parameters(), wanted, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, times * gradient, rtol=1e-10, atol=1e-10, msg=path)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), inner=st.integers(1, 200),
    count=st.integers(2, 5), codec=st.sampled_from([name for name in CODECS if not CODECS[name].has_feedback]),
    scale=st.sampled_from([1e-30, 1.0, 1e4]),
)  # fmt: skip
def test_values_come_back_within_half_a_code_of_their_block(
    rows: int, columns: int, inner: int, count: int, codec: str, scale: float
) -> None:
    """Of an all_to_all among one rank and of an all_gather, for shapes that fill no block."""
    torch.manual_seed(rows)
    x = scale * torch.randn(rows, columns, inner)
    found = CODECS[codec]
    sent = encode_rows("all_gather", codec, 1, (1,), (columns,), x)
    assert sent.nbytes == found.nbytes(x.numel())
    received = torch.cat([sent] * count)
    shape = (rows, count * columns, inner)
    (joined,) = [decode_rows("all_gather", codec, (1,), (tuple(x.shape),), (shape,), x.dtype, received)]
    assert isinstance(joined, Tensor)
    assert all(torch.equal(each, joined[:, :columns]) for each in joined.split(columns, 1))
    steps = {"int8": 1 / 254, "int4": 1 / 14, "fp8": 1 / 16, "bf16": 2**-8, "fp16": 2**-11}
    tiny = {"fp16": 2**-24}.get(codec, 0.0)
    assert (joined[:, :columns] - x).abs().max() <= 1.001 * steps[codec] * x.abs().max() + tiny


@pytest.mark.parametrize("codec", [*CODECS, "topk:0.001", "topk:0.01", "topk:0.3"])
def test_the_error_that_is_printed_is_that_of_normal_values(codec: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2**18)
    shapes = ((2**18,),)
    y = decode_rows(
        "all_gather", codec, (0,), shapes, shapes, x.dtype, encode_rows("all_gather", codec, 1, (0,), (1,), x)
    )
    assert isinstance(y, Tensor)
    assert ((y - x).square().mean() / x.square().mean()).sqrt() == pytest.approx(codec_named(codec).error, rel=0.05)


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4", "1bit"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_with_a_value_that_is_no_number_comes_back_as_none(codec: str, bad: float) -> None:
    """So that a GradScaler sees it on every rank."""
    x = torch.ones(600)
    x[3] = bad
    y = decode_rows("all_gather", codec, (0,), ((600,),), ((600,),), x.dtype,
                    encode_rows("all_gather", codec, 1, (0,), (600,), x))  # fmt: skip
    assert isinstance(y, Tensor)
    assert y[:128].isnan().all()
    assert y[512:].isfinite().all()


class Moves(nn.Module):
    """A value that changes its sharding, so that a collective of one kind is needed."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


KINDS = {
    "all_gather": ({"x": P("a"), "y": P("a"), "output:output": P(None, None)}, {"all_gather"}),
    "all_to_all": ({"x": P("a"), "y": P("a"), "output:output": P(None, "a")}, {"all_to_all"}),
    "collective_permute": ({"x": P("a"), "y": P("a"), "output:output": P("b")}, {"collective_permute"}),
}


class Product(nn.Module):
    """A product whose inner dim is cut, so that a sum is open."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


KINDS_OF_SUMS = {
    "all_reduce": (P(None, None), {"all_to_all", "all_gather"}),
    "reduce_scatter": (P("a"), {"all_to_all"}),
}


@pytest.mark.parametrize("codec", MOST)
@pytest.mark.parametrize("kind", [*KINDS, *KINDS_OF_SUMS])
def test_bytes_of_every_kind(kind: str, codec: str) -> None:
    """Announced, and counted by virtual ranks."""
    mesh, call = Mesh(a=2, b=2), (torch.randn(256, 256), torch.randn(256, 256))
    if kind in KINDS:
        model, (annotations, kinds) = Moves(), KINDS[kind]
    else:
        output, kinds = KINDS_OF_SUMS[kind]
        model, annotations = Product(), {"x": P(None, "a"), "y": P("a"), "output:output": output}
    plain = compile(model, mesh, annotations, args=call, train=False)
    coded = plain.recompile(wire={"a activations": codec, "b activations": codec})
    assert {each.kind for each in plain.collectives} == {kind}
    assert {each.kind for each in coded.collectives} == kinds
    assert sent_by(coded) <= MOST[codec] * sent_by(plain)
    comm = SimulatedComm(mesh)
    (found, _), expected = coded.run(partial(simulate, comm=comm), coded.program, call, {}), model(*call)
    assert max(sum(each.bytes.values()) for each in comm.traffic) == sent_by(coded)
    assert (found - expected).norm() <= 3 * CODECS[codec].error * expected.norm()


def test_a_sum_over_a_fast_and_a_slow_axis_crosses_the_slow_one_in_pieces_as_codes() -> None:
    """Between nodes a rank sends codes of its part, in the node what it sends of a sum; no block has two tensors."""
    torch.manual_seed(0)
    model = GPT(Config(width=256))
    call = torch.randint(128, (2, 16, 32)).unbind()
    mesh, data = Mesh(node=2, gpu=4), {"ids": P(("node", "gpu")), "targets": P(("node", "gpu"))}
    plain = compile(model, mesh, data, args=call)
    coded = plain.recompile(wire={"node": "int8"})
    sent = {
        axes: sum(each.wire_bytes for each in coded.collectives if each.axes == axes) for axes in (("node",), ("gpu",))
    }
    gradients = 4 * sum(each.numel() for each in model.parameters())
    assert sent["node",] <= 0.27 * gradients / 4
    assert sent["gpu",] <= 1.01 * 2 * gradients * 3 / 4
    (_, expected), (_, found) = plain.simulate(*call), coded.simulate(*call)
    for name, gradient in expected.items():
        assert gradient is not None
        assert (found[name] - gradient).norm() <= 0.02 * gradient.norm(), name


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_bytes_of_gradients_and_parameters(codec: str) -> None:
    """Those of small tensors too, which go together; the sums of losses and targets, 12 bytes, are as they were."""
    model = GPT(Config(width=256))
    call = torch.randint(128, (2, 16, 32)).unbind()
    for options in ({}, {"zero": Zero("dp", 3)}):
        plain = compile(model, Mesh(dp=4), {"ids": P("dp"), "targets": P("dp")}, args=call, **options)
        assert sent_by(plain.recompile(wire={"dp": codec})) <= MOST[codec] * sent_by(plain) + 6


def test_largest_values_and_sums_of_a_softmax_are_sent_as_they_are() -> None:
    """The vocabulary is cut; a product is coded."""
    model, call = net(torch.float32)
    compiled = compile(model, Mesh(tp=2), TENSOR, args=call, wire={"tp": "int4"})
    plain = [each for each in compiled.collectives if each.dtype == "float32"]
    assert {each.kind for each in plain} == {"all_reduce"}
    shapes = {each.local_shape_in for each in plain if each.phase == "forward"}
    assert shapes <= {(), (24, 1), (48,)}
    assert "uint8" in {each.dtype for each in compiled.collectives}


def test_sums_of_a_batch_norm_are_sent_as_they_are() -> None:
    """Those of forward and of backward, on which the gradients of layers before it depend."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 8), nn.Tanh())
    call = (torch.randn(16, 8),)
    compiled = compile(model, Mesh(dp=4), {"input": P("dp")}, args=call, wire={"dp": "int8"})
    (_, plain), (_, coded) = (compiled.recompile(wire=wire).simulate(*call) for wire in (None, {"dp": "int8"}))
    assert all(torch.equal(plain[name], coded[name]) for name in ("1.weight", "1.bias"))
    assert not any(torch.equal(plain[name], coded[name]) for name in ("0.weight", "3.weight"))


def test_gradients_are_sent_while_the_next_ones_are_encoded() -> None:
    """The sum of a bucket is made after the next one is sent, and it is decoded after the next one's sum is."""
    model, call, _, annotations = gpt(Mesh(dp=4))
    program = compile(model, Mesh(dp=4), annotations, args=call, wire={"dp": "int8"}, bucket=50_000).whole
    names = [each.target.__name__ for each in program.calls if each.target in CODINGS or "dp" in each.name]
    steps = [name for name in names if name in ("all_to_all", "add_codes", "decode")]
    count = steps.count("all_to_all")
    assert count > 3
    first, then, last = ["all_to_all"], ["all_to_all", "add_codes"], ["add_codes", "decode", "decode"]
    assert steps[:3] == [*first, *then]
    assert steps[3:-3] == ["all_to_all", "decode", "add_codes"] * (count - 2)
    assert sorted(steps[-3:]) == last


def test_the_whole_program_still_runs_on_one_device() -> None:
    """On whole values codes are the values themselves."""
    model, call = net()
    compiled = compile(model, Mesh(dp=2, tp=3), DATA | TENSOR, args=call, wire={"dp": "int4", "tp": "int4"})
    loss, _ = compiled.run(interpret, compiled.whole, call, {})
    torch.testing.assert_close(loss, model(*call).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("codec", "stage"), [("int8", None), ("bf16", 3), ("int4", 1)])
def test_ranks_of_a_job_have_equal_bits_and_those_of_virtual_ranks(
    gloo: GlooPool, codec: str, stage: Literal[1, 3] | None
) -> None:
    found = gloo.run(_step, codec, stage)
    assert found == [_gradients(Mesh(dp=2, tp=2), codec, stage)] * 4


def _step(codec: str, stage: Literal[1, 3] | None) -> list[bytes]:
    return _gradients(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), codec, stage)


def _gradients(mesh: Any, codec: str, stage: Literal[1, 3] | None) -> list[bytes]:
    """The bits of the loss and of all gradients of a step."""
    model, call = net(torch.float32)
    zero = None if stage is None else Zero("dp", stage)
    parallel = shardc.parallelize(model, mesh, DATA | TENSOR, args=call, wire={"dp": codec, "tp": codec}, zero=zero)
    loss = parallel(*call)
    loss.backward()
    return [whole(each).detach().numpy().tobytes() for each in (loss, *(x.grad for x in parallel.parameters()))]


@pytest.mark.parametrize(
    ("wire", "edge", "expected"),
    [
        ({"dp": "int8"}, ("dp", "gradients"), "int8"),
        ({"dp": "int8"}, ("tp", "gradients"), None),
        ({"dp": "int8", "gradients": "bf16"}, ("dp", "gradients"), "bf16"),
        ({"dp gradients": "int4", "gradients": "bf16"}, ("dp", "gradients"), "int4"),
        ({"dp": "int8", "dp activations": None}, ("dp", "activations"), None),
        ({"dp": "int8", "dp blocks.1.*": None}, ("dp", "gradients"), "int8"),
        ({"dp": "int8", "dp blocks.0.*": None}, ("dp", "gradients"), None),
    ],
)
def test_the_key_with_most_words_counts_and_of_several_the_last(
    wire: dict[str, str | None], edge: tuple[str, str], expected: str | None
) -> None:
    found = key_of(wire, *edge, ["blocks.0.mlp"])
    assert (found and wire[found]) == expected


def test_a_key_that_no_collective_has_is_said() -> None:
    model, call = net(torch.float32)
    wire = {"dp gradients": "int8", "dp activations": "bf16", "dp up.*": None}
    compiled = compile(model, Mesh(dp=2), DATA, args=call, wire=wire)
    told = [note for note in compiled.program.notes if note.startswith("wire")]
    assert told == ["wire names 'dp activations', but no collective that carries more than a few floats is meant by it"]
    with pytest.warns(UserWarning, match="dp activations"):
        shardc.parallelize(model, Mesh(dp=2), DATA, args=call, wire=wire)(*call)


def test_contents_and_paths_of_a_model_choose_its_codecs() -> None:
    model, call, _, annotations = gpt(Mesh(dp=4))
    wire = {"dp gradients": "int4", "dp parameters": "int8", "dp blocks.1.* gradients": None}
    compiled = compile(model, Mesh(dp=4), annotations, args=call, wire=wire, zero=Zero())
    codecs = {(node.args[0], node.args[3]) for node in compiled.whole.calls if node.target is decode}
    assert dict(codecs) == {"reduce_scatter": "int4", "all_gather": "int8"}
    plain = [each for each in compiled.collectives if each.kind == "reduce_scatter"]
    assert plain and all("blocks.1" in cause for each in plain for cause in each.cause.splitlines())


def test_a_codec_of_one_module_reaches_no_other_through_a_bucket() -> None:
    """Its bias is too small to be coded; joined with values of other modules, it would have these coded."""
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(8, 64)
    plan = compile(model, Mesh(dp=2), {"input": P("dp")}, args=(x,), wire={"dp 2.*": "int8"})
    coded = [node for node in plan.whole.calls if node.target is encode]
    assert [len(values) for node in coded if (values := values_of(node)) and node.args[0] == "all_reduce"] == [1]
    _, exact = plan.recompile(wire=None).simulate(x)
    _, found = plan.simulate(x)
    assert {name for name in exact if not torch.equal(found[name], exact[name])} == {"2.weight"}


def values_of(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.args[4:] if isinstance(each, fx.Node)]


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        ("int8", "say wire={'dp': 'int8'}"),
        ({"ddp": "int8"}, "did you mean dp?"),
        ({"dp": "int9"}, "did you mean int8"),
        ({"dp gradient": "int8"}, "did you mean gradients?"),
        ({"": "int8"}, "say one of dp"),
    ],
)
def test_errors_say_what_to_type(wire: Any, problem: str) -> None:
    model, call = net()
    with pytest.raises(OptionError, match=re.escape(problem)):
        compile(model, Mesh(dp=2), DATA, args=call, wire=wire)
