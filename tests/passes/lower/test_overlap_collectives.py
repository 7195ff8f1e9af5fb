"""overlap_collectives: work that can wait stands between a collective and its first reader."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cases import few
from gpt import DATA, GPT, MEGATRON, Config
from printed import compiled, parameter, value
from torch import Tensor, fx

import shardc
from shardc import Mesh, P
from shardc.ops.contraction import dot
from shardc.program.communication import is_collective, is_early
from shardc.program.lifetime import split
from shardc.program.node import is_getitem
from shardc.program.traffic import collectives_of


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


def test_targets_are_counted_before_all_else_and_no_step_waits_for_a_loss() -> None:
    """Every rank's mean is over all targets that count, which no parameter is needed for; the loss goes out divided."""
    program = gpt(Mesh(dp=2, tp=2)).program
    forward = [node for node in split(program).forward if not is_getitem(node)]
    count, loss = (node for node in forward if is_collective(node) and node.args[1] == ("dp",))
    assert forward.index(loss) == len(forward) - 1 and set(loss.users) == {program.output_node}
    assert forward.index(count) < min(i for i, node in enumerate(forward) if program.source(node).module)
    assert loss.all_input_nodes[0].target is torch.ops.aten.div.Tensor and count in loss.all_input_nodes[0].args


def test_computation_is_not_moved_forward() -> None:
    """A sum that needs a product of inputs is left where it stands, also where no parameter has a part in it."""

    def scaled(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).relu().sum() / (x.relu() @ y).sum()

    program = compiled(scaled, Mesh(dp=2), {"x": P("dp")}, x=value(8, 6), y=value(6, 4))
    before, after = program.at("bucket_collectives"), program.at("overlap_collectives")
    assert [node.name for node in before.graph.nodes] == [node.name for node in after.graph.nodes]


def gathers(part: Sequence[fx.Node]) -> list[tuple[int, int, int]]:
    """Of each gather of a part: where it is issued, and where its first and its last reader stand."""
    place = {node: i for i, node in enumerate(part)}
    found = []
    for node in part:
        if is_early(node):
            picks = [user for user in node.users if is_getitem(user)] or [node]
            readers = [place[user] for pick in picks for user in pick.users if user in place]
            found.append((place[node], min(readers), max(readers)))
    return found


@pytest.mark.parametrize(("mesh", "annotations"), [(Mesh(dp=4), DATA), (Mesh(dp=2, tp=2), DATA | MEGATRON)], ids=str)
@pytest.mark.parametrize("remat", [None, shardc.Remat("blocks.*")], ids=str)
def test_the_next_layers_parameters_are_gathered_while_a_layer_computes(
    mesh: Mesh, annotations: dict[str, P], remat: shardc.Remat | None
) -> None:
    """Each layer's right before the first reader of the layer before it, so that no third one is there."""
    with torch.device("meta"):
        model, ids = GPT(Config(layers=5)), torch.empty(4, 32, dtype=torch.int64)
    program = shardc.compile(model, mesh, annotations, args=(ids, ids), zero=shardc.Zero(), remat=remat).program
    for part in (split(program).forward, split(program).backward):
        found = gathers(part)
        firsts = sorted({first for _, first, _ in found})
        assert len(found) >= 5
        for issued, first, _ in found:
            earlier = [place for place in firsts if place < first]
            assert issued < earlier[-1] if earlier else issued < first
            assert not earlier[:-1] or issued > earlier[-2]


def test_members_of_a_bucket_are_sliced_where_they_are_read() -> None:
    weights = {"u": parameter(6, 4), "d": parameter(4, 6)}
    program = compiled(two_layers, Mesh(dp=2), {"x": P("dp"), "param:*": P("dp")}, train=True, x=value(8, 6), **weights)
    nodes = [node for node in program.at("overlap_collectives").graph.nodes if node.op != "placeholder"]
    picks = [i for i, node in enumerate(nodes) if is_getitem(node)]
    assert picks and all(nodes[i] in nodes[i + 1].all_input_nodes or is_getitem(nodes[i + 1]) for i in picks)


@pytest.mark.parametrize("share", few([0.1, 0.3, 0.5, 1.1], 0.3))
def test_stage_3_holds_two_layers_in_however_many_buckets_they_go(share: float) -> None:
    """What is larger alone than a bucket is not gathered at the start of backward."""
    with torch.device("meta"):
        model, ids = GPT(Config(layers=6, vocab=32)), torch.empty(4, 32, dtype=torch.int64)
    layer = sum(each.nbytes for each in model.blocks[0].parameters())
    found = shardc.compile(
        model, Mesh(dp=4), DATA, args=(ids, ids), zero=shardc.Zero("dp", stage=3), bucket=int(share * layer)
    )
    rest = sum(each.nbytes for each in model.parameters()) - 6 * layer
    assert found.memory["gathered"] <= 2 * layer + rest + share * layer
