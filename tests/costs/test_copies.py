"""The predicted copies around collectives: where torch copies, of how many bytes, and when in a step."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc import Mesh, P, Zero
from shardc.api import Compiled
from shardc.costs.copies import copy_seconds
from shardc.costs.step_time import COMPUTING, RESULTS_COPIED
from shardc.language.machine import Device, Link, Machine
from shardc.program.communication import LARGE_PRODUCT, bucket, members
from shardc.runtime.comm.process_group import join, split

MEMORY = 1e9
DEVICE = Device({"float32": 1e12}, MEMORY)
SHAPE = (8, 6, 4)


def machine(packs: bool = True) -> Machine:
    return Machine({"*": Link(1e-6, 1e9)}, replace(DEVICE, packs=packs))


def moved(before: P, after: P, shape: tuple[int, ...] = SHAPE) -> Compiled:
    """A model that moves its input from one sharding to another."""
    model = nn.Sequential(nn.Tanh(), nn.Identity())
    annotations = {"input:input": before, "module:0": before, "module:1": after}
    with torch.no_grad():
        return shardc.compile(model, Mesh(dp=2), annotations, args=(torch.ones(shape),), links=machine())


def copied(found: Compiled) -> dict[str, tuple[int, int]]:
    """The bytes that are read and written before and after each collective, by its kind."""
    program = found.program
    nodes = [node for node in program.calls if members(node)]
    return {
        members(node)[0].kind: tuple(round(MEMORY * seconds) for seconds in copy_seconds(program, node))  # type: ignore[misc]
        for node in nodes
    }


@pytest.mark.parametrize("shape", [SHAPE, (1, 6, 4), (1, 1, 4)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_gather_is_copied_where_torch_has_to_copy(shape: tuple[int, ...], dim: int) -> None:
    if shape[dim] == 1:
        shape = tuple(2 if i == dim else size for i, size in enumerate(shape))
    cut = P(*[None] * dim, "dp")
    after = copied(moved(cut, P(), shape))["all_gather"]
    x = torch.ones(shape)
    pieces = split(x, 2, dim)
    assert (pieces.data_ptr() != x.data_ptr()) is (after[1] > 0)
    assert (join(pieces, dim).data_ptr() != pieces.data_ptr()) is (after[1] > 0)
    assert after == (0, 2 * x.nbytes * (prod(shape[:dim]) > 1))


def test_an_all_to_all_is_copied_on_the_side_of_the_inner_dim() -> None:
    nbytes = torch.ones(SHAPE).nbytes // 2  # of a rank
    cuts = P("dp"), P(None, "dp")
    for here, there, expected in ((*cuts, (2 * nbytes, 0)), (*reversed(cuts), (0, 2 * nbytes))):
        assert copied(moved(here, there)) == {"all_to_all": expected}


def trained(zero: Zero | None, packs: bool, width: int = 32, **axes: int) -> Compiled:
    layers = nn.Embedding(64, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 64)
    model = nn.Sequential(*layers)
    ids, batch = torch.zeros(8, 4, dtype=torch.int64), P(tuple(axes))
    return shardc.compile(
        model, Mesh(**axes), {"input:input": batch}, args=(ids,), zero=zero, links=machine(packs), optimizer="adamw"
    )  # fmt: skip


def buckets(found: Compiled) -> dict[str, list[Any]]:
    """Buckets by kind: bytes of operands and results, and seconds before and after."""
    program, by_kind = found.program, dict[str, list[Any]]()
    for node in program.calls:
        if node.target is bucket:
            parts = members(node)
            operands = sum(program.local_type(*program.value(part.operand)).nbytes for part in parts)  # type: ignore[union-attr]
            results = sum(program.local_type(node, part.index).nbytes for part in parts)  # type: ignore[union-attr]
            by_kind.setdefault(parts[0].kind, []).append((operands, results, *copy_seconds(program, node)))
    return by_kind


def test_the_values_of_a_bucket_are_copied_into_a_buffer_and_out_of_it() -> None:
    found = buckets(trained(Zero("dp", 2), packs=True, dp=2))
    for operands, results, before, after in found["all_gather"]:
        assert (before, after) == (pytest.approx(2 * operands / MEMORY), pytest.approx(2 * results / MEMORY))
    for operands, _, before, after in found["reduce_scatter"]:
        assert (before, after) == (pytest.approx(2 * operands / MEMORY), 0)
    for each in buckets(trained(Zero("dp", 2), packs=False, dp=2)).values():
        assert all((before, after) == (0, 0) for _, _, before, after in each)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("width", [32, 256])
def test_a_large_product_is_computed_in_the_buffer_of_its_all_reduce(packs: bool, width: int) -> None:
    """Small ones, the gradient of an embedding, and those of biases are copied there."""
    others = 64 * width + width + 64  # of 64 ids and scores
    products = [each for each in (width * width, 64 * width) if each < LARGE_PRODUCT]
    copies = [before for _, _, before, _ in buckets(trained(None, packs, width, dp=2))["all_reduce"]]
    assert sum(copies) == pytest.approx(2 * 4 * (others + sum(products)) / MEMORY)


def test_a_bucket_is_packed_after_pieces_of_an_inner_dim_are_copied() -> None:
    """Of two steps of a reduction the first is over the inner axis."""
    zero = Zero(("dp", "dp2"), 2, gather_over="dp2")
    for packs in (True, False):
        first, second = buckets(trained(zero, packs, dp=2, dp2=2))["reduce_scatter"]
        for (operands, _, before, _), copies in ((first, 1 + packs), (second, packs)):
            assert before == pytest.approx(2 * copies * operands / MEMORY)


def test_a_group_of_one_rank_copies_nothing() -> None:
    found = shardc.compile(
        nn.Sequential(nn.Tanh(), nn.Identity()), Mesh(dp=2, tp=1),
        {"input:input": P("tp"), "module:0": P("tp"), "module:1": P(None, "tp")},
        args=(torch.ones(SHAPE),), links=machine(),
    )  # fmt: skip
    assert all(copies == (0, 0) for copies in copied(found).values())


def test_two_steps_of_a_gather_copy_what_one_step_need_not() -> None:
    one = trained(Zero("dp", 2), packs=False, dp=4)
    two = trained(Zero(("dp", "dp2"), 2, gather_over="dp2"), packs=False, dp=2, dp2=2)
    seconds = [sum(task.seconds for task in each.timeline.on(COMPUTING)) for each in (one, two)]
    assert seconds[1] > seconds[0] and one.cost.flops == two.cost.flops


def test_results_are_copied_when_they_are_first_read() -> None:
    """Calls between a collective and its first reader do not wait for its copies."""
    timeline = trained(Zero("dp", 3), packs=True, dp=2).timeline
    lane = timeline.on(COMPUTING)
    copies = [task for task in lane if str(task.name).endswith(RESULTS_COPIED)]
    sent = {task.name.name: task for task in timeline.tasks if getattr(task.name, "sent", None)}  # type: ignore[attr-defined]
    between = [
        task
        for copy in copies
        for task in lane
        if timeline.starts[sent[copy.name.name].name] <= timeline.starts[task.name] < timeline.starts[copy.name]  # type: ignore[attr-defined]
    ]
    assert copies and between
    assert all(timeline.starts[copy.name] >= timeline.end(sent[copy.name.name]) for copy in copies)  # type: ignore[attr-defined]
