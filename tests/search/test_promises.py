"""What a suggestion promises beside others: more devices, more memory or fewer fixed parts never make it slower."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from search_models import Blocks, chain
from torch import nn

import shardc
from shardc import P, Precision, Remat, ShardingError
from shardc.language.errors import OptionError
from shardc.language.machine import Device, Link, Machine

SAME = 1 + 1e-6  # sums in another order


def products(*widths: int, samples: int = 16) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return chain(*widths), (torch.empty(samples, widths[0], device="meta"),)


def residual(layers: int = 3) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(layers)]
        return Blocks(blocks), (torch.empty(16, 64),)


def first(model: nn.Module, args: tuple[torch.Tensor, ...], devices: int, **asked: Any) -> shardc.Suggestion:
    return shardc.suggest(model, devices, args=args, top=1, **asked)[0]


@pytest.mark.parametrize("devices", [4, 512], ids=str)
def test_devices_are_idle_where_all_of_them_take_longer_than_one(devices: int) -> None:
    """More ranks than any dim has elements are no error either."""
    model, args = products(64, 128, 64)
    best = first(model, args, devices)
    assert best.seconds <= SAME * first(model, args, 1).seconds
    assert best.mesh.size == devices and any("cuts no work" in reason for reason in best.reasons)


def test_nodes_are_idle_where_the_link_between_them_is_slow() -> None:
    model, args = products(1024, 4096, 1024, samples=4096)
    asked: dict[str, Any] = {"device": "h100", "fix": {"pipeline": None, "overlap": None}}
    inside = first(model, args, 4, links="nvlink", **asked)
    across = [first(model, args, 8, links=("nvlink", each), nodes=2, **asked) for each in ("ethernet", "loopback")]
    assert all(each.seconds <= SAME * inside.seconds for each in across)


@pytest.mark.parametrize("less", [{"annotations": {"0.weight": P()}}, {"fix": {"zero": None}}, {"fix": {"zero": 3}}])
def test_a_plan_with_less_freedom_is_no_faster(less: dict[str, Any]) -> None:
    model, args = products(64, 128, 64)
    assert first(model, args, 4).seconds <= SAME * first(model, args, 4, **less).seconds


def test_a_limit_that_the_best_plan_meets_exactly_leaves_it_the_best() -> None:
    model, args = residual()
    best = first(model, args, 4)
    limited = first(model, args, 4, memory=best.memory["peak"])
    assert limited.fits and limited.seconds <= SAME * best.seconds


def test_the_least_memory_is_no_more_than_that_of_the_nearest_plan_where_nothing_fits() -> None:
    model, args = residual()
    least, nearest = first(model, args, 4, objective="memory"), first(model, args, 4, memory=1000)
    assert least.memory["peak"] <= nearest.memory["peak"]


def test_the_bound_is_below_every_step_in_a_fixed_precision() -> None:
    model, args = products(2048, 8192, 2048, samples=65536)
    fix = {"precision": Precision(torch.bfloat16), "pipeline": None}
    found = shardc.suggest(model, 2, args=args, device="h100", links="nvlink", fix=fix)
    assert 0 < found.bound <= found[0].seconds


@pytest.mark.parametrize(
    "remat", [Remat("blocks.1"), pytest.param(Remat(budget=10_000), marks=pytest.mark.sweep)], ids=str
)
def test_a_fixed_recomputation_is_in_every_plan(remat: Remat) -> None:
    model, args = residual(layers=4)
    found = shardc.suggest(model, 4, args=args, fix={"remat": remat})
    assert found and all(each.remat == remat for each in found)
    for each in found[:2]:
        assert shardc.compile(model, args=args, **each).memory["peak"] == each.memory["peak"]


def test_a_list_of_fixed_recomputations_allows_no_other() -> None:
    model, args = residual()
    allowed = [None, Remat("blocks.*")]
    found = shardc.suggest(model, 2, args=args, fix={"remat": allowed}, memory=250_000)
    assert all(each.remat in allowed for each in found)
    either = [Remat("blocks.*"), Remat("blocks.0")]
    one, other = (first(model, args, 2, fix={"remat": each}) for each in (either, either[::-1]))
    assert one.seconds == pytest.approx(other.seconds) and one.remat == other.remat == Remat("blocks.0")


def test_blocks_that_do_not_exist_are_named() -> None:
    model, args = residual()
    with pytest.raises(ShardingError, match="nope"):
        shardc.suggest(model, 2, args=args, fix={"remat": Remat("nope")})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"progress": 3}, "progress=3"),
        ({"fix": {"zero": True}}, "True"),
        ({"links": ("nvlink", "infiniband")}, "one node has no link to another"),
        ({"links": "nvlink,infiniband"}, "one node has no link to another"),
    ],
    ids=str,
)
def test_arguments_without_an_effect_are_refused(asked: dict[str, Any], message: str) -> None:
    model, args = products(64, 128, 64)
    with pytest.raises(OptionError, match=message):
        shardc.suggest(model, 2, args=args, **asked)


def test_ctrl_c_gives_what_there_is() -> None:
    """The plans that were compiled whole by then."""
    model, args = residual()
    compiled: list[str] = []

    def interrupt(text: str) -> None:
        compiled.extend([text] if "whole model" in text else [])
        if "whole model" in text and len(compiled) == 2:
            raise KeyboardInterrupt

    found = shardc.suggest(model, 4, args=args, progress=interrupt)
    assert len(found) == 1


@pytest.mark.parametrize("name", ["shardc.search.pricing.whole.cost_of", "shardc.search.suggest.reasons"])
def test_a_first_ctrl_c_loses_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Between the search and the first plan that is compiled whole, and before the first suggestion is made."""
    model, args = residual()
    function, calls = resolve_name(name), list[object]()

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return function(*args)

    expected = shardc.suggest(model, 4, args=args)
    monkeypatch.setattr(name, interrupted)
    found = shardc.suggest(model, 4, args=args)
    assert len(calls) > 1 and found[0].text() == expected[0].text()


def test_ctrl_c_leaves_no_pipeline_alone_that_was_compiled_to_see_whether_it_can_be() -> None:
    """A plan that the search has found to be far better is not compiled by then."""
    model, args = residual(layers=2)
    links = Machine({"*": Link(1e-6, 3e11)}, Device({"float32": 1e13}, 1e12), node=2, between=Link(3e-5, 3e9))
    begun: list[str] = []

    def interrupt(text: str) -> None:
        begun.extend([text] if "whole model" in text else [])
        if len(begun) == 2:
            begun.append("interrupted")
            raise KeyboardInterrupt

    found = shardc.suggest(model, 4, args=args, links=links, progress=interrupt)
    assert "pp=" in begun[0] and found[0].pipeline is None


@pytest.mark.parametrize(("when", "fix"), [("decisions", {}), ("on meshes", {"zero": 3})])
def test_ctrl_c_before_there_is_a_plan_is_one(when: str, fix: dict[str, Any]) -> None:
    def interrupt(text: str) -> None:
        if when in text:
            raise KeyboardInterrupt

    model, args = residual()
    with pytest.raises(KeyboardInterrupt):
        shardc.suggest(model, 4, args=args, fix=fix, progress=interrupt)
