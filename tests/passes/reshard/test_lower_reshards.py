"""lower_reshards puts the collectives of a plan where a reshard stood, with its source and cause."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from reshard_case import Case, cases, integers
from torch import fx

from shardc.language.mesh import Mesh
from shardc.language.partition import P
from shardc.language.sharding import Sharding, TensorType
from shardc.passes.reshard.lower_reshards import lower_reshards
from shardc.program.collective import COLLECTIVES, reshard
from shardc.program.program import Input, Output, Program
from shardc.program.provenance import Endpoint, ShardingChange, Source
from shardc.program.traffic import collectives_of
from shardc.runtime.simulator import interpret

F32 = torch.float32


def resharded(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> Program:
    """A program of one input and one reshard."""
    graph, type_ = fx.Graph(), TensorType(shape, F32)
    x = graph.placeholder("x")
    y = graph.call_function(reshard, (x,))
    graph.output((y,))
    program = Program(graph, (Input("x", "input", type_),), (Output("y", "output"),), src.mesh, "agreed")
    for node, sharding in ((x, src), (y, dst)):
        program.set_type(node, type_)
        program.set_sharding(node, sharding)
    program.set_source(y, Source("block.0", "model.py:7", "backward"))
    program.set_causes(y, (ShardingChange(Endpoint("x"), type_, src, Endpoint("mm"), dst),))
    return program


def test_a_reshard_becomes_its_steps_and_keeps_source_and_cause() -> None:
    mesh = Mesh(dp=2, tp=4)
    src = Sharding(mesh, P("dp").sharding(mesh, (8, 64), "x").dims, ((mesh.axis("tp"), "sum"),))
    program = resharded(src, P(None, "tp").sharding(mesh, (8, 64), "y"), (8, 64))
    lowered = lower_reshards(program)
    assert (program.level, lowered.level) == ("agreed", "lowered")
    assert [lines(node, lowered) for node in lowered.calls] == [
        "reduce_scatter_tp: f32[8@dp, 64@tp] = reduce_scatter(x, ('tp',), 'sum', 1)",
        "all_gather_dp: f32[8, 64@tp] = all_gather(reduce_scatter_tp, ('dp',), 0)",
    ]
    for node in lowered.calls:
        assert lowered.source(node) == Source("block.0", "model.py:7", "backward")
        assert lowered.causes(node) == program.causes(next(program.calls))
    assert [(each.kind, each.phase, each.wire_bytes) for each in collectives_of(lowered)] == [
        ("reduce_scatter", "backward", 768), ("all_gather", "backward", 256),
    ]  # fmt: skip


def test_blocks_are_views_to_plain_dims_and_back() -> None:
    mesh = Mesh(dp=2, tp=4)
    shape = (8, 48)
    program = resharded(*(P.parse(spec).sharding(mesh, shape, "x") for spec in ("-,blocks(3,tp)", "tp,-")), shape)
    lowered = lower_reshards(program)
    assert [lines(node, lowered) for node in lowered.calls] == [
        "view: f32[8, 3, 16@tp] = view(x, [8, 3, 16])",
        "all_to_all_tp: f32[8@tp, 3, 16] = all_to_all(view, ('tp',), 2, 0)",
        "view_1: f32[8@tp, 48] = view(all_to_all_tp, [8, 48])",
    ]


def lines(node: fx.Node, program: Program) -> str:
    kind = COLLECTIVES.get(node.target, "view")  # type: ignore[call-overload]
    args = ", ".join(str(arg) if isinstance(arg, fx.Node) else repr(arg) for arg in node.args)
    return f"{node.name}: {program.sharding(node).text(program.type(node))} = {kind}({args})"


def test_a_reshard_to_the_same_sharding_is_nothing() -> None:
    whole = Sharding.replicated(Mesh(dp=2), 1)
    lowered = lower_reshards(resharded(whole, whole, (4,)))
    assert list(lowered.calls) == [] and lowered.results == lowered.placeholders


@settings(max_examples=60)
@given(cases())
def test_a_lowered_program_is_the_identity_on_one_device(case: Case) -> None:
    x = integers(case.shape).float()
    lowered = lower_reshards(resharded(case.src, case.dst, case.shape))
    lowered.graph.lint()
    assert torch.equal(interpret(lowered, [x])[0], x)
    last = lowered.results[0]
    assert last is not None and lowered.type(last).shape == case.shape
