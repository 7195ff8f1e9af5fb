"""Values that depend on no input are computed once, and are never a tensor that the user holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt import DATA, GPT, MEGATRON, Config
from parallel_models import whole
from printed import compiled, parameter, value
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.execute.executor import constants, share

VOCABULARY = {"tokens.weight": P("tp"), "head.weight": P("tp")}


def names(fn: Any, mesh: Mesh, annotations: dict[str, P], **inputs: Any) -> list[str]:
    return [node.name for node in constants(compiled(fn, mesh, annotations, train=True, **inputs).program)]


def test_values_computed_from_constants_alone_are_computed_once() -> None:
    def scaled(x: Tensor) -> Tensor:
        ramp = torch.arange(8.0)
        return (x * ramp * ramp.cos()).sum()

    assert names(scaled, Mesh(tp=2), {"x": P("tp")}, x=value(8)) == ["arange", "shard_slice_tp", "cos"]


def test_random_and_large_values_are_not_cached() -> None:
    def drawn(x: Tensor) -> Tensor:
        return (x + torch.rand(8)).sum() + torch.ones(512, 1024).mul(2).sum()

    found = names(drawn, Mesh(tp=2), {"x": P("tp")}, x=parameter(8))
    assert found == ["scalar_tensor", "arange", "shard_slice_tp", "mul_1"], "the counts of what is drawn alone"


def test_a_constant_that_is_returned_is_not_cached() -> None:
    def shown(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ones, ramp = torch.ones(8), torch.arange(8.0)
        return x + ones, ones, ramp.view(2, 4)[0]

    assert names(shown, Mesh(tp=2), {}, x=value(8)) == []


def test_equal_constants_are_stored_once() -> None:
    mask, zero = torch.ones(3, 3, dtype=torch.bool).tril(), torch.zeros(())
    many = [mask, None, mask.clone(), mask.t(), zero, -zero, zero.clone(), zero.bfloat16(), torch.ones(0)]
    kept = [*many]
    share(kept)
    assert [next(i for i, each in enumerate(kept) if each is value) for value in kept] == [0, 1, 0, 3, 4, 5, 4, 7, 8]
    assert all(value is each or torch.equal(value, each) for value, each in zip(kept, many, strict=True))


def steps() -> list[set[str]]:
    """The ops of two steps; nothing of them may be made of nothing."""
    torch.manual_seed(0)
    alone = GPT(Config()).double()
    parallel = shardc.parallelize(alone, make_device_mesh(Mesh(dp=2, tp=2)), DATA | MEGATRON | VOCABULARY)
    seen = []
    for step in range(3):
        ids = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(step))
        with torch.profiler.profile() as profile:
            loss = parallel(ids, ids)
            loss.backward()
        torch.testing.assert_close(loss, alone(ids, ids), rtol=1e-12, atol=0)
        seen.append({event.key for event in profile.key_averages()})
    return seen


def test_no_later_step_computes_constants_again(gloo: Any) -> None:
    for seen in gloo.run(steps):
        assert all("aten::embedding" in ops and "aten::gather" in ops for ops in seen)
        assert not any({"aten::arange", "aten::scalar_tensor"} & ops for ops in seen[1:])


class Scaled(nn.Module):
    """Times a number that is made of nothing, in its own dtype also where the user casts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            scale = torch.arange(1, 8, dtype=torch.bfloat16).prod() - 5000  # what float32 would not round
            return (x * self.weight).square().mean(), scale * x.bfloat16()


def first_call(mode: str) -> None:
    """What is made in a mode of the first call is also for the calls after it, and for training."""
    alone = Scaled()
    annotations = {"x": P("dp"), "weight": P("tp")}
    parallel = shardc.parallelize(alone, make_device_mesh(Mesh(dp=2, tp=2)), annotations)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    modes = {"inference": torch.inference_mode(), "autocast": torch.autocast("cpu", dtype=torch.bfloat16)}
    x = torch.ones(4, 8)
    with modes[mode]:
        parallel(x)
    for again in torch.no_grad(), modes[mode]:
        with again:
            for ours, theirs in zip(parallel(x), alone(x), strict=True):
                torch.testing.assert_close(whole(ours), theirs)
    parallel(x)[0].backward()
    optimizer.step()
    assert parallel(x)[0] < alone(x)[0]


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_constants_of_the_first_call_serve_calls_in_other_modes(gloo: Any, mode: str) -> None:
    gloo.run(first_call, mode)


def test_constants_of_equal_bits_are_shared_without_numpy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(Tensor, "numpy", refuse)
    values = [
        torch.ones(2, 3).tril(),
        None,
        torch.ones(2, 3).tril(),
        torch.ones(3, 2),
        torch.tensor(0.0),
        -torch.zeros(()),
    ]
    share(values)
    assert values[2] is values[0] and values[1] is None
    assert len({id(each) for each in values}) == 5, "zeros of two signs are two"
