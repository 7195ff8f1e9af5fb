"""Pipelines on gloo equal one device: losses, gradients, steps, evaluation, batches and outputs of all kinds."""

from __future__ import annotations

import copy

import pytest
import torch
from gloo_pool import GlooPool
from parallel_models import whole
from pipeline_models import CASES, COLUMNS, NEAR, Case, Model, train
from torch import Tensor, nn

import shardc
from shardc import Mesh, P
from shardc.options import Pipeline
from shardc.runtime.comm.distributed import make_device_mesh

FEW = [*CASES[:2], pytest.param(CASES[2], marks=pytest.mark.sweep)]  # all: tests.conformance pipelines --processes


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_pipeline_on_processes_equals_one_device(gloo: GlooPool, case: Case) -> None:
    check_all(case, gloo.run(train, case))


def check_all(case: Case, results: list[tuple[list[float], dict[str, float]]]) -> None:
    """Everything is near, and of each parameter that is trained some rank has a gradient."""
    assert max(max(found) for found, _ in results) <= NEAR
    gradients = [entry for _, each in results for entry in each.items()]
    assert max(difference for _, difference in gradients) <= NEAR
    trained = {
        name for name, parameter in Model(**COLUMNS[case.column][0]).named_parameters() if parameter.requires_grad
    }
    assert {name for name, _ in gradients} == trained


class Heads(nn.Module):
    """A call uses one of two heads, and the embedding in the last stage too or not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, head: int, is_tied: bool = False) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).tanh()
        x = self.embed(self.heads[head](x)) if is_tied else self.heads[head](x)
        return x.square().mean()


def alternate() -> tuple[float, dict[str, float], str]:
    """Steps with one head, then the other, then the first; and the error of one whose last stage reads more."""
    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(8, 6, dtype=torch.float64)
    pipeline = Pipeline(microbatches=2, cuts=("blocks.1", "blocks.2", "blocks.3"))
    piped, alone = shardc.parallelize(model, make_device_mesh(Mesh(pp=4)), pipeline=pipeline), copy.deepcopy(model)
    runs = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (piped, alone)]
    found = []
    for head in (0, 1, 0):
        losses = [each(x, head) for each, _ in runs]
        found.append((losses[0] - losses[1]).abs().item())
        for loss, (_, optimizer) in zip(losses, runs, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(shardc.ShardingError) as error:
        piped(x, 0, True)
    others = dict(alone.named_parameters())
    near = {name: (whole(each) - others[name]).abs().max().item() for name, each in piped.named_parameters()}
    return max(found), near, str(error.value)


def test_a_parameter_that_a_call_does_not_read_stays_on_its_rank_until_one_does(gloo: GlooPool) -> None:
    losses, near, errors = zip(*gloo.run(alternate), strict=True)
    assert max(losses) <= NEAR and max(max(each.values()) for each in near) <= NEAR
    assert [sorted({name.rpartition(".")[0] for name in each}) for each in near] == [
        ["blocks.0", "embed"], ["blocks.1"], ["blocks.2"], ["blocks.3", "heads.0", "heads.1"],
    ]  # fmt: skip
    assert set(errors) == {
        "parameter 'embed.weight': this call reads it on ranks 0, 3 of 'pp'\n"
        "  by an earlier call rank 0 alone holds it\n"
        "  make a call first that reads all parameters, and say where stages begin: Pipeline(cuts=...)\n"
        "  likewise parameter 'embed.bias'"
    }


class Outputs(Heads):
    """Values of the first stage and of the last come back beside the loss."""

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        hidden = first = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden).tanh() * scale[:, None]
        logits = self.heads[0](hidden)
        rows = logits.square().mean(1)
        return {"loss": rows.mean(), "first": first, "logits": logits, "rows": rows}


def outputs(sizes: dict[str, int]) -> list[tuple[list[bool], float]]:
    """Of each way to give a batch and to ask for logits: which outputs are on meta, and how far the others are off."""
    torch.manual_seed(0)
    model, x, scale = Outputs().double(), torch.randn(8, 6).double(), torch.rand(8).double()
    mesh, found = make_device_mesh(Mesh(**sizes)), []
    expected = model(x, scale)
    for asked in ({}, {"output:logits": P()}):
        annotations = {"x": P("dp"), "scale": P("dp"), **asked}
        piped = shardc.parallelize(model, mesh, annotations, pipeline=Pipeline(microbatches=2))
        rank, within = mesh.get_local_rank("dp"), piped.shardc.conversion.device_mesh
        mine = [shardc.shard_batch(each.chunk(2)[rank], within, P("dp")) for each in (x, scale)]
        for args in ((x, scale), mine):
            result = piped(*args)
            result["loss"].backward()
            others = [(key, value) for key, value in result.items() if not value.is_meta]
            assert type(result["rows"]) is Tensor  # small, and so plain
            worst = max((whole(value) - expected[key]).abs().max().item() for key, value in others)
            found.append(([value.is_meta for value in result.values()], worst))
    return found


def test_batches_are_given_as_dtensors_and_outputs_come_back_where_they_are_made(gloo: GlooPool) -> None:
    results = gloo.run(outputs, {"pp": 2, "dp": 2})
    assert max(worst for found in results for _, worst in found) <= NEAR
    assert [found[0][0] for found in results] == [[False, False, True, True]] * 2 + [[False, True, False, False]] * 2
    assert all(is_meta == found[0][0] for found in results for is_meta, _ in found)


class Adapted(nn.Module):
    """A frozen layer before others that are trained, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head = (
            nn.Linear(6, 6).requires_grad_(False),
            nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))),
        )
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.base(x).tanh()).square().mean()
        return result


def accumulate_with_a_frozen_stage() -> None:
    alone, x = Adapted().double(), torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
    pipeline = Pipeline("pp", 2, cuts=("head",))
    parallel = shardc.parallelize(alone, make_device_mesh(Mesh(dp=2, pp=2)), {"x": P("dp")}, pipeline=pipeline)
    for _ in range(3):
        for each in (alone, parallel):
            each(x).backward()
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(whole(parameter.grad), alone.get_parameter(name).grad, rtol=NEAR, atol=NEAR)


def test_gradients_are_accumulated_where_a_stage_is_frozen(gloo: GlooPool) -> None:
    gloo.run(accumulate_with_a_frozen_stage)


def test_stages_are_offloaded_with_a_parameter_that_nothing_reads() -> None:
    alone, x = Adapted().double(), torch.randn(8, 6).double()
    cuts = tuple(f"head.{i}" for i in range(1, 6))
    pipeline = Pipeline("pp", 2, cuts=cuts, schedule="interleaved", chunks=3, offload=True)
    parallel = shardc.parallelize(alone, Mesh(dp=2, pp=2), {"x": P("dp")}, pipeline=pipeline)
    for each in (alone, parallel):
        each(x).backward()
    for one, other in zip(parallel.head.parameters(), alone.head.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=NEAR, atol=NEAR)
