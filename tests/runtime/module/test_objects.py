"""What a model changes in the arguments of a call is changed there, as by the user's own model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc import Mesh, P, ShardingError
from shardc.language.errors import CaptureError

CUT = {"inner.weight": P("tp", None), "x": P("dp")}


class History:
    """A state that its caller makes and a model fills."""

    def __init__(self) -> None:
        self.steps, self.seen = 0, dict[str, Any]()
        self.all: list[Tensor] = []


@dataclass
class Sums:
    total: Tensor
    counts: list[int] = field(default_factory=list)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, history: Any, sums: Any = None, scale: Tensor | None = None) -> Any:
        h = self.inner(x)
        history.steps += 1
        history.all.append(h.detach())
        history.seen["last"] = h.detach()[-1]
        if sums is not None:
            sums.total = sums.total + h.detach().sum(0)
            sums.counts.append(len(x))
        if scale is not None:
            scale.add_(h.detach().sum(0))
        return {"loss": h.square().mean(), "history": history}


def compared(mesh: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    alone = Remembers()
    return alone, shardc.parallelize(alone, mesh, CUT)


def plain(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_objects(mesh: Any) -> bool:
    """Two calls of both models on objects and tensors of their own; whether a DTensor was left in an object."""
    runs = []
    for model in compared(mesh):
        history, sums, scale = History(), Sums(torch.zeros(8)), torch.zeros(8)
        steps, all_ = history.all, sums.counts
        for i in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
            result = model(x, history, sums, scale)
            result["loss"].backward()
        assert result["history"] is history
        assert history.all is steps and sums.counts is all_
        runs.append((history, sums, scale, model.inner.weight.grad))
    (history, sums, scale, grad), (found, found_sums, found_scale, found_grad) = runs
    assert (found.steps, found_sums.counts, found.seen.keys()) == (2, [4, 4], {"last"})
    for one, other in [
        *zip(history.all, found.all, strict=True), (history.seen["last"], found.seen["last"]),
        (sums.total, found_sums.total), (scale, found_scale), (grad, found_grad),
    ]:  # fmt: skip
        torch.testing.assert_close(plain(other), one)
    return isinstance(found.all[0], DTensor)


def test_objects_and_tensors_are_changed_on_virtual_ranks() -> None:
    assert not check_objects(Mesh(dp=2, tp=2))


def on_gloo() -> bool:
    return check_objects(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def test_objects_and_tensors_are_changed_on_the_ranks_of_a_job(gloo: GlooPool) -> None:
    assert gloo.run(on_gloo) == [True] * 4


def test_compiling_and_simulating_change_nothing() -> None:
    model, history, scale = Remembers(), History(), torch.zeros(8)
    history.all.append(torch.ones(3))
    call: dict[str, Any] = {"history": history, "scale": scale}
    compiled = shardc.compile(model, Mesh(dp=2, tp=2), CUT, args=(torch.randn(4, 8),), kwargs=call)
    result, _ = compiled.simulate(torch.randn(4, 8), **call)
    assert (history.steps, len(history.all), history.seen) == (0, 1, {})
    assert not scale.any()
    assert (result["history"].steps, len(result["history"].all)) == (1, 2)
    assert type(result["history"].all[1]) is Tensor


def test_two_objects_of_one_kind_stay_apart() -> None:
    _, parallel = compared(Mesh(dp=2, tp=2))
    one, two = History(), History()
    parallel(torch.ones(4, 8), one)
    parallel(torch.zeros(4, 8), two)
    assert len(one.all) == len(two.all) == 1 and one.seen is not two.seen
    assert not torch.equal(one.all[0], two.all[0])
    assert len(parallel.shardc.variants) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_a_tensor_that_is_changed_in_a_pipeline_has_the_new_value(size: int) -> None:
    class Doubles(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2)).sum()

    model = Doubles(*(nn.Linear(4, 4) for _ in range(4)))
    parallel = shardc.parallelize(model, Mesh(pp=size), pipeline=shardc.Pipeline("pp", microbatches=2))
    x = torch.ones(4, 4)
    parallel(x).backward()
    assert torch.equal(x, torch.full((4, 4), 2.0))


class Steps(nn.Module):
    """Runs ``change`` on its further arguments, which gets the result of a layer."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change = nn.Linear(8, 8), change

    def forward(self, x: Tensor, *states: Any) -> Tensor:
        y = self.layer(x)
        self.change(y, *states)
        return y


def steps(change: Any) -> tuple[Any, Any]:
    alone = Steps(change)
    return alone, shardc.parallelize(alone, Mesh(dp=2, tp=2), {"layer.weight": P("tp"), "x": P("dp")})


def grow(y: Tensor, log: list[Tensor], table: dict[str, Any]) -> None:
    log.append(y.detach())
    table["sum"] = table.get("sum", 0) + y.detach()


def test_lists_and_dicts_are_changed() -> None:
    runs = []
    for model in steps(grow):
        log: list[Tensor] = []
        table: dict[str, Any] = {}
        for _ in range(2):
            model(torch.ones(4, 8), log, table)
        runs.append((log, table))
    (log, table), (found, found_table) = runs
    torch.testing.assert_close(found, log)
    torch.testing.assert_close(found_table["sum"], table["sum"])


class Empty:
    """An object that has no attributes at first."""


class Adds:
    def __init__(self) -> None:
        self.total = torch.zeros(4, 8)

    def __call__(self, y: Tensor) -> None:
        self.total = self.total + y.detach()


def test_objects_without_attributes_and_those_that_are_called_are_changed() -> None:
    def change(y: Tensor, empty: Any, adds: Any) -> None:
        empty.latest = y.detach()
        adds(y)

    runs = []
    for model in steps(change):
        empty, adds = Empty(), Adds()
        for i in range(2):
            model(torch.ones(4, 8) * i, empty, adds)
        runs.append((vars(empty)["latest"], adds.total))
    torch.testing.assert_close(runs[1], runs[0])
    assert type(runs[1][0]) is Tensor


def test_one_tensor_or_object_in_two_places_is_refused_where_it_is_changed() -> None:
    def change(y: Tensor, one: Tensor, other: Tensor) -> None:
        one.add_(1)

    _, parallel = steps(change)
    whole = torch.zeros(4, 8)
    parallel(torch.ones(4, 8), whole, torch.zeros(4, 8))
    with pytest.raises(
        ShardingError, match=r"input 'states.1': it is 'states.0', or shares its memory\n  the model changes"
    ):
        parallel(torch.ones(4, 8), whole, whole[:])
    _, parallel = steps(lambda y, one, other: setattr(one, "latest", y.detach()))
    history = Empty()
    with pytest.raises(ShardingError, match=r"input 'states.1': it is 'states.0'"):
        parallel(torch.ones(4, 8), history, history)


def test_a_tensor_gets_no_value_that_has_a_gradient() -> None:
    _, parallel = steps(lambda y, out: out.copy_(y))
    with pytest.raises(CaptureError, match="input 'states.0'\n  the forward writes to it what has a gradient"):
        parallel(torch.ones(4, 8), torch.zeros(4, 8))
