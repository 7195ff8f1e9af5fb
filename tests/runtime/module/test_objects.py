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
from shardc import Mesh, P

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
