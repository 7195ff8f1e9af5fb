"""The search rediscovers the plans that people train with, on the machines and models that they are best for."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from moe import MoE
from search_models import Blocks, Call, Recommender, transformer

import shardc
from shardc import Mesh, P, Suggestion
from shardc.api import Compiled
from shardc.language.machine import Device, Link, Machine

# Of an accelerator: products at 50 TFLOP/s and everything else at 2.5 TB/s.
DEVICE = Device({"float32": 5e13}, 2.5e12, 5e-6, 0.6)
FAST = Link(2e-6, 3e11, name="fast")
SLOW = Link(3e-5, 3e9, name="slow")
PLAIN = {"pipeline": None, "remat": None}

pytestmark = pytest.mark.sweep


def first_of(call: Call, devices: int, machine: Machine, **ways: Any) -> tuple[Suggestion, Compiled]:
    """The first suggestion for a model, and its program."""
    model, args = call
    first, *_ = shardc.suggest(model, devices, args=args, links=machine, **ways)
    return first, shardc.compile(model, **first, args=args)


def counts(program: Compiled, *, phases: tuple[str, ...] = ("forward", "backward")) -> Counter[tuple[str, ...]]:
    """Collectives of a step by phase, kind and axes, but for the sum of the loss."""
    is_loss = {each.name for each in program.collectives if each.bytes <= 8}
    return Counter({
        key: sum(each.times for each in program.collectives if (each.phase, each.kind, *each.axes) == key)
        for key in dict.fromkeys((each.phase, each.kind, *each.axes) for each in program.collectives
                                 if each.phase in phases and each.name not in is_loss)
    })  # fmt: skip


def activation_counts(program: Compiled, layers: int) -> dict[tuple[str, ...], float]:
    """The collectives of activations, which depend on the batch, for each layer."""
    return {key: count / layers for key, count in counts(program).items()}


def test_megatron_where_the_link_is_fast_and_memory_is_tight() -> None:
    """2048 tokens and layers of 4096: weights are larger than activations, and a replica of 4 layers has 12.9 GB."""
    machine = Machine({"*": FAST}, DEVICE)
    first, program = first_of(transformer(4096, 4, 512, layers=4), 4, machine, memory="3.8GB", fix=PLAIN)
    (axis,) = first.mesh.axis_names
    assert first.fits and first.zero is None
    assert activation_counts(program, 4) == {("forward", "all_reduce", axis): 2, ("backward", "all_reduce", axis): 2}


@pytest.mark.parametrize("is_tight", [False, True])
def test_data_parallel_or_zero_where_activations_outweigh_weights(is_tight: bool) -> None:
    """32768 tokens and layers of 1024: 25 MB of gradients a layer are sent while backward computes.

    Where memory is tight a rank has none for half of a replica, whose states take 16 bytes a parameter.
    """
    call, machine = transformer(1024, 64, 512), Machine({"*": FAST}, DEVICE)
    parameters = sum(each.numel() for each in call[0].parameters())
    replica = shardc.compile(call[0], Mesh(dp=4), {"x": P("dp")}, args=call[1], links=machine, optimizer="adamw")
    memory = replica.memory["peak"] - 8 * parameters if is_tight else None
    first, program = first_of(call, 4, machine, memory=memory, fix=PLAIN)
    stored = sum(first.memory[name] for name in ("parameters", "gradients", "optimizer"))
    assert prod(axis.size for axis in program.shardings["x"].dims[0].all_axes) == 4
    least = 2 * 3 / 4 * 4 * parameters  # bytes: gradients are reduced, or scattered and parameters gathered
    assert least <= first.cost.wire_bytes <= (1.51 if is_tight else 1.01) * least
    assert first.fits and (stored <= 8 * parameters or not is_tight)


def test_zero_over_one_axis_where_a_second_step_only_copies_more() -> None:
    """A gather in two steps joins pieces in an inner dim: all parameters are copied, for a shorter ring."""
    machine = Machine({"*": Link(1e-3, 1e9, overlap=0.0)}, "cpu")
    first, program = first_of(transformer(256, 64, 128), 4, machine, fix=PLAIN)
    assert first.mesh.size == 4 and first.zero is not None
    assert {len(each.axes) for each in program.collectives} == {1} == {len(first.mesh.axis_names)}


def test_expert_parallel_with_two_all_to_alls_forward_and_two_backward() -> None:
    """8 sequences, 8 experts of 1024 x 4096: experts are 67 MB a layer, what is sent to them 16 MB a rank.

    Counted in one layer more: the first layer sends nothing to its experts, whose input each rank is given whole.
    """

    def call(layers: int) -> Call:
        with torch.device("meta"):
            return Blocks(MoE(1024, 4096, 8, 1.0) for _ in range(layers)), (torch.empty(8, 512, 1024),)

    first, program = first_of(call(2), 8, Machine({"*": Link(1e-6, 1e11)}, DEVICE), fix=PLAIN)
    model, args = call(3)
    of_layer = counts(shardc.compile(model, **first, args=args)) - counts(program)
    experts = {axis.name for axis in program.shardings["blocks.0.up"].dims[0].all_axes}
    all_to_alls = {key: count for key, count in of_layer.items() if key[1] == "all_to_all"}
    assert {key[0]: count for key, count in all_to_alls.items()} == {"forward": 2, "backward": 2}
    assert all(set(key[2:]) == experts for key in all_to_alls)
    assert prod(first.mesh.sizes[axis] for axis in experts) >= 4
    sent = {each.name: each.bytes for each in program.collectives if each.phase == "forward"}
    is_gate = {each.name for each in program.collectives if each.kind != "all_to_all"}
    assert sum(sent[name] for name in sent if name in is_gate) < 0.01 * sum(sent.values()), of_layer


def test_tensor_parallel_inside_a_node_and_data_parallel_across() -> None:
    """Activations, 34 MB each, need the fast link; gradients are sent over the slow one while backward computes."""
    machine = Machine({"*": FAST}, DEVICE, node=2, between=Link(1e-5, 2e10))
    first, program = first_of(transformer(4096, 8, 512), 4, machine, memory="3GB", fix=PLAIN)
    found = counts(program)
    of_activations = {key[2:] for key in found if key[1] == "all_reduce" and key[0] == "forward"}
    (inside,) = {axis for axes in of_activations for axis in axes}
    assert program.mesh is not None
    assert list(first.mesh.sizes) == [first.mesh.axis_names[0], inside] and first.mesh.sizes[inside] == 2
    assert machine.link((inside,), first.mesh) is FAST
    assert found["forward", "all_reduce", inside] == found["backward", "all_reduce", inside] == 4
    across = first.mesh.axis_names[0]
    assert all(each.axes == (across,) for each in program.collectives if each.phase == "update")
    assert {key[2] for key in found if key[0] == "backward"} == {inside, across}


def test_a_pipeline_across_nodes_where_the_link_between_them_is_slow() -> None:
    """Gradients of 805 MB would take 0.8 s between the nodes; a stage sends 8 MB of activations a microbatch."""
    machine = Machine({"*": FAST}, DEVICE, node=2, between=Link(3e-5, 1e9))
    first, program = first_of(transformer(4096, 16, 512, layers=4), 4, machine, memory="8GB")
    assert first.pipeline is not None and first.mesh.sizes[first.pipeline.axis] == 2
    assert first.mesh.axis_names[0] == first.pipeline.axis  # the outermost: stages are in different nodes
    sent = [each for each in program.collectives if each.kind == "send"]
    assert sent and all(first.pipeline.axis not in each.axes for each in program.collectives if each.kind != "send")


def test_a_table_of_the_recommender_is_cut_by_rows() -> None:
    """10 million rows of 4: rows are too short for 8 ranks, and a replica with gradients and states sends 160 MB.

    A table of 128 columns is cut by columns, whose all_to_all sends less than the sum of rows; so says the cost model.
    So is this one with 4096 samples, of which every second rank may as well compute the same.
    """
    with torch.device("meta"):
        model = Recommender(rows=10_000_000, width=4, features=26, hidden=512)
        args = torch.empty(131072, 26, dtype=torch.long), torch.empty(131072)
    first, program = first_of((model, args), 8, Machine({"*": FAST}, DEVICE), memory="500MB", fix=PLAIN)
    rows, _ = program.shardings["table.weight"].dims
    assert rows.all_axes, first.text()
    assert first.fits
