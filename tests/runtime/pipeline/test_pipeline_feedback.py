"""Codes with feedback in a pipeline: each stage keeps what codes left out of its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from measuring import measured_by_rank, without_optimizer
from parallel_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import shardc
from shardc import Mesh, P, Pipeline, Zero, compile
from shardc.costs.memory import memory_by_rank

LAYERS, WIDTH, VOCABULARY = 4, 24, 40


class Net(nn.Module):
    """Layers between an embedding and a head of its weight, which the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(VOCABULARY, (rows, 5), generator=generator) for _ in range(2))
    return ids, labels


DATA = {"ids": P("dp"), "labels": P("dp")}
COLUMNS = {"layers.*.weight": P("tp")}
PLANS: dict[str, tuple[Mesh, dict[str, P], Pipeline, Zero | None]] = {
    "1f1b": (Mesh(dp=2, pp=2), DATA, Pipeline("pp", 4), None),
    "interleaved": (Mesh(dp=2, pp=2), DATA, Pipeline("pp", 4, schedule="interleaved"), None),
    "zb-h1 with tensor parallelism": (
        Mesh(dp=2, pp=2, tp=2),
        DATA | COLUMNS,
        Pipeline("pp", 4, schedule="zb-h1"),
        None,
    ),
    "stage 1": (Mesh(dp=2, pp=2), DATA, Pipeline("pp", 2), Zero("dp", 1)),
    "stage 2": (Mesh(dp=4, pp=2), DATA, Pipeline("pp", 2, schedule="gpipe"), Zero("dp", 2)),
    "stage 3": (Mesh(dp=2, pp=2), DATA, Pipeline("pp", 2), Zero("dp", 3)),
}


def residuals_of(parallel: Any) -> dict[str, Tensor]:
    found = parallel.shardc.feedback.residuals.by_name()
    return {name: whole(each).sum(0) for name, (each,) in found.items()}


@pytest.mark.parametrize("codec", ["1bit", "topk:0.05"])
@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_and_what_is_left_out_are_the_whole_gradient(name: str, codec: str) -> None:
    """Also where a loss without backward comes between two steps, and where one has a factor."""
    mesh, annotations, pipeline, zero = PLANS[name]
    model = net()
    parallel = shardc.parallelize(model, mesh, annotations, pipeline=pipeline, zero=zero, wire={"dp": codec})
    before: dict[str, Tensor] = {}
    for step, factor in enumerate((1, 1, 3)):
        for each in (model, parallel):
            each.zero_grad()
            (factor * each(*batch(step))).backward()
        residuals = residuals_of(parallel)
        assert {each.partition(":")[0] for each in residuals} == dict(model.named_parameters()).keys()
        for path, parameter in model.named_parameters():
            found, wanted = parallel.get_parameter(path).grad, parameter.grad
            assert found is not None and wanted is not None and not torch.allclose(found, wanted)
            for each in (each for each in residuals if each.partition(":")[0] == path):
                found = found + factor * (residuals[each] - before.get(each, 0.0))
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9, msg=path)
        parallel(*batch(7))
        before = residuals_of(parallel)
        assert all(torch.equal(residuals[each], before[each]) for each in residuals)


@pytest.mark.parametrize("is_one_loss", [True, False])
def test_steps_that_begin_before_others_end_lose_nothing(is_one_loss: bool) -> None:
    model = net()
    parallel = shardc.parallelize(model, Mesh(dp=2, pp=2), DATA, pipeline=Pipeline("pp", 4), wire={"dp": "1bit"})
    for each in (model, parallel):
        losses = [each(*batch(step)) for step in range(3)]
        for loss in [sum(losses)] if is_one_loss else losses[::-1]:
            loss.backward()
    residuals = residuals_of(parallel)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found = parallel.get_parameter(name).grad + residuals[name]
        torch.testing.assert_close(found, parameter.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_a_rank_holds_the_residuals_of_its_stages() -> None:
    pipeline = Pipeline("pp", 4, cuts=("layers.1",))
    compiled = compile(
        net(torch.float32), Mesh(dp=2, pp=2), DATA, args=batch(0), pipeline=pipeline, wire={"dp": "1bit"}
    )
    layer, table = WIDTH * WIDTH + WIDTH, VOCABULARY * WIDTH
    ranks = memory_by_rank(compiled.program)
    assert [each["residuals"] for each in ranks] == [4 * (table + layer), 4 * (table + 3 * layer)]


@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved", "chunks": 2, "offload": True}], ids=str)
def test_residuals_are_alive_as_announced(options: dict[str, Any]) -> None:
    """In tensors of whole blocks, since gradients that are decoded together share memory with the ends of blocks."""
    layers = [each for _ in range(4) for each in (nn.Linear(32, 32, bias=False), nn.Tanh())]
    model, x = Mean(*layers), torch.randn(12, 32)
    pipeline, wire = Pipeline("pp", 3, **options), {"dp": "1bit"}
    compiled = compile(model, Mesh(dp=2, pp=2), {"input": P("dp")}, args=(x,), pipeline=pipeline, wire=wire)
    ranks = [without_optimizer(each, pipeline.offload) for each in memory_by_rank(compiled.program)]
    assert ranks == measured_by_rank(compiled, x)


class Mean(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = super().forward(input).square().mean()
        return result


@pytest.mark.parametrize("stage", [None, 2])
def test_ranks_of_a_job_train_as_virtual_ranks_and_go_on_from_a_checkpoint(
    gloo: GlooPool, tmp_path: Path, stage: int | None
) -> None:
    """To the bit, on the same mesh; the residuals of both stages are in one checkpoint."""
    expected = trained(Mesh(dp=2, pp=2), stage, tmp_path / "virtual")
    for found in gloo.run(on_ranks, stage, tmp_path / "gloo", False):
        assert found and all(expected[name] == each for name, each in found.items())
    assert trained(Mesh(dp=2, pp=2), stage, tmp_path / "gloo", is_resumed=True) == expected
    for found in gloo.run(on_ranks, stage, tmp_path / "virtual", True):
        assert found and all(expected[name] == each for name, each in found.items())


def on_ranks(stage: Any, folder: Path, is_resumed: bool) -> dict[str, bytes]:
    return trained(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), stage, folder, is_resumed)


def made(mesh: Any, stage: Any, **options: Any) -> tuple[Any, Any]:
    zero = None if stage is None else Zero("dp", stage)
    parallel = shardc.parallelize(
        net(torch.float32), mesh, DATA, args=batch(0), wire={"dp": "1bit"}, zero=zero, **options
    )
    return parallel, torch.optim.SGD(parallel.parameters(), 0.1)


def trained(mesh: Any, stage: Any, folder: Path, is_resumed: bool = False) -> dict[str, bytes]:
    """The bits of the parameters after three steps, saved after the second; or of the last step alone."""
    parallel, optimizer = made(mesh, stage, pipeline=Pipeline("pp", 4))
    if is_resumed:
        shardc.load(folder, parallel, optimizer)
    for step in range(2 * is_resumed, 3):
        if step == 2 and not is_resumed:
            shardc.save(folder, parallel, optimizer).wait()
        optimizer.zero_grad()
        parallel(*batch(step)).backward()
        optimizer.step()
    return {name: whole(each).detach().numpy().tobytes() for name, each in parallel.named_parameters()}


def test_a_checkpoint_is_loaded_without_a_pipeline_with_the_same_sums(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(on_ranks, None, tmp_path, False)
    sums = []
    for mesh, options in ((Mesh(dp=2, pp=2), {"pipeline": Pipeline("pp", 4)}), (Mesh(dp=4), {})):
        parallel, optimizer = made(mesh, None, **options)
        parallel(*batch(5)).backward()  # whose residuals are replaced
        shardc.load(tmp_path, parallel, optimizer)
        sums.append(residuals_of(parallel))
    piped, alone = sums
    assert piped.keys() == alone.keys() == dict(net().named_parameters()).keys()
    for name, each in piped.items():
        assert each.any()
        torch.testing.assert_close(alone[name], each, msg=name)
