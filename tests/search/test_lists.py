"""Blocks of a model, alike or not: how many stages it may have, and which globs name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from search_models import chain
from torch import Tensor, nn

import shardc
from shardc.language.machine import Device, Link, Machine
from shardc.search.space.lists import glob_of_blocks, lists_of, num_parts


class Residual(nn.Module):
    def __init__(self, hidden: int, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def alternating() -> nn.Module:
    """Blocks of two widths in turn: no three in a row are alike."""
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*map(Residual, (384, 400, 384, 400))), Loss())


def two_lists(first: str, second: str) -> nn.Module:
    lists = {name: nn.ModuleDict({"layers": nn.ModuleList([Residual(8), Residual(8)])}) for name in (first, second)}
    return nn.ModuleDict(lists)


@pytest.mark.parametrize(
    ("model", "lists", "parts", "glob"),
    [
        (alternating(), {"1": ("0", "1", "2", "3")}, 4, "1.*"),
        (two_lists("encoder", "decoder"), {f"{name}.layers": ("0", "1") for name in ("encoder", "decoder")}, 4,
         "*.layers.*"),
        (chain(8, 8, 8, 8), {}, 3, None),
        (nn.LayerNorm(4), {}, 0, None),
    ],
    ids=["alternating", "two lists", "layers alone", "nothing"],
)  # fmt: skip
def test_blocks_are_the_items_of_the_outermost_lists(
    model: nn.Module, lists: Mapping[str, Any], parts: int, glob: str | None
) -> None:
    assert lists_of(model) == lists
    assert num_parts(model) == parts
    assert glob_of_blocks(lists) == glob


def test_a_glob_of_blocks_matches_those_of_every_list_that_it_stands_for() -> None:
    assert glob_of_blocks(["layers", "decoder.layers"]) == "layers.*", "*.layers.* would leave out the first"
    assert glob_of_blocks(["norms", "layers"]) == "norms.*"


def test_a_pipeline_is_found_for_blocks_that_alternate() -> None:
    with torch.device("meta"):
        model, x = alternating(), torch.empty(256, 64)
    slow = Machine({"*": Link(1e-7, 1e7)}, Device({"float32": 2e9}, 1e10))
    best = shardc.suggest(model, 4, args=(x,), links=slow)[0]
    assert best.pipeline is not None and best.mesh.sizes == {"pp": 4}
