"""What ``suggest`` finds for the kinds of models that people train, small, equals one device and costs what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe
from conformance.suggest.models import Recommender
from conformance.zoo.models import MODELS, Sizes
from torch import nn

import shardc
from shardc.language.machine import Device, Link, Machine
from shardc.search.suggestion import Suggestion
from shardc.verify import verify

# Two nodes of two ranks, which compute slowly enough that a model of a few thousand parameters is worth cutting.
MACHINE = Machine(
    {"*": Link(1e-9, 1e9)}, Device({"float32": 1e11}, 1e11, host=1e9), node=2, between=Link(1e-8, 2e8)
)  # fmt: skip
Made = tuple[nn.Module, Mapping[str, Any]]


def experts() -> Made:
    x = torch.randn(8, 8, 16)
    return moe.Model(layers=2, width=16, experts=4), {"x": x, "target": torch.randn_like(x)}


def recommender() -> Made:
    rows, samples = (64, 32, 16), 8
    categories = torch.stack([torch.randint(each, (samples,)) for each in rows], 1)
    inputs = {"numbers": torch.randn(samples, 5), "categories": categories, "clicked": torch.rand(samples)}
    return Recommender(rows, 8, 5), inputs


def of_zoo(name: str) -> Callable[[], Made]:
    return lambda: MODELS[name](Sizes())[:2]


MADE = {name: of_zoo(name) for name in ("gpt2", "llama", "gptj", "t5", "bert", "vit", "mixtral", "resnet", "unet")}
MADE |= {"experts": experts, "recommender": recommender}
FEW = ("experts",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.sweep] * (name not in FEW)) for name in MADE])
def test_every_suggestion_for_a_model_equals_one_device_and_costs_what_it_says(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MADE[name]()
    model.train()
    for each in shardc.suggest(model, 4, kwargs=inputs, links=MACHINE, top=4):
        check(each, model, inputs)


def check(suggestion: Suggestion, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    program = shardc.compile(model, kwargs=inputs, **suggestion)
    assert (program.memory, program.timeline.makespan) == (suggestion.memory, suggestion.seconds)
    options = {name: suggestion[name] for name in suggestion if name not in ("mesh", "annotations")}
    differences = verify(model, suggestion.mesh, suggestion.annotations, kwargs=inputs, options=options)
    assert all(each.is_small for each in differences), suggestion.summary()
