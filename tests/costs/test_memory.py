"""Announced memory equals the bytes alive while a program runs."""

from __future__ import annotations

from typing import Any

import gpt
import pytest
import torch
from cases import few
from measuring import measured, without_optimizer
from targets import convolution, mlp
from torch import fx

from shardc import Mesh, P, Precision, Remat, ShardingError, Zero, compile
from shardc.costs.memory import memory_of
from shardc.language.sharding import TensorType
from shardc.options import OPTIMIZERS
from shardc.program.program import Input, Output, Program

aten = torch.ops.aten
FSDP = gpt.DATA | {"param:*": P("dp")}


def is_within_a_percent(found: dict[str, int], wanted: dict[str, int]) -> bool:
    return found.keys() == wanted.keys() and all(abs(found[key] - wanted[key]) <= wanted[key] / 100 for key in wanted)


@pytest.mark.parametrize("dropout", few([0.0, 0.1], 0.1))
@pytest.mark.parametrize(
    ("mesh", "annotations"),
    [
        (Mesh(dp=1), gpt.DATA),
        (Mesh(dp=4), gpt.DATA),
        (Mesh(tp=4), gpt.MEGATRON),
        (Mesh(dp=2, tp=2), gpt.DATA | gpt.MEGATRON),
        (Mesh(dp=4), FSDP),
    ],
    ids=["one", "dp", "tp", "dp,tp", "fsdp"],
)
def test_the_bytes_announced_for_a_gpt_are_those_alive(mesh: Mesh, annotations: Any, dropout: float) -> None:
    model, args, _, _ = gpt._target(gpt.Config(dropout=dropout), annotations)
    compiled = compile(model, mesh, annotations, args=args)
    found, wanted = measured(compiled, *args), without_optimizer(compiled.memory)
    assert is_within_a_percent(found, wanted), (found, wanted)


@pytest.mark.parametrize(
    ("target", "mesh"), [(mlp, Mesh(dp=2, tp=2)), (convolution, Mesh(x=4)), (convolution, Mesh(x=1))]
)
def test_outputs_images_and_uneven_pieces_are_announced_too(target: Any, mesh: Mesh) -> None:
    model, args, kwargs, annotations = target()
    compiled = compile(model, mesh, annotations, args=args, kwargs=kwargs)
    found, wanted = measured(compiled, *args, **kwargs), without_optimizer(compiled.memory)
    assert is_within_a_percent(found, wanted), (found, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_that_zero_keeps_or_gathers_is_announced_too(stage: Any) -> None:
    """Under tensor parallelism, in bfloat16."""
    annotations = gpt.DATA | gpt.MEGATRON
    model, args, _, _ = gpt._target(gpt.Config(layers=1), annotations)
    options: dict[str, Any] = {"zero": Zero(stage=stage), "precision": Precision(), "remat": Remat("blocks.*")}
    compiled = compile(model, Mesh(dp=2, tp=2), annotations, args=args, **options)
    found, wanted = measured(compiled, *args), without_optimizer(compiled.memory)
    assert is_within_a_percent(found, wanted), (found, wanted)


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_codes_are_announced_and_parameters_that_are_decoded_are_gathered(stage: Any) -> None:
    model, args, _, _ = gpt._target(gpt.Config(width=128), gpt.DATA)
    zero = None if stage is None else Zero(stage=stage)
    compiled = compile(model, Mesh(dp=4), gpt.DATA, args=args, zero=zero, bucket=100_000, wire={"dp": "int8"})
    found, wanted = measured(compiled, *args), without_optimizer(compiled.memory)
    assert is_within_a_percent(found, wanted), (found, wanted)
    assert stage != 3 or compiled.memory["gathered"] > 4 * model.blocks[0].mlp.up.weight.numel()


def test_zero_3_holds_two_layers_gathered_at_a_time_and_says_so() -> None:
    """The bytes are those alive; at the peak they are what is stored, and at most what is gathered and saved."""
    model, args, _, _ = gpt._target(gpt.Config(layers=4), gpt.DATA)
    compiled = compile(model, Mesh(dp=4), gpt.DATA, args=args, zero=Zero(stage=3))
    found, wanted = measured(compiled, *args), without_optimizer(compiled.memory)
    assert is_within_a_percent(found, wanted), (found, wanted)
    block = sum(4 * parameter.numel() for parameter in model.blocks[0].parameters())
    assert (
        block
        < compiled.memory["gathered"]
        <= 2 * block + 4 * (model.positions.weight.numel() + model.norm.weight.numel())
    )


def test_a_view_owns_nothing_and_a_reshape_that_copies_owns_its_bytes() -> None:
    """``made`` is seen by a view and copied by a reshape; the backward reads the view, the copy and ``other``."""
    graph, f32 = fx.Graph(), TensorType((4, 2), torch.float32)
    outputs = (Output("", "output"), Output("x", "gradient"))
    program = Program(graph, (Input("x", "input", f32, requires_grad=True),), outputs, level="localized")
    x, call = graph.placeholder("x"), graph.call_function
    made = call(aten.neg.default, (x,))
    seen = call(aten.permute.default, (made, [1, 0]))
    same = call(aten.reshape.default, (made, [4, 2]))
    copied = call(aten.reshape.default, (seen, [4, 2]))
    other = call(aten.add.Tensor, (same, copied))
    gradient = call(aten.add.Tensor, (other, copied))
    used = call(aten.add.Tensor, (gradient, same))
    graph.output((other, used))
    for node in (x, made, seen, same, copied, other, gradient, used):
        program.set_type(node, TensorType((2, 4), torch.float32) if node is seen else f32)
    assert memory_of(program) == {
        "parameters": 0, "gradients": 0, "optimizer": 0,
        "saved": 3 * 32,  # made, copied, other
        "gathered": 0,
        "peak": 5 * 32,  # and x, and gradient or used in copied's place
    }  # fmt: skip


def test_the_peak_counts_the_states_of_the_optimizer_that_is_named() -> None:
    model, args, kwargs, _ = mlp()
    peaks = set()
    for name, states in OPTIMIZERS.items():
        memory = compile(model, Mesh(dp=2), {"x": P("dp")}, args=args, kwargs=kwargs, optimizer=name).memory
        assert memory["optimizer"] == states * memory["parameters"]
        peaks.add(memory["peak"] - memory["optimizer"])
    assert len(peaks) == 1
    with pytest.raises(ShardingError, match="optimizer='adm'\n  its states are not known\n  did you mean adam"):
        compile(model, Mesh(dp=2), {}, args=args, kwargs=kwargs, optimizer="adm")
