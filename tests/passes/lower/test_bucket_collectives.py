"""bucket_collectives: several that go together, as one."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from cases import few
from gpt import DATA, GPT, MEGATRON, Config
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_models import Model, some_targets
from printed import block, compiled, parameter, printed, value
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, ShardingError, Zero
from shardc.language.machine import Machine
from shardc.program.communication import deferrable, is_collective, members
from shardc.program.traffic import collectives_of
from shardc.runtime.comm.comm import BucketLayout
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.simulator import simulate

FSDP = DATA | {"param:*": P("dp")}


def two_layers(x: Tensor, u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    return ((x @ u).relu() @ d + b).square().sum()


WEIGHTS = {"u": parameter(6, 4), "d": parameter(4, 6), "b": parameter(6)}


def test_gradients_wait_for_each_other_in_the_order_in_which_they_are_made() -> None:
    program = compiled(two_layers, Mesh(dp=2), {"x": P("dp")}, train=True, x=value(8, 6), **WEIGHTS)
    assert printed(program.at("bucket_collectives"), "backward") == block(
        """
        expand_1: f32[8@dp, 6] = expand(tangent(output), [8, 6])
        pow_2: f32[8@dp, 6] = pow(add, 1.0)
        mul: f32[8@dp, 6] = mul(pow_2, 2.0)
        mul_1: f32[8@dp, 6] = mul(expand_1, mul)
        sum_2: f32[1, 6]{sum dp} = sum(mul_1, (0,), True)
        reshape: f32[6]{sum dp} = reshape(sum_2, [6])
        dot_2: f32[4, 6]{sum dp} = dot(relu, mul_1, "a b, a c -> b c")
        dot_3: f32[8@dp, 4] = dot(mul_1, d, "a b, c b -> a c")
        threshold_backward: f32[8@dp, 4] = threshold_backward(dot_3, relu, 0)
        dot_4: f32[6, 4]{sum dp} = dot(x, threshold_backward, "a b, a c -> b c")
        all_reduce_dp_bucket: (f32[6], f32[4, 6], f32[6, 4]) = BUCKET
        gradient u: all_reduce_dp_3
        gradient d: all_reduce_dp_2
        gradient b: all_reduce_dp_1
        """.replace("BUCKET", 'bucket("all_reduce", ("dp",), (("sum",), ("sum",), ("sum",)), reshape, dot_2, dot_4)')
    )


def test_gradients_reduced_once_for_several_backwards_have_buckets_of_their_own() -> None:
    """The positions of a sequence shorter than their table are summed over ranks before they are put into it."""
    ids, targets = torch.randint(128, (2, 8, 16))
    program = shardc.compile(GPT(Config(context=32)), Mesh(dp=2), DATA, args=(ids, targets)).program
    sent = zip(filter(is_collective, program.calls), collectives_of(program), strict=True)
    at_once = [found for node, found in sent if found.phase == "backward" and node not in deferrable(program)]
    assert [found.local_shape_in for found in at_once] == [(16, 64)]


def test_weights_that_one_layer_reads_are_gathered_together() -> None:
    program = compiled(two_layers, Mesh(dp=2), {"x": P("dp"), "param:*": P("dp")}, x=value(8, 6), **WEIGHTS)
    first, second = printed(program.at("bucket_collectives")).splitlines()[4:6]
    call = 'bucket("all_gather", ("dp",), ((0,), (0,), (0,)), u, d, b)'
    assert first == f"all_gather_dp_bucket: (f32[6, 4], f32[4, 6], f32[6]) = {call}"
    assert second == 'dot: f32[8@dp, 4] = dot(x, all_gather_dp, "a b, b c -> a c")'


def gpt(annotations: dict[str, P], mesh: Mesh, bucket: int = 25 * 2**20, **sizes: int) -> shardc.Compiled:
    torch.manual_seed(0)
    model = GPT(Config(**sizes)).double()  # type: ignore[arg-type]
    ids = torch.randint(model.config.vocab, (2, 8, model.config.context))
    return shardc.compile(model, mesh, annotations, args=tuple(ids), bucket=bucket)


@pytest.mark.parametrize("limit", few([1, 30_000, 100_000, 25 * 2**20], 30_000, 25 * 2**20))
@pytest.mark.parametrize("annotations", [DATA, FSDP], ids=["data parallel", "weights stored in pieces"])
def test_gradients_are_reduced_in_as_many_collectives_as_buckets_hold_them(
    annotations: dict[str, P], limit: int
) -> None:
    compiled = gpt(annotations, Mesh(dp=4), limit)
    found = json.loads(compiled.dump(format="json"))["collectives"]
    reductions = [each for each in found if each["phase"] == "backward" and each["kind"] != "all_gather"]
    gradients = sum(8 * parameter.numel() for parameter in compiled.model.parameters())
    assert sum(each["bytes"] for each in reductions) == gradients
    assert len(reductions) <= min(math.ceil(gradients / limit) + 1, len(list(compiled.model.parameters())))
    largest = max(each.bytes for each in collectives_of(compiled.at("mask_padding")))
    assert all(each["bytes"] < max(2 * limit, largest + 1) for each in found)


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=6),
    st.integers(1, 20_000),
    st.sampled_from([2, 3, 8]),
    st.sampled_from([None, Zero(stage=1), Zero(stage=2), Zero(stage=3)]),
)
def test_gradients_of_any_sizes_are_reduced_in_few_collectives(
    widths: list[int], bucket: int, ranks: int, zero: Zero | None
) -> None:
    """At most their bytes over those of a bucket, rounded up, and one; each with its padding, and less than two's."""
    with torch.device("meta"):
        model, x = (
            nn.Sequential(*(nn.Linear(8 * a, 8 * b) for a, b in pairwise(widths))),
            torch.empty(24, 8 * widths[0]),
        )
    compiled = shardc.compile(model, Mesh(dp=ranks), {"*input": P("dp")}, args=(x,), zero=zero, bucket=bucket)
    sent = [each for each in compiled.collectives if each.kind in ("all_reduce", "reduce_scatter")]
    kinds = {each.kind for each in sent}
    assert len(sent) <= math.ceil(sum(each.bytes for each in sent) / bucket) + len(kinds)
    largest = 4 * max(math.ceil(8 * a / ranks) * ranks * 8 * b for a, b in pairwise(widths))
    assert all(each.bytes < max(2 * bucket, 2 * largest) for each in sent)


def test_a_bucket_is_a_number_of_bytes() -> None:
    for wrong in (0, -1, 2.5e7, "25MB", None, True):
        with pytest.raises(ShardingError, match=f"bucket={wrong!r}(.|\n)*say 1 to let each go alone"):
            gpt(DATA, Mesh(dp=2), wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("annotations", [DATA | MEGATRON, FSDP, DATA | {"param:*attn*weight": P(None, "dp")}])
@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(dp=3, tp=1)], ids=str)
def test_a_bucket_changes_no_bit_and_sends_what_it_announces(annotations: dict[str, P], mesh: Mesh) -> None:
    compiled = gpt(annotations, mesh, layers=1)
    args = tuple(torch.randint(compiled.model.config.vocab, (2, 8, 32)))  # type: ignore[union-attr, operator]
    one_by_one = gpt(annotations, mesh, 1, layers=1)
    assert len(one_by_one.collectives) > len(compiled.collectives)
    comm = SimulatedComm(mesh)
    results = [
        each.run(lambda program, values: simulate(program, values, comm), each.program, args, {})
        for each in (one_by_one, compiled)
    ]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_value_that_is_read_early_does_not_wait_for_its_bucket() -> None:
    """Two sums of one kind, of which the second is made of the first."""

    def chained(x: Tensor, u: Tensor, d: Tensor) -> Tensor:
        return ((x @ u) @ d).sum() + (x @ u).sum()

    program = compiled(chained, Mesh(tp=2), {"x": P(None, "tp")}, x=value(8, 6), u=value(6, 4), d=value(4, 6))
    assert [each.name for each in program.collectives] == ["all_reduce_tp", "all_reduce_tp_1"]


def test_a_bucket_says_of_each_member_where_it_comes_from_and_why() -> None:
    program = compiled(two_layers, Mesh(dp=2), {"x": P("dp")}, train=True, x=value(8, 6), **WEIGHTS)
    found = program.collectives[-1]
    assert (found.name, found.kind, found.node) == ("all_reduce_dp_bucket", "all_reduce", "reshape, dot_2, dot_4")
    assert (found.local_shape_in, found.bytes, found.source.count("py:")) == ((54,), 216, 1)
    assert found.cause == (
        "reshape is f32[6]{sum dp}, the gradient b wants f32[6]; dot_2 is f32[4, 6]{sum dp}, the gradient d wants "
        "f32[4, 6]; dot_4 is f32[6, 4]{sum dp}, the gradient u wants f32[6, 4]; dp from x: P('dp')"
    )


def test_a_loss_divided_by_a_count_makes_stages_send_no_more_than_they_share() -> None:
    """Every gradient depends on the count, a sum over microbatches of the last stage; only one weight is of both."""
    model, pipeline = Model(is_tied=True), shardc.Pipeline(microbatches=4, schedule="zb-h1")
    piped = shardc.compile(model, Mesh(dp=2, pp=2), DATA, args=some_targets(), pipeline=pipeline)
    sent = [each for each in piped.collectives if each.name.startswith("send_after")]
    shared = model.head.weight.nbytes
    assert sorted(each.bytes for each in sent) == [shared, shared + 4]  # one way with the loss


def test_parameters_gathered_together_are_freed_one_by_one() -> None:
    """A bias of one element a rank, beside a weight: a view of it would hold the buffer of both."""
    model = nn.Linear(4, 2, dtype=torch.float64)
    made = shardc.compile(
        model, Mesh(dp=2), {"input": P("dp")}, args=(torch.ones(4, 4, dtype=torch.float64),), zero=Zero("dp", 3)
    )
    node = next(node for node in made.program.calls if is_collective(node) and len(members(node)) == 2)
    layout = BucketLayout.of(made.program, node)
    results = layout.unpack(torch.ones(2, sum(math.prod(shape) for shape in layout.shapes)))
    assert [each.untyped_storage().nbytes() for each in results] == [each.nbytes for each in results]


def test_sums_in_three_steps_are_joined_in_their_order() -> None:
    """Gradients are summed over the fast axis of data, over positions, and over the slow axis of data.

    Buckets of the second step are full before those of the third one, which read several of them.
    """
    mesh, data, every = Mesh(dp=2, cp=2, fast=2), ("dp", "fast"), ("dp", "cp", "fast")
    annotations = {
        "ids": P(data, "cp", ...), "targets": P(data, "cp", ...), "*.attn.proj.weight": P(data, ...),
        "*.qkv.weight": P(every, ...), "*.up.weight": P(every, ...), "*.down.weight": P(P.OPEN, every, ...),
        "tokens.weight": P(("cp", "fast"), ...), "module:positions": P(P.OPEN, "fast", ...),
    }  # fmt: skip
    with torch.device("meta"):
        model = GPT(Config(vocab=512, context=64, layers=2, heads=12, width=768))
        batch = torch.zeros(8, 64, dtype=torch.long)
    links = Machine({"*": "nvlink"}, "h100", node=4, between="infiniband")
    zero = Zero(data, 2, gather_over="fast")
    program = shardc.compile(model, mesh, annotations, args=(batch, batch), zero=zero, links=links).program
    of_backward = {found.axes for found in collectives_of(program) if found.phase == "backward"}
    assert {("fast",), ("cp",), ("dp",)} <= of_backward
