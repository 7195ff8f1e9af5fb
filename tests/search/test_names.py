"""Globs tell blocks of other shapes apart, so that a plan may cut the parameters of some blocks alone."""

from __future__ import annotations

import pytest
import torch
from search_models import chain
from torch import Tensor, nn

import shardc
from shardc.language.machine import Machine
from shardc.search.space.names import parameter_globs

MACHINE = Machine({"*": "ethernet"}, "h100")


@pytest.mark.parametrize(
    ("widths", "globs"),
    [
        ((8, 8, 8), ("*.weight", "*.weight")),
        ((8, 8, 8, 32, 8), ("[01].weight", "[01].weight", "2.weight", "3.weight")),
        ((8, 8, 8, 8, 32), ("[!3].weight", "[!3].weight", "[!3].weight", "3.weight")),
        ((8, 16, 8, 32), ("0.weight", "1.weight", "2.weight")),  # none is like its neighbour
        ((8, *[8] * 11, 32), ("*.weight",) * 12),  # no glob tells the last one from the others
    ],
)
def test_a_glob_matches_the_blocks_of_one_shape(widths: tuple[int, ...], globs: tuple[str, ...]) -> None:
    assert tuple(parameter_globs(chain(*widths)).values()) == globs


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 4 * width), nn.Linear(4 * width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Numbered(nn.Module):
    """Blocks that are attributes of a module, as ``block1`` and ``block2`` are; no list knows of them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        for i, width in enumerate(widths):
            self.add_module(f"block{i}", Mlp(width))
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for name, block in self.named_children():
            x = block(x) if name.startswith("block") else x
        return self.fc2(self.fc1(x).relu()).square().mean()


def test_blocks_are_told_by_their_numbers_where_they_are_attributes_or_in_a_dict() -> None:
    globs = parameter_globs(Numbered(8, 8, 8))
    assert {glob for name, glob in globs.items() if name.startswith("block")} == {
        "*.up.weight", "*.up.bias", "*.down.weight", "*.down.bias"
    }  # fmt: skip
    assert globs["fc1.weight"] == "fc1.weight", "layers may be cut in turn"
    assert parameter_globs(Numbered(8, 16, 8))["block0.up.weight"] == "block0.up.weight", "they are not alike"
    blocks = nn.ModuleDict({"net": nn.ModuleDict({f"b{i}": Mlp() for i in range(12)}), "up": nn.Linear(64, 64)})
    assert set(parameter_globs(blocks).values()) == {
        "*.up.weight", "*.up.bias", "*.down.weight", "*.down.bias", "up.weight", "up.bias"
    }  # fmt: skip


def test_a_glob_of_a_name_with_glob_characters_matches_it() -> None:
    model = nn.Module()
    model.add_module("a[0]", nn.Linear(4, 4))
    model.add_module("b*", nn.Linear(4, 4, bias=False))
    globs = parameter_globs(model)
    assert globs == {"a[0].weight": "a[[]0].weight", "a[0].bias": "a[[]0].bias", "b*.weight": "b[*].weight"}


def test_no_plan_has_an_entry_for_each_of_several_like_blocks() -> None:
    with torch.device("meta"):
        model, x = Numbered(64, 64, 64), torch.empty(64, 64)
    for each in shardc.suggest(model, 2, args=(x,), links=MACHINE, fix={"pipeline": None}):
        assert not any("block" in name for name in each.annotations), each.annotations


def test_a_wide_layer_is_cut_alone_where_narrow_ones_are_alike() -> None:
    model = chain(512, 512, 512, 65536, 512)
    x, fix = torch.empty(32, 512, device="meta"), {"mesh": "4", "pipeline": None}
    best = shardc.suggest(model, 4, args=(x,), links=MACHINE, fix=fix)
    by_hand = shardc.compile(
        model,
        shardc.Mesh(tp=4, device_ids=None),
        {"2.weight": shardc.P("tp")},
        args=(x,),
        links=MACHINE,
    )
    assert {*best[0].annotations} <= {"2.weight", "3.weight"}
    assert best[0].memory["peak"] == by_hand.memory["peak"]
