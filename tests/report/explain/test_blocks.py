"""Two of a model's repeated blocks stand for all of them where advice tries changes."""

from __future__ import annotations

import gpt
import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.report.explain.advice import Advisor, best_changes
from shardc.report.explain.blocks import blocks_text, like_blocks, nearest_blocks, repeated_blocks, with_blocks
from shardc.report.explain.retry import Retry

MESH = Mesh(dp=2, tp=2)


def four_layers() -> shardc.Compiled:
    """A GPT of four layers, of which the bias of each is annotated as whole where its layer is cut."""
    model, config = gpt.gpt()[0], gpt.Config(layers=4)
    model = type(model)(config)
    _, args, kwargs, annotations = gpt.gpt()
    return shardc.compile(model, MESH, {**annotations, "*.mlp.up.bias": P()}, args=args, kwargs=kwargs)


def test_lists_of_like_modules_are_repeated_and_the_outermost_alone() -> None:
    block = [nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]) for _ in range(3)]
    unlike = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)])
    model = nn.ModuleDict({"blocks": nn.ModuleList(block), "unlike": unlike, "pair": nn.ModuleList(unlike[:2])})
    assert repeated_blocks(model) == {"blocks": (("0",), ("1",), ("2",))}


def test_modules_that_alternate_are_blocks_of_several() -> None:
    dense, routed = (lambda width=width: nn.ModuleDict({"up": nn.Linear(4, width)}) for width in (8, 16))
    layers = nn.ModuleList([nn.Linear(4, 4), *(make() for _ in range(3) for make in (dense, routed)), dense()])
    assert like_blocks(layers) == (("1", "2"), ("3", "4"), ("5", "6"))
    assert nearest_blocks({"layers": like_blocks(layers)}, ["layers.4.up"]) == {"layers": ("1", "2", "3", "4")}
    leaves = nn.Sequential(*(make() for _ in range(3) for make in (lambda: nn.Linear(4, 4), nn.ReLU)))
    assert len(like_blocks(leaves)) == 1, "layers and activations in turn may be cut in turn"


def test_the_blocks_that_are_named_are_kept_first_and_keep_their_names() -> None:
    lists = {"encoder.layers": (("0",), ("1",), ("2",), ("3",)), "decoder": (("0",), ("1",), ("2",))}
    kept = nearest_blocks(lists, ["head", "encoder.layers.2.mlp", "encoder.layers.0"])
    assert kept == {"encoder.layers": ("0", "2"), "decoder": ("0", "1")}
    assert blocks_text(kept) == "blocks 0 and 2 of encoder.layers and blocks 0 and 1 of decoder"


def test_a_model_with_fewer_blocks_shares_the_rest_and_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
    small = with_blocks(model, {"1": ("0", "2")})
    assert [name for name, _ in small.named_parameters()] == [
        "0.weight", "1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"
    ]  # fmt: skip
    assert small[0] is model[0] and small[1][1] is model[1][2] and len(model[1]) == 4


def test_changes_are_tried_on_two_blocks_and_the_costs_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = four_layers()
    gathered = [each.name for each in compiled.collectives if each.kind == "all_gather"]
    found = [Advisor(compiled).advise(name) for name in (gathered[0], gathered[-1])]
    monkeypatch.setattr(Retry, "near", lambda self, names: None)
    on_all = [Advisor(compiled).advise(name) for name in (gathered[0], gathered[-1])]
    assert [each.suggestion for each in found] == [each.suggestion for each in on_all]
    assert [each.blocks for each in found] == ["blocks 0 and 3 of blocks", "blocks 0 and 1 of blocks"]
    assert "tried on blocks 0 and 3 of blocks to find it" in found[0].text()


def test_what_two_blocks_promise_and_the_whole_does_not_hold_is_tried_on_the_whole() -> None:
    compiled = four_layers()
    name = next(each.name for each in compiled.collectives if each.kind == "all_gather")
    advisor = Advisor(compiled)
    expected = advisor.advise(name)
    near = advisor._retry.near(advisor._goal(name).paths)
    assert near is not None
    changes, is_free, _ = best_changes(advisor._goal(name), near)
    assert changes and is_free
    advisor._retry._attempts = {key: None for key, attempt in advisor._retry._attempts.items() if attempt}
    again = advisor.advise(name)  # now those changes do not compile for the whole model
    assert again.suggestion is None or again.suggestion.change not in {each.text for each in changes}
    assert (again.blocks, expected.blocks) == ("", "blocks 0 and 3 of blocks")


class Indexed(nn.Module):
    """Needs each of its blocks by number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = self.blocks[i](x).relu()
        return x.sum()


def test_a_model_that_needs_all_its_blocks_is_tried_whole() -> None:
    annotations = {"x": P("dp"), "blocks.*.weight": P("tp")}
    compiled = shardc.compile(Indexed(), MESH, annotations, args=(torch.randn(8, 8),))
    advice = Advisor(compiled).advise(compiled.collectives[0].name)
    assert advice.blocks == "" and advice.tried
