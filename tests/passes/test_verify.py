"""verify rejects a program that breaks an invariant, and wrong rules and collectives do not pass for right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from printed import compiled, parameter, value
from torch import Tensor, fx
from torch.nn import functional as F

from shardc import Mesh, P
from shardc.language.rule import RULES, OpRule, pointwise_rule
from shardc.language.sharding import WHOLE, DimSharding, Sharding, TensorType
from shardc.ops.random import uniform
from shardc.passes.verify import verify
from shardc.program.collective import all_gather, all_reduce, reduce_scatter
from shardc.program.program import Input, Output, Program
from shardc.runtime.comm.simulated import SimulatedComm

aten = torch.ops.aten
MESH = Mesh(dp=2, tp=2)
F32 = torch.float32


# Programs as the passes make them, and what breaks them.


def network(x: Tensor, w: Tensor, u: Tensor, table: Tensor) -> Tensor:
    hidden = (x @ w) @ u + F.embedding(torch.arange(8), table)
    return hidden.relu().sum()


@pytest.fixture(scope="module")
def stages() -> dict[str, Program]:
    """A program after every pass."""
    annotations = {"x": P("dp"), "w": P(None, "tp"), "table": P(None, "dp")}
    weights = {"w": parameter(6, 4), "u": parameter(4, 8), "table": parameter(8, 8)}
    return dict(compiled(network, MESH, annotations, True, x=value(8, 6), **weights).after)


Change = Callable[[Program, dict[str, fx.Node]], object]


def lies(name: str, *dims: DimSharding) -> Change:
    """A value lies otherwise."""
    return lambda program, nodes: program.set_sharding(nodes[name], Sharding(MESH, dims))


def calls(name: str, target: Any) -> Change:
    """A node calls another op."""
    return lambda program, nodes: setattr(nodes[name], "target", target)


def describes_fewer(ends: str) -> Change:
    """One input or output is not described."""
    return lambda program, nodes: setattr(program, ends, getattr(program, ends)[:-1])


def is_said_to_be(level: str) -> Change:
    """The program says that it is further than it is."""
    return lambda program, nodes: setattr(program, "level", level)


def has_type(name: str, *shape: int) -> Change:
    """A value's type is another; none where there is no shape."""
    return lambda program, nodes: program.set_type(nodes[name], TensorType(shape, F32) if shape else None)


DP, TP = DimSharding((MESH.axis("dp"),)), DimSharding((MESH.axis("tp"),))
BOTH = DimSharding(DP.axes + TP.axes)
BROKEN: dict[str, tuple[str, Change, str]] = {
    "an input is not described": ("capture", describes_fewer("inputs"), "6 placeholders, 5 inputs are described"),
    "an output is not described": ("capture", describes_fewer("outputs"), "4 results, 3 outputs are described"),
    "a value has no type": ("capture", has_type("relu"), "relu has no type"),
    "an op writes": ("capture", calls("relu", aten.relu_.default), "relu = aten.relu_.default changes its operand"),
    "a product is no dot": ("canonicalize", is_said_to_be("annotated"), "mm = aten.mm.default should be a dot"),
    "a value has no sharding": (
        "propagate",
        lambda program, nodes: program.set_sharding(nodes["relu"], None),
        "relu has no sharding",
    ),
    "a sharding is absent": (
        "propagate",
        lambda program, nodes: program.set_sharding(nodes["relu"], (None,)),
        "relu: f32[8, 8] with None",
    ),
    "a dim is missing": ("propagate", lies("relu", WHOLE), "relu: [_] on f32[8, 8]"),
    "a pinned value moved": ("propagate", lies("w", DP, TP), "w: P(None, 'tp'): w is [_@dp, _@tp] in dims [0]"),
    "a sum is not done at the end": (
        "insert_reshards",
        lambda program, nodes: setattr(program.output_node, "args", ((nodes["sum_1"], *program.results[1:]),)),
        "output output is a partial sum",
    ),
    "a gradient lies otherwise": (
        "insert_reshards",
        lambda program, nodes: program.set_sharding(program.results[1], Sharding(MESH, (WHOLE, WHOLE))),
        "gradient w: [_, _], but the parameter is [_, _@tp]",
    ),
    "a reshard is left": ("insert_reshards", is_said_to_be("lowered"), "reshard is not lowered"),
    "a local type is wrong": (
        "localize",
        has_type("relu", 8, 8),
        "relu = aten.relu.default: local type f32[8, 8], but it makes f32[4, 8]",
    ),
}


def message(program: Program) -> str:
    with pytest.raises(AssertionError) as raised:
        verify(program)
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_rejected_by_the_node_that_is_wrong(name: str, stages: dict[str, Program]) -> None:
    stage, change, expected = BROKEN[name]
    program = stages[stage].copy()
    change(program, {node.name: node for node in program.graph.nodes})
    assert message(program) == expected
    verify(stages[stage])


def test_a_value_that_is_used_before_it_is_made_is_rejected(stages: dict[str, Program]) -> None:
    program = stages["propagate"].copy()
    nodes = {node.name: node for node in program.graph.nodes}
    nodes["relu"].args = (nodes["sum_1"],)
    with pytest.raises(RuntimeError, match="was used before it has been defined"):
        verify(program)


# One op whose operands and result do not agree.


def at(shape: tuple[int, ...], spec: P, op: str = "", axes: str = "") -> tuple[TensorType, Sharding]:
    """A type and a sharding: ``at((8, 6), P("dp"), "sum", "tp")``."""
    cut = spec.sharding(MESH, shape, "test")
    return TensorType(shape, F32), Sharding(MESH, cut.dims, tuple((MESH.axis(axis), op) for axis in axes.split()))


def one_call(
    target: Any,
    operands: list[tuple[TensorType, Sharding]],
    result: tuple[TensorType, Sharding],
    *further: Any,
    level: Any = "agreed",
) -> Program:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i, _ in enumerate(operands)]
    inputs = tuple(Input(node.name, "input", type_) for node, (type_, _) in zip(nodes, operands, strict=True))
    nodes.append(graph.call_function(target, (*nodes, *further)))
    graph.output((nodes[-1],))
    program = Program(graph, inputs, (Output("y", "output"),), MESH, level)
    for node, (type_, sharding) in zip(nodes, [*operands, result], strict=True):
        program.set_type(node, type_)
        program.set_sharding(node, sharding)
    return program


WHOLE_8, CUT_8, SUM_8 = at((8, 8), P()), at((8, 8), P("dp")), at((8, 8), P(), "sum", "tp")
DISAGREEING: dict[str, tuple[Program, str]] = {
    "a factor is cut in one tensor alone": (
        one_call(aten.relu.default, [CUT_8], WHOLE_8),
        "relu_default: factor d0 is cut otherwise in relu_default [_, _]",
    ),
    "a factor that must be whole is cut": (
        one_call(aten.embedding.default, [CUT_8, at((4,), P())], at((4, 8), P())),
        "embedding_default: factor v must be whole",
    ),
    "a dim without a factor is cut": (
        one_call(aten.arange.default, [], at((8,), P("dp")), 8),
        "arange_default: [_@dp] of (8,) on ((),)",
    ),
    "an operand that is not looked at is cut": (
        one_call(uniform, [at((2,), P("dp")), WHOLE_8], WHOLE_8, 7),
        "uniform: x0 must be whole on every rank",
    ),
    "a sum over a cut dim is said to be done": (
        one_call(aten.sum.dim_IntList, [CUT_8], at((8,), P()), [0]),
        "sum_dim_int_list: open is nothing, not sum dp",
    ),
    "a maximum over a cut dim is said to be a sum": (
        one_call(aten.amax.default, [CUT_8], at((8,), P(), "sum", "dp"), [0]),
        "amax_default: open is sum dp, not max dp",
    ),
    "a sum is open that no one opened": (
        one_call(aten.relu.default, [WHOLE_8], at((8, 8), P(), "sum", "dp")),
        "relu_default: open is sum dp, not nothing",
    ),
    "an open sum meets an op that is not linear": (
        one_call(aten.relu.default, [at((8, 8), P(), "sum", "dp")], at((8, 8), P(), "sum", "dp")),
        "relu_default: operands [0] are partial",
    ),
    "an open sum is added to what is none": (
        one_call(aten.add.Tensor, [at((8, 8), P(), "sum", "dp"), WHOLE_8], at((8, 8), P(), "sum", "dp")),
        "add_tensor: operands [0] are partial",
    ),
    "two sums are open over other axes": (
        one_call(aten.add.Tensor, [at((8, 8), P(), "sum", "dp"), at((8, 8), P(), "sum", "tp")], WHOLE_8),
        "add_tensor: open is sum dp in one operand, sum tp in another",
    ),
    "an open maximum passes": (
        one_call(aten.neg.default, [at((8, 8), P(), "max", "dp")], at((8, 8), P(), "max", "dp")),
        "neg_default: open is max dp, and only a sum passes",
    ),
    "an all_gather says another cut than it leaves": (
        one_call(all_gather, [at((8, 8), P("dp", "tp"))], at((8, 8), P("dp")), ("dp",), 0, level="lowered"),
        "all_gather = all_gather(x0, ('dp',), 0): [_@dp, _], but it makes [_, _@tp]",
    ),
    "an all_gather names the major axis of two": (
        one_call(all_gather, [at((8, 8), P(("dp", "tp")))], at((8, 8), P("tp")), ("dp",), 0, level="lowered"),
        "(AxisPart(name='dp', pre=1, size=2),) are not the minor cuts of dim 0 of [_@dp+tp, _]",
    ),
    "an all_reduce adds what is no sum": (
        one_call(all_reduce, [at((8, 8), P(), "max", "tp")], WHOLE_8, ("tp",), "sum", level="lowered"),
        "no sum over (AxisPart(name='tp', pre=1, size=2),) is open in [_, _]{max tp}",
    ),
    "a reduce_scatter leaves the piece of another dim": (
        one_call(reduce_scatter, [SUM_8], at((8, 8), P("tp")), ("tp",), "sum", 1, level="lowered"),
        "reduce_scatter = reduce_scatter(x0, ('tp',), 'sum', 1): [_@tp, _], but it makes [_, _@tp]",
    ),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_an_op_or_a_collective_that_does_not_agree_with_its_tensors_is_rejected(name: str) -> None:
    program, expected = DISAGREEING[name]
    assert message(program) == expected


# What no check of a program can see, its values show.


def softmax_of_cut_rows() -> None:
    """Holds what virtual ranks compute against one device."""
    compiled(lambda x: x.softmax(1), MESH, {"x": P(None, "tp")}, x=value(8, 8))


def megatron() -> None:
    """Holds what virtual ranks compute against one device."""
    weights = {"u": parameter(8, 8), "d": parameter(8, 8)}
    annotations = {"x": P("dp"), "d": P("tp")}
    compiled(lambda x, u, d: ((x @ u).relu() @ d).relu(), MESH, annotations, True, x=parameter(8, 8), **weights)


def test_a_planted_rule_that_lets_a_softmax_be_cut_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax_of_cut_rows()
    monkeypatch.setitem(RULES, aten._softmax.default, OpRule(pointwise_rule))
    with pytest.raises(AssertionError, match="not close"):
        softmax_of_cut_rows()


def test_a_planted_rule_that_lets_a_sum_pass_a_relu_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron()
    monkeypatch.setitem(RULES, aten.relu.default, OpRule(lambda call: pointwise_rule(call, "0")))
    with pytest.raises(AssertionError, match="not close"):
        megatron()


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("all_reduce", lambda self, xs, axes, op: xs),
        ("all_reduce", lambda self, xs, axes, op: [x * 2 for x in xs]),
    ],
    ids=["does nothing", "doubles"],
)
def test_a_planted_wrong_collective_is_caught(kind: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedComm, kind, wrong)
    with pytest.raises(AssertionError, match="not close|differ"):
        megatron()


def test_a_planted_all_gather_in_the_wrong_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SimulatedComm.all_gather
    monkeypatch.setattr(SimulatedComm, "all_gather", lambda self, xs, axes, dim: right(self, xs[::-1], axes, dim))
    with pytest.raises(AssertionError, match="not close|differ"):
        compiled(lambda x: x.cumprod(0), MESH, {"x": P("tp")}, x=value(8))
