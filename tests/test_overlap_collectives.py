"""overlap_collectives: work that can wait stands between a collective and its first reader."""

from __future__ import annotations

import torch
from gpt import DATA, GPT, MEGATRON, Config
from printed import compiled, parameter, value
from torch import Tensor, fx

import shardc
from shardc import Mesh, P
from shardc.announcement import collectives_of, is_collective
from shardc.lifetime import split
from shardc.node import is_getitem
from shardc.ops.contraction import dot


def two_layers(x: Tensor, u: Tensor, d: Tensor) -> Tensor:
    return torch.tanh((x @ u).relu() @ d).square().sum()


def gpt(mesh: Mesh) -> shardc.Compiled:
    annotations = (DATA if "dp" in mesh.axis_names else {}) | MEGATRON
    with torch.device("meta"):
        model, ids = GPT(Config()), torch.empty(4, 32, dtype=torch.int64)
    return shardc.compile(model, mesh, annotations, args=(ids, ids))


def work_while(nodes: list[fx.Node], place: int) -> int:
    """How many contractions stand between a collective and its first reader."""
    end = next(i for i in range(place + 1, len(nodes)) if nodes[place] in nodes[i].all_input_nodes)
    return sum(node.target is dot for node in nodes[place:end])


def test_gradients_of_weights_are_made_while_an_activations_gradient_is_reduced() -> None:
    for mesh in (Mesh(tp=2), Mesh(dp=2, tp=2)):
        program = gpt(mesh).at("overlap_collectives")
        backward = list(split(program).backward)
        read = [i for i, node in enumerate(backward) if is_collective(node) and "tp" in node.args[1]]  # type: ignore[operator]
        assert len(read) >= 4 and all(work_while(backward, i) for i in read)


def test_the_order_alone_changes() -> None:
    program = gpt(Mesh(dp=2, tp=2))
    before, after = program.at("bucket_collectives"), program.at("overlap_collectives")
    assert sorted(node.name for node in before.graph.nodes) == sorted(node.name for node in after.graph.nodes)
    assert {each.name for each in collectives_of(before)} == {each.name for each in collectives_of(after)}
    assert [node.name for node in split(before).forward] == [node.name for node in split(after).forward]


def test_what_a_bucket_holds_is_picked_where_it_is_read() -> None:
    weights = {"u": parameter(6, 4), "d": parameter(4, 6)}
    program = compiled(two_layers, Mesh(dp=2), {"x": P("dp"), "param:*": P("dp")}, train=True, x=value(8, 6), **weights)
    nodes = [node for node in program.at("overlap_collectives").graph.nodes if node.op != "placeholder"]
    picks = [i for i, node in enumerate(nodes) if is_getitem(node)]
    assert picks and all(nodes[i] in nodes[i + 1].all_input_nodes or is_getitem(nodes[i + 1]) for i in picks)
