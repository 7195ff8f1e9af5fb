"""Alternatives: the chosen sequence costs what is announced, and cheaper ones were impossible."""

from __future__ import annotations

import gpt
import moe
import pytest
import torch
from attending import Attending, draw
from targets import convolution
from torch import nn

import shardc
from shardc import Mesh, P
from shardc.language.sharding import Sharding, TensorType
from shardc.passes.reshard.plan_reshard import plan_reshard
from shardc.report.explain.alternatives import (
    AlternativeFinder,
    alternatives,
    bytes_sent,
    compare_steps,
    kinds_of,
)
from shardc.report.explain.records import alternatives_text

MESH = Mesh(dp=2, tp=2)
TYPE = TensorType((8, 12, 4), torch.float32)


def lies(*entries: str | None, partial: str = "") -> Sharding:
    found = P(*entries).sharding(MESH, TYPE.shape, "x")
    return Sharding(MESH, found.dims, tuple((MESH.axis(axis), "sum") for axis in partial.split()))


WAYS = {
    "a sum that is wanted whole": (
        lies(partial="tp"), lies(), ["all_reduce 1536", "reduce_scatter, all_gather 1536"]
    ),
    "a sum that is wanted cut": (
        lies(partial="tp"), lies("tp"), ["reduce_scatter 768", "all_reduce, shard_slice 1536"]
    ),
    "a cut that is wanted on another dim": (
        lies("tp"), lies(None, "tp"), ["all_to_all 384", "all_gather, shard_slice 768"]
    ),
    "a cut that is wanted whole": (lies("tp"), lies(), ["all_gather 768"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_sequences_that_do_the_same_are_listed_with_what_they_send_the_chosen_one_first(name: str) -> None:
    src, dst, expected = WAYS[name]
    found = compare_steps(src, dst, TYPE)
    assert found[0] == plan_reshard(src, dst, TYPE)
    assert all(steps[-1].sharding == dst for steps in found)
    said = [f"{', '.join(kinds_of(steps))} {bytes_sent(src, steps, TYPE)}" for steps in found]
    assert said[: len(expected)] == expected


def test_at_every_collective_the_chosen_way_sends_what_is_announced() -> None:
    model, args, _, annotations = gpt.gpt_sequence()
    compiled = shardc.compile(model, MESH, annotations, args=args)
    chooser = AlternativeFinder(compiled)
    for collective in compiled.collectives:
        found = [each for each in chooser.alternatives(collective.name) if each.question.startswith("to bring")]
        (chosen,) = [each for each in found if each.is_chosen]
        steps = [each for each in compiled.collectives if each.node == collective.node]
        if len(chosen.way.split(", then ")) == len(steps) == 1:
            assert chosen.wire_bytes == collective.wire_bytes, collective
        assert all(each.wire_bytes >= chosen.wire_bytes for each in found if "holds" not in each.note)


def test_an_op_has_one_chosen_sequence_and_cheaper_ones_were_impossible() -> None:
    model, args, _, annotations = gpt.gpt()
    compiled = shardc.compile(model, MESH, annotations, args=args)
    chooser = AlternativeFinder(compiled)
    asked = {(each.question, each) for made in compiled.collectives for each in chooser.alternatives(made.name)}
    questions = {question for question, _ in asked if question.startswith("to compute")}
    assert len(questions) == 10
    for question in questions:
        ways = [each for other, each in asked if other == question]
        (chosen,) = [each for each in ways if each.is_chosen]
        assert "along what is summed" in chosen.way
        assert all(each.note for each in ways if each.wire_bytes < chosen.wire_bytes), ways


def test_an_axis_of_data_and_weights_tells_which_of_them_is_gathered() -> None:
    model, args, _, annotations = moe.moe()
    compiled = shardc.compile(model, Mesh(ep=4), annotations, args=args)
    found = alternatives(compiled, next(each.name for each in compiled.collectives if each.kind == "all_to_all"))
    ways = {each.way: each.wire_bytes for each in found if "data and weights" in each.question}
    assert ways["each op as it costs least"] < ways["data come to the weights"] < ways["weights come to the data"]


def test_windows_are_told_from_gathering_by_the_bytes_that_are_announced() -> None:
    model, args, _, annotations = convolution()
    compiled = shardc.compile(model, Mesh(x=4), annotations, args=args)
    edges = [each for each in compiled.collectives if each.kind == "collective_permute"]
    assert edges
    for collective in edges:
        found = alternatives(compiled, collective.name)
        (chosen,) = [each for each in found if each.is_chosen]
        others = [each for each in compiled.collectives if each.kind == "collective_permute"]
        same = [each for each in others if (each.phase, each.source) == (collective.phase, collective.source)]
        assert chosen.wire_bytes == sum(each.wire_bytes for each in same) > 0, found
        assert [each.way for each in found if not each.is_chosen] == ["gather the whole dim"]


@pytest.mark.parametrize(
    ("way", "chosen", "other"),
    [
        ("ring", "keys and values go round 4 ranks", "4 ranks share heads in place of positions"),
        ("ulysses", "4 ranks share heads in place of positions", "keys and values go round 4 ranks"),
        ("gather", "each gathers all keys and values", "keys and values go round 4 ranks"),
    ],
)
@pytest.mark.parametrize("length", [16, 18])
def test_attention_says_what_each_way_to_compute_it_sends(way: str, chosen: str, other: str, length: int) -> None:
    """What is announced of the chosen way is what all its collectives send; the other is announced as where chosen."""
    inputs, announced = draw(length, dtype=torch.float32), dict[str, tuple[str, int]]()
    for each in dict.fromkeys((way, "ring", "ulysses")):
        compiled = shardc.compile(Attending(), Mesh(cp=4), {"x": P(None, "cp")}, kwargs=inputs, attention=each)
        of_attention = [one for one in compiled.collectives if one.kind != "all_reduce" and one.phase == "forward"]
        found = [one for one in alternatives(compiled, of_attention[0].name) if "scaled_dot_product" in one.question]
        assert [one.is_chosen for one in found] == [True] + [False] * (len(found) - 1)
        assert found[0].wire_bytes == sum(one.wire_bytes for one in of_attention)
        announced[each] = found[0].way, found[0].wire_bytes
        if each == way:
            ways = {one.way: one.wire_bytes for one in found}
    assert announced[way][0] == chosen and other in ways
    assert all(ways[name] == nbytes for name, nbytes in announced.values() if name in ways)


def test_attention_in_zigzag_says_what_gathering_would_send() -> None:
    cut = {"x": P(None, "cp:zigzag")}
    compiled = shardc.compile(Attending(), Mesh(cp=4), cut, kwargs=draw(16, dtype=torch.float32))
    for ring in (each for each in compiled.collectives if each.name.startswith("ring")):
        ways = [(each.wire_bytes, each.is_chosen) for each in alternatives(compiled, ring.name)]
        assert ways == [(ring.wire_bytes, True), (ring.wire_bytes // (1 if ring.phase == "forward" else 2), False)]


def test_a_table_that_is_gathered_says_what_taking_its_lookup_apart_would_send() -> None:
    """Few rows, of which many are looked up."""
    model, ids = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), torch.randint(8, (64, 16))
    compiled = shardc.compile(model, Mesh(dp=2, tp=2), {"input": P("dp"), "0.weight": P("tp")}, args=(ids,))
    (gathered,) = [each for each in compiled.collectives if each.kind == "all_gather" and each.phase == "forward"]
    ways = {each.way: each for each in alternatives(compiled, gathered.name)}
    apart = ways["taken apart, as local work and a sum"]
    assert not apart.is_chosen and apart.wire_bytes == 64 * 16 * 4 * 4 // 2 > gathered.wire_bytes


def test_a_table_that_is_stored_in_pieces_says_that_its_lookup_is_never_taken_apart() -> None:
    model, args, _, annotations = gpt.gpt_fsdp()
    compiled = shardc.compile(model, Mesh(dp=4), annotations, args=args)
    gathered = next(each for each in compiled.collectives if "positions_weight" in each.node)
    ways = [each for each in alternatives(compiled, gathered.name) if "(positions)" in each.question]
    assert [each.is_chosen for each in ways] == [True, False]
    assert ways[1].note == "not asked: a table that is cut as inputs are is stored so, and gathered"


def test_an_op_that_is_taken_apart_says_what_gathering_would_have_cost() -> None:
    model, args, _, annotations = gpt.gpt()
    compiled = shardc.compile(model, MESH, {**annotations, "head.weight": P("tp")}, args=args)
    largest = next(each for each in compiled.collectives if each.node == "amax")
    text = alternatives_text(alternatives(compiled, largest.name))
    assert (
        "ways to compute log_softmax (gpt.py:106), and what a rank sends\n  local work and sums of a few numbers"
        in text
    )
    assert "gather the whole dim" in text


def test_an_op_that_a_cut_reaches_after_others_were_taken_apart_says_what_gathering_would_have_cost() -> None:
    """Only behind the first softmax, once it is local work, does the second one's dim arrive cut."""
    model, x = nn.Sequential(nn.Softmax(-1), nn.Softmax(-1)), torch.randn(4, 8, requires_grad=True)
    compiled = shardc.compile(model, Mesh(tp=2), {"input": P(None, "tp")}, args=(x,))
    questions = {each.question for ways in compiled.choices().values() for each in ways if each.is_chosen}
    assert len([each for each in questions if each.startswith("to compute softmax (")]) == 2
