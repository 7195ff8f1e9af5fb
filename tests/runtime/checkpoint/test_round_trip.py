"""A checkpoint of one mesh is loaded on others, and training goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from gpt import GPT, Config, plan

import shardc
from shardc import Mesh, Zero
from shardc.options import Pipeline
from shardc.runtime.comm.distributed import make_device_mesh

CONFIG = Config(vocab=48, context=8, layers=1, heads=6, width=24, dropout=0.2, tied=True)
NEAR = 1e-6
STEPS = 10
BEFORE = 3


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(CONFIG.vocab, (2, 8, CONFIG.context), generator=torch.Generator().manual_seed(step))
    return ids[0], ids[1]


class Run:
    """A GPT with dropout, a fused weight and a tied one, AdamW without decay for vectors, a schedule of rates."""

    def __init__(self, mesh: Any, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        annotations = plan(Mesh.of(mesh))
        self.model = shardc.parallelize(GPT(CONFIG), mesh, annotations, args=batch(0), **options)
        vectors, matrices = ([x for x in self.model.parameters() if (x.ndim > 1) == is_one] for is_one in (0, 1))
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([each for each in groups if each["params"]], lr=1e-2)
        self.rates = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            loss = self.model(*batch(step))
            loss.backward()
            self.model.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, path: str, **options: Any) -> Any:
        return shardc.save(path, self.model, self.optimizer, scheduler=self.rates, **options)

    def load(self, path: str) -> dict[str, Any]:
        return shardc.load(path, self.model, self.optimizer, scheduler=self.rates)


TARGETS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp=3": ({"tp": 3}, {}),
    "one rank": ({"one": 1}, {}),
    "dp=2, pp=2": ({"dp": 2, "pp": 2}, {"pipeline": Pipeline("pp", microbatches=2)}),
    "dp=4, ZeRO 1": ({"dp": 4}, {"zero": Zero("dp", 1)}),
}


def on_mesh(sizes: Mapping[str, int]) -> tuple[Any, bool]:
    """A mesh over the first ranks of the job, and whether this rank is in it."""
    mesh = make_device_mesh(Mesh(**sizes))
    return mesh, mesh.get_coordinate() is not None


def saved(path: str, stage: int) -> list[float]:
    """Train and save; then the losses of going on."""
    mesh, _ = on_mesh({"dp": 2, "tp": 2})
    run = Run(mesh, zero=Zero("dp", stage))
    run.train(0, BEFORE)
    run.save(path, extra={"epoch": 1, "seen": [3, 4]})
    return run.train(BEFORE, STEPS)


def resumed(path: str, name: str) -> list[float] | None:
    """The losses after loading, on the ranks of the mesh."""
    sizes, options = TARGETS[name]
    mesh, is_in = on_mesh(sizes)
    return gone_on(path, mesh, **options) if is_in else None


def gone_on(path: str, mesh: Any, **options: Any) -> list[float]:
    run = Run(mesh, seed=1, **options)
    loaded = run.load(path)
    assert loaded["step"] == BEFORE and loaded["extra"] == {"epoch": 1, "seen": [3, 4]}, loaded
    assert run.model.step == BEFORE
    return run.train(BEFORE, STEPS)


@pytest.fixture(scope="module", params=[3, 1, 2])
def checkpoint(request: pytest.FixtureRequest, gloo: GlooPool, tmp_path_factory: Any) -> tuple[str, torch.Tensor]:
    path = str(tmp_path_factory.mktemp("checkpoint"))
    losses = gloo.run(saved, path, request.param)
    assert all(each == losses[0] for each in losses)
    return path, torch.tensor(losses[0], dtype=torch.float64)


@pytest.mark.sweep
@pytest.mark.parametrize("name", TARGETS)
def test_another_mesh_goes_on_with_the_losses_of_an_undisturbed_run(
    gloo: GlooPool, checkpoint: tuple[str, torch.Tensor], name: str
) -> None:
    path, wanted = checkpoint
    found = [each for each in gloo.run(resumed, path, name) if each is not None]
    assert found
    off = float((torch.tensor(found, dtype=torch.float64) - wanted).abs().max())

    assert off <= NEAR, off


@pytest.mark.sweep
def test_virtual_ranks_go_on_with_the_losses_of_an_undisturbed_run(checkpoint: tuple[str, torch.Tensor]) -> None:
    path, wanted = checkpoint
    off = float((torch.tensor(gone_on(path, Mesh(dp=2, tp=3)), dtype=torch.float64) - wanted).abs().max())

    assert off <= NEAR, off
