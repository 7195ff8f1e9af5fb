"""Each rank reads its own rows of a DataLoader's batches, and training equals that of whole batches in one process."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from parallel_models import DATA, MEGATRON, MLP, whole
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import shardc
from shardc import Mesh, P, Pipeline, ShardingError
from shardc.language.errors import RankError
from shardc.runtime.comm.distributed import make_device_mesh


class Noise(Dataset[dict[str, Tensor]]):
    """Samples that depend on their number alone; it notes which were read."""

    def __init__(self, count: int = 26) -> None:
        self.count, self.read = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        self.read.append(i)
        generator = torch.Generator().manual_seed(i)
        return {name: torch.randn(8, generator=generator, dtype=torch.float64) for name in ("x", "y")}


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noise(), batch_size=8, **{"shuffle": True, **options})


PLANS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "data": ({"dp": 4}, DATA, {}),
    "data and tensor": ({"dp": 2, "tp": 2}, MEGATRON, {}),
    "pipeline": ({"dp": 2, "pp": 2}, DATA, {"pipeline": Pipeline(microbatches=2, cuts=("down",))}),
}


def train(plan: str, options: dict[str, Any]) -> tuple[float, float, int, int]:
    """Two epochs: how far losses and weights are off, and how many samples this rank read and all have."""
    sizes, annotations, further = PLANS[plan]
    rank, mesh = dist.get_rank(), make_device_mesh(Mesh(**sizes))
    torch.manual_seed(0)
    alone = MLP().double()
    example = {"args": (torch.zeros(8, 8).double(),) * 2} if "pipeline" in further else {}
    parallel = shardc.parallelize(alone, mesh, annotations, **further, **example)
    torch.manual_seed(100 + rank)  # every rank would shuffle in its own way
    rows = shardc.shard_loader(loader(**options), mesh if "pp" not in sizes else mesh["dp"], P("dp"))
    torch.manual_seed(100)
    every = loader(**options)
    torch.manual_seed(100 + rank)
    assert len(rows) == len(every) and rows.batch_size == 8
    runs = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (parallel, alone)]
    worst = 0.0
    for epoch in range(2):
        seen = [list(each) for each in seeded_epochs(rows, every, 100 + epoch, rank)]
        for batches in zip(*seen, strict=True):
            losses = [model(**batch) for (model, _), batch in zip(runs, batches, strict=True)]
            worst = max(worst, (losses[0] - losses[1]).abs().item())
            for loss, (_, optimizer) in zip(losses, runs, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    last = dict(alone.named_parameters())
    weights = max((whole(each.detach()) - last[name]).abs().max().item() for name, each in parallel.named_parameters())
    return worst, weights, len(rows.dataset.read), len(every.dataset.read)


def seeded_epochs(rows: Any, every: Any, seed: int, rank: int) -> Iterator[Any]:
    """An epoch of own rows, where each rank has a seed of its own, and one of whole batches with rank 0's."""
    torch.manual_seed(seed + 10 * rank)
    yield rows
    torch.manual_seed(seed)
    yield every


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[pytest.mark.sweep] * (plan != "data and tensor")) for plan in PLANS]
)
def test_training_on_own_rows_equals_training_on_whole_batches(gloo: GlooPool, plan: str) -> None:
    results = gloo.run(train, plan, {})
    assert max(max(loss, weights) for loss, weights, _, _ in results) < 1e-12
    alone = {"data": 2}.get(plan, 0)  # ranks without rows of the last batch read one sample, for its shape
    assert sum(read for *_, read, _ in results) == 2 * (26 * 4 // PLANS[plan][0]["dp"] + alone)
    assert {total for *_, total in results} == {2 * 26}


@dataclass
class Pair:
    rows: Tensor
    name: str


def collate_pair(samples: list[dict[str, Tensor]]) -> Pair:
    return Pair(torch.stack([each["x"] for each in samples]), "pair")


def collate_tuple(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([each["x"] for each in samples]), torch.tensor(0.5)


def collate_tensor(samples: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([each["y"] for each in samples])


def containers() -> list[Any]:
    """Batches of every kind of container, with workers too; checked against those of one process."""
    mesh, numbers = make_device_mesh(Mesh(dp=2, tp=2)), torch.Generator().manual_seed(dist.get_rank())
    sampler = RandomSampler(Noise(), generator=numbers)
    placements = (Shard(0), Replicate())
    multiprocessing.current_process()._config["daemon"] = False  # else it may have no workers
    pairs = list(shard_loader({"shuffle": False, "collate_fn": collate_pair}, mesh, P("dp")))
    assert all(isinstance(each, Pair) and each.name == "pair" for each in pairs)
    assert {each.rows.placements for each in pairs} == {placements} and len(pairs[-1].rows) == 2
    seen = torch.cat([each.rows.full_tensor() for each in pairs])
    assert torch.equal(seen, torch.stack([Noise()[i]["x"] for i in range(26)]))
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    options = {"sampler": sampler, "shuffle": None, "collate_fn": collate_tensor, **workers}
    seen = torch.cat([each.full_tensor() for each in shard_loader(options, mesh, P("dp"))])
    assert sorted(seen[:, 0].tolist()) == sorted(Noise()[i]["y"][0].item() for i in range(26))
    multiprocessing.current_process()._config["daemon"] = True
    (first, half), *_ = shard_loader(
        {"shuffle": False, "collate_fn": collate_tuple}, mesh, {"0": P("dp", "tp"), "1": None}
    )
    assert first.placements == (Shard(0), Shard(1)) and type(half) is Tensor
    assert torch.equal(first.full_tensor(), torch.stack([Noise()[i]["x"] for i in range(8)]))
    dropped = list(
        shard_loader({"shuffle": False, "collate_fn": collate_tensor, "drop_last": True}, mesh, P(("dp", "tp")))
    )
    assert len(dropped) == 3 and isinstance(dropped[0], DTensor) and len(dropped[0].to_local()) == 2
    assert isinstance(next(iter(shardc.shard_loader(loader(), Mesh(dp=2), P("dp"))))["x"], Tensor)
    return [refusals(mesh)]


def shard_loader(options: dict[str, Any], mesh: Any, specs: Any) -> Any:
    return shardc.shard_loader(loader(**options), mesh, specs)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(3, 2))


class OwnOrder(RandomSampler):
    """Draws from a number of the rank's own."""

    def __iter__(self) -> Iterator[int]:
        return iter([dist.get_rank(), *range(25)])


class OwnNoise(Noise):
    """Random numbers that every rank draws for itself."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), float(dist.get_rank()))}


def refusals(mesh: Any) -> list[str]:
    cases: list[tuple[Any, Any]] = [
        ([torch.zeros(3)], P("dp")),
        (DataLoader(Stream(), batch_size=2), P("dp")),
        (DataLoader(Noise(), batch_size=None), P("dp")),
        (loader(shuffle=None, sampler=torch.utils.data.DistributedSampler(Noise())), P("dp")),
        (loader(), "dp"),
        (loader(), {"x": P("dp"), "y": P("tp")}),
        (loader(), {"x": P("dp"), "z": P("dp")}),
        (loader(), {"x": P("dp")}),
        (loader(collate_fn=collate_tuple), P("dp")),
        (loader(shuffle=None, sampler=OwnOrder(Noise())), P("dp")),
        (DataLoader(OwnNoise(), batch_size=8), P("dp")),
    ]
    found = []
    for each, specs in cases:
        with pytest.raises(ShardingError) as error:
            next(iter(shardc.shard_loader(each, mesh, specs)))
        found.append(str(error.value))
    return found


def test_batches_in_every_container_come_from_workers_too_and_mistakes_are_named(gloo: GlooPool) -> None:
    who = "shard_loader: "
    expected = [
        f"{who}of type list\n  it takes a DataLoader\n"
        "  give the DataLoader of the whole data set, with the global batch_size",
        f"{who}an IterableDataset\n  its samples have no numbers by which a rank could read its own alone\n"
        "  let it yield each rank's own rows, and write shardc.shard_batch(rows, mesh, P('dp'))",
        f"{who}batch_size=None\n  its data set makes the batches\n  say the global batch_size",
        f"{who}a DistributedSampler\n  it gives each rank other samples, where all ranks go through the same global "
        "batches\n  leave it out, and say shuffle=True",
        f"{who}specs='dp'\n  it is neither a P nor a dict of them\n  write for example P('dp')",
        f"{who}x: P('dp'), y: P('tp')\n  dim 0 is cut differently, where a rank reads its rows of every tensor\n"
        "  cut dim 0 of 'y' as of the others",
        f"{who}specs['z']\n  no tensor of a batch has this name\n  use one of x, y",
        f"{who}'y' of a batch\n  specs do not say how it is cut\n  add 'y': P('dp'), or None for one without rows",
        "'1' of a batch: shape [] of 4 samples\n  it has no row for each sample\n"
        "  let collate_fn stack rows, or say '1': None",
        f"{who}the samples of an epoch differ on rank 0 and rank 1\n"
        "  data sets have other lengths, or the sampler draws from no torch.Generator\n"
        "  give all ranks one data set, and say shuffle=True or a sampler that draws from torch's generators",
        f"{who}the first batch, read on rank 0 and rank 1\n  both have the same rows of it, and their values differ\n"
        "  give all ranks one data set; random numbers that it draws are alike with num_workers=1 or more",
    ]
    assert gloo.run(containers) == [[expected]] * 4


class Broken(Noise):
    """A sample cannot be read, on rank 1."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if dist.get_rank() == 1 and i == 18:
            raise OSError("cannot read sample 18")
        return super().__getitem__(i)


def failures() -> list[str]:
    """An error of the data set on one rank, and an epoch that one rank begins alone."""
    mesh, found = make_device_mesh(Mesh(dp=4)), list[str]()
    model = shardc.parallelize(MLP().double(), mesh, DATA)
    broken = shardc.shard_loader(DataLoader(Broken(), batch_size=8), mesh, P("dp"))
    with pytest.raises((RankError, OSError)) as error:
        for batch in broken:
            model(**batch)
    found.append(f"{type(error.value).__name__}: {error.value}")
    rows = shardc.shard_loader(loader(), mesh, P("dp"))
    with pytest.raises(ShardingError) as error:
        if dist.get_rank() == 2:
            next(iter(rows))
        else:
            model(**batch)
    found.append(str(error.value))
    assert len([model(**batch) for batch in rows]) == 4
    return found


def test_an_error_of_the_data_on_one_rank_and_an_epoch_of_one_rank_are_named_on_all(gloo: GlooPool) -> None:
    results = gloo.run(failures)
    assert results[1][0] == "OSError: cannot read sample 18"
    for rank in (0, 2, 3):
        assert results[rank][0].startswith("RankError: rank 1 failed: OSError: cannot read sample 18\n")
    assert {re.sub(r"module \d+, |(?<=loader )\d+ ", "", each[1]) for each in results} == {
        "ranks 0 and 2: they are at different places in the program\n"
        "  rank 0 calls forward of MLP (call 3); rank 2 begins an epoch of loader of shard_loader: an epoch ended "
        "early on one rank, or a loader was used on one rank alone\n"
        "  let every rank make the same calls in the same order, none of them on some ranks alone"
    }
