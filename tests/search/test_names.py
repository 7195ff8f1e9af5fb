"""Globs tell blocks of other shapes apart, so that a plan may cut the parameters of some blocks alone."""

from __future__ import annotations

import pytest
import torch
from search_models import chain

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


def test_a_wide_layer_is_cut_alone_where_narrow_ones_are_alike() -> None:
    model = chain(512, 512, 512, 65536, 512)
    best = shardc.suggest(model, 4, args=(torch.empty(32, 512, device="meta"),), links=MACHINE, fix={"pipeline": None})
    by_hand = shardc.compile(
        model,
        shardc.Mesh(tp=4, device_ids=None),
        {"2.weight": shardc.P("tp")},
        args=(torch.empty(32, 512, device="meta"),),
        links=MACHINE,
    )
    assert {*best[0].annotations} <= {"2.weight", "3.weight"}
    assert best[0].memory["peak"] == by_hand.memory["peak"]
