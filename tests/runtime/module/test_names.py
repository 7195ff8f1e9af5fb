"""Names at a model's root are the user's, whatever shardc calls what is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import shardc
from shardc import Mesh, P, ShardingError
from shardc.runtime.module.module import OFFERED

ANNOTATIONS = {"x": P("dp"), "program.weight": P("tp")}


class Named(nn.Module):
    """Has a parameter, buffers and submodules of all the names that a parallel module offers, and of private ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("seed", torch.arange(8.0))
        self.compile_for = nn.Parameter(torch.ones(8))
        self.program, self.clip_grad_norm_ = nn.Linear(8, 8), nn.Linear(8, 8)
        self.runtime, self._model, self.gate, self._variants = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        for layer in (self.program, self.clip_grad_norm_, self.runtime, self._model, self.gate, self._variants):
            x = torch.tanh(layer(x * self.compile_for + self.seed))
        return x.square().mean() * self.step


def trained(module: nn.Module, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a few steps, and the state after them as plain tensors."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)
    for _ in range(steps):
        loss = module(x)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in state(module)}


def state(module: nn.Module) -> Any:
    return module.state_dict().items()


def made() -> Named:
    torch.manual_seed(0)
    return Named().double()


def run(path: str, runtime: str) -> bool:
    """Whether a parallel module trains as the model does, is saved and is loaded; and its tensors have its names."""
    mesh = Mesh(dp=2, tp=2)
    parallel = shardc.parallelize(made(), mesh, ANNOTATIONS, runtime=runtime)
    found, expected = trained(parallel), trained(made())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert float(parallel.step) == 3 and parallel.shardc.step == 3 and parallel.shardc.seed == 0
    assert isinstance(parallel.program, nn.Linear) and parallel.get_submodule("program") is parallel.program
    assert parallel.get_parameter("_model.weight") is dict(parallel.named_parameters())["_model.weight"]
    assert get_model_state_dict(parallel).keys() == made().state_dict().keys()
    parallel.shardc.clip_grad_norm_(1.0)
    shardc.save(path, parallel)
    other = shardc.parallelize(Named().double(), mesh, ANNOTATIONS, runtime=runtime)
    shardc.load(path, other)
    torch.testing.assert_close(trained(other), trained(parallel), rtol=0, atol=1e-12)
    return other.shardc.step == parallel.shardc.step == 6


def test_a_model_with_every_name_of_ours_trains_saves_and_loads(tmp_path: Path) -> None:
    assert {name for name in OFFERED if not hasattr(made(), name)} == set()
    assert run(str(tmp_path), "virtual")


def test_a_model_with_every_name_of_ours_runs_on_real_ranks(gloo: GlooPool, tmp_path: Path) -> None:
    assert all(gloo.run(run, str(tmp_path), "distributed"))


def test_without_such_names_they_are_the_runtimes() -> None:
    parallel = shardc.parallelize(nn.Linear(4, 4), Mesh(dp=2), {"input": P("dp")})
    parallel.seed = 7
    parallel(torch.ones(2, 4))
    assert (parallel.seed, parallel.step, parallel.shardc.seed, parallel.shardc.step) == (7, 1, 7, 1)
    assert parallel.program is parallel.shardc.program
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = parallel.no_such_name


def test_the_one_name_that_is_ours_is_refused_in_words() -> None:
    model = nn.Linear(4, 4)
    model.shardc = nn.Linear(4, 4)
    with pytest.raises(ShardingError, match=r"its attribute 'shardc'\n(.*\n)*  rename the attribute"):
        shardc.parallelize(model, Mesh(dp=2), {})
