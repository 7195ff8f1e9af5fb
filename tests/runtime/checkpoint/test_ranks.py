"""Checkpoints of several ranks: every block is written once, read from any other cut, and refused by all or none."""

from __future__ import annotations

import json
import os
import re
import resource
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_pool import GlooPool
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import shardc
from shardc import CheckpointError, Mesh, P, ShardingError, blocks
from shardc.language.partition import P as Partition
from shardc.runtime.comm.distributed import make_device_mesh
from shardc.runtime.comm.dtensor import local, shard
from shardc.runtime.tensor.make import to_global


@pytest.fixture(scope="module", autouse=True)
def meshes_of_some_ranks(gloo: GlooPool) -> Iterator[None]:
    """End the processes after these tests: ranks that are in more meshes than others cannot make a new group with them.

    torch names a group that its own ranks make by the number of groups that a rank has.
    """
    yield
    gloo.close()


SHAPES = {"fused": (24, 10), "fused_in": (5, 24), "uneven": (7, 3), "vector": (13,), "scalar": (), "empty": (0, 4)}
CUTS: dict[str, tuple[dict[str, int], dict[str, Partition]]] = {
    "blocks": ({"dp": 2, "tp": 2}, {"fused": P(blocks(3, "tp"), "dp"), "fused_in": P("dp", blocks(3, "tp")),
                                   "uneven": P("tp"), "vector": P("dp")}),
    "one axis": ({"tp": 4}, {"fused": P("tp"), "fused_in": P(None, blocks(3, "tp")), "uneven": P(None, "tp"),
                             "vector": P("tp")}),
    "two axes": ({"dp": 2, "tp": 2}, {"fused": P(("dp", "tp")), "fused_in": P(None, ("tp", "dp")), "uneven": P("dp")}),
    "whole": ({"dp": 4}, {}),
    "three ranks": ({"tp": 3}, {"fused": P(blocks(2, "tp")), "uneven": P("tp"), "vector": P("tp")}),
    "one rank": ({"one": 1}, {}),
}  # fmt: skip


def whole(name: str, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    return scale * torch.randn(SHAPES[name], generator=generator)


def model_on(mesh: Any, specs: dict[str, Partition], scale: float = 1.0) -> nn.Module:
    """A module whose parameters are cut; nothing is compiled."""
    model, described = nn.Module(), Mesh.of(mesh)
    for name, shape in SHAPES.items():
        sharding = specs.get(name, P()).sharding(described, shape, name).storable(shape)
        piece = shard(whole(name, scale), sharding, described_position(mesh)).clone()
        model.register_parameter(name, nn.Parameter(to_global(piece, sharding, shape, mesh)))
    return model


def described_position(mesh: Any) -> int:
    position = 0
    for index, size in zip(mesh.get_coordinate(), mesh.shape, strict=True):
        position = position * size + index
    return position


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a state that is the parameter's values times known numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = (2 * parameter).detach()
    optimizer.step()
    return optimizer


def mesh_of(name: str) -> Any:
    mesh = make_device_mesh(Mesh(**CUTS[name][0]))
    return mesh if mesh.get_coordinate() is not None else None


def save_and_load(root: str, sources: Sequence[str], targets: Sequence[str]) -> None:
    """Save on each mesh of ``sources``, and load that on each of ``targets``."""
    for name in sources:
        specs = CUTS[name][1]
        if (mesh := mesh_of(name)) is not None:
            model = model_on(mesh, specs)
            shardc.save(f"{root}/{name}", model, stepped(model), step=1, extra={"table": torch.arange(4)})
        dist.barrier()
    for name in targets:
        mesh = mesh_of(name)
        for source in sources if mesh is not None else ():
            check_load(f"{root}/{source}", mesh, CUTS[name][1])
        dist.barrier()


def check_load(path: str, mesh: Any, specs: dict[str, Partition]) -> None:
    model, expected = model_on(mesh, specs, scale=5.0), model_on(mesh, specs)
    theirs = stepped(expected)
    fresh = dist.get_rank() % 2 == 0  # the optimizer of some ranks has a state already; nothing depends on it
    optimizer = torch.optim.AdamW(model.parameters()) if fresh else stepped(model)
    loaded = shardc.load(path, model, optimizer)
    assert torch.equal(loaded["extra"]["table"], torch.arange(4))
    for (name, ours), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(local(ours), local(other)), (path, name)
        for key in ("exp_avg", "exp_avg_sq"):
            mine, wanted = optimizer.state[ours][key], theirs.state[other][key]
            assert mine.placements == wanted.placements == ours.placements
            assert torch.equal(local(mine), local(wanted)), (path, name, key)
        assert type(optimizer.state[ours]["step"]) is torch.Tensor and optimizer.state[ours]["step"] == 1
    assert optimizer.param_groups[0]["lr"] == 0.1


SOME = (["blocks", "two axes"], ["one axis", "three ranks"])


@pytest.mark.parametrize(("sources", "targets"), [SOME, pytest.param([*CUTS], [*CUTS], marks=pytest.mark.sweep)])
def test_any_cut_is_loaded_from_any_other(
    gloo: GlooPool, tmp_path: Path, sources: list[str], targets: list[str]
) -> None:
    gloo.run(save_and_load, str(tmp_path), sources, targets)
    one, *others = [shardc.load(tmp_path / name) for name in sources]
    for name in SHAPES:
        for found in (one, *others):
            assert torch.equal(found["model"][name], one["model"][name])
            state = found["optimizer"]["state"][name]
            assert torch.equal(state["exp_avg"], one["optimizer"]["state"][name]["exp_avg"])
    for name in sources:
        check_files(tmp_path / name / "step-00000001", Mesh(**CUTS[name][0]).size)


def check_files(folder: Path, num_ranks: int) -> None:
    """Every block is in one file, and the files are about as long."""
    index = json.loads((folder / "index.json").read_text())
    count = Counter((name, *each["offsets"]) for name, t in index["tensors"].items() for each in t["pieces"])
    assert set(count.values()) == {1}
    sizes = [each["bytes"] for each in index["files"].values()]
    assert len(sizes) == num_ranks
    assert sum(sizes) < 8 * sum(whole(name).nbytes for name in SHAPES) + 4000 * num_ranks


def failing_saves(root: str) -> list[str]:
    """The errors of saves in which one rank fails, in each of several ways."""
    rank, errors = dist.get_rank(), []
    mesh, specs = mesh_of("blocks"), CUTS["blocks"][1]
    model = model_on(mesh, specs)
    shardc.save(root, model, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def note(**options: Any) -> None:
        try:
            shardc.save(**({"path": root, "module": model, "step": 2} | options))
        except CheckpointError as error:
            errors.append(str(error))

    note(extra={"x": object()} if rank == 2 else None)
    note(step=2 + (rank == 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (500 if rank == 3 else limits[0], limits[1]))
    note()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    note(path=f"{root}/latest")
    handle = shardc.save(root, model, step=2, extra={"x": object()} if rank == 0 else None, asynchronous=True)
    try:
        handle.wait()
    except CheckpointError as error:
        errors.append(str(error))
    shardc.load(root, model)
    return errors


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_one(gloo: GlooPool, tmp_path: Path) -> None:
    results = gloo.run(failing_saves, str(tmp_path))
    texts = (
        "a value of type builtins.object",
        "give every rank the same path, step and keep",
        "rank-00003.safetensors: ",
        "file exists",
        "a value of type builtins.object",
    )
    for rank, errors in enumerate(results):
        assert len(errors) == len(texts)
        for error, text in zip(errors, texts, strict=True):
            assert text in error, (rank, error)
    assert "on rank 3: file too large" in results[0][2] and ": file too large" in results[3][2]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-00000001"]


def damaged_loads(root: str) -> list[str]:
    """For each file the error of a load with one bit of it flipped; afterwards the module is as it was."""
    rank, errors = dist.get_rank(), []
    mesh, specs = mesh_of("blocks"), CUTS["blocks"][1]
    shardc.save(root, model_on(mesh, specs), step=1)
    model = model_on(mesh, specs, scale=3.0)
    for name in [f"rank-0000{i}.safetensors" for i in range(4)] + ["index.json", "../latest"]:
        path = Path(root) / "step-00000001" / name
        dist.barrier()
        if rank == 0:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        dist.barrier()
        try:
            shardc.load(root, model)
        except CheckpointError as error:
            errors.append(str(error))
        for key, each in model.named_parameters():
            assert torch.equal(local(each), local(model_on(mesh, specs, 3.0).get_parameter(key)))
        dist.barrier()
        if rank == 0:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    dist.barrier()
    if rank == 2:
        model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    try:
        shardc.load(root, model)
    except CheckpointError as error:
        errors.append(str(error))
    return errors


def test_a_damaged_file_is_refused_on_every_rank_by_its_name(gloo: GlooPool, tmp_path: Path) -> None:
    names = [f"rank-0000{i}.safetensors" for i in range(4)] + ["index.json", "latest", "'more'"]
    for errors in gloo.run(damaged_loads, str(tmp_path)):
        assert len(errors) == len(names)
        for error, name in zip(errors, names, strict=True):
            assert name in error, error


def save_beside_training(root: str) -> tuple[list[str], float]:
    """Save in the background while the main thread runs collectives of the same ranks."""
    mesh, specs = mesh_of("blocks"), CUTS["blocks"][1]
    model, total = model_on(mesh, specs), torch.zeros(())
    for step in range(5):
        handle = shardc.save(root, model, step=step, keep=2, asynchronous=True)
        while True:
            number = torch.ones(())
            dist.all_reduce(number)
            total += number
            done = torch.tensor(float(handle.is_done))
            dist.all_reduce(done)
            if done == dist.get_world_size():
                break
        with torch.no_grad():
            for each in model.parameters():
                local(each).zero_()
    handle.wait()
    return sorted(os.listdir(root)), float(total) % 4


def test_a_save_in_the_background_goes_with_collectives_of_training(gloo: GlooPool, tmp_path: Path) -> None:
    for found in gloo.run(save_beside_training, str(tmp_path)):
        assert found == (["latest", "step-00000003", "step-00000004"], 0.0)


def saved_on_one_rank(root: str) -> list[str]:
    """What each rank raises where rank 0 alone saves or loads, and whether all go on together afterwards."""
    mesh, found = make_device_mesh(Mesh(dp=2, tp=2)), list[str]()
    module = shardc.parallelize(nn.Linear(4, 4), mesh, {"weight": P("tp")})
    for alone in (lambda: shardc.save(root, module), lambda: shardc.load(root, module)):
        with pytest.raises(ShardingError) as caught:
            if dist.get_rank() == 0:
                alone()
            else:
                module(torch.ones(2, 4))
        found.append(str(caught.value))
        shardc.save(root, module)
    with pytest.raises(ShardingError) as caught:
        (shardc.save if dist.get_rank() == 0 else shardc.load)(root, module)
    return [*found, str(caught.value)]


def test_a_checkpoint_that_one_rank_saves_or_loads_alone_is_refused_at_once(gloo: GlooPool, tmp_path: Path) -> None:
    results = gloo.run(saved_on_one_rank, str(tmp_path / "run"))
    assert results == [results[0]] * 4
    *alone, other = (re.sub(r"module \d+, |[(]module \d+[)] ?", "", each) for each in results[0])
    for each in alone:
        lines = each.splitlines()
        assert lines[0] == "ranks 0 and 1: they are at different places in the program"
        assert lines[1].startswith("  rank 0 saves, loads or exports Linear")
        assert lines[1].endswith(
            "rank 1 calls forward of Linear (call 1): a checkpoint is every rank's work, and not for `if rank == 0:`"
        )
    assert "rank 0 has\n    checkpoint: saves\n  where rank 1 has\n    checkpoint: loads" in other


def plain_in_a_job(root: str) -> bool:
    """A plain module that every rank has whole: each writes a part of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    shardc.save(root, model, optimizer)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardc.load(root, other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    return all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_plain_module_of_a_job_is_written_by_all_ranks_together(gloo: GlooPool, tmp_path: Path) -> None:
    assert all(gloo.run(plain_in_a_job, str(tmp_path)))
    assert len(list((tmp_path / "step-00000000").glob("*.safetensors"))) == 4


def peak_of_copies(root: str) -> list[float]:
    """Peaks of private memory while saving and loading, in parts of what a rank stores."""
    mesh = make_device_mesh(Mesh(tp=4))
    model = nn.Module()
    for i in range(8):
        spec = P("tp").sharding(Mesh.of(mesh), (4 * 2**20, 8), "x")
        piece = torch.ones(2**20, 8)
        model.register_parameter(f"p{i}", nn.Parameter(to_global(piece, spec, (4 * 2**20, 8), mesh)))
    stored = 8 * 32 * 2**20
    peaks = []
    for act in (lambda: shardc.save(root, model), lambda: shardc.load(root, model)):
        peaks.append(peak_while(act) / stored)
    return peaks


def peak_while(act: Any) -> int:
    """The growth of this process's private memory, at its peak."""
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    act()
    done.set()
    thread.join()
    return peak


def anonymous() -> int:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.sweep
def test_saving_and_loading_take_no_more_memory_than_one_piece(gloo: GlooPool, tmp_path: Path) -> None:
    for saving, loading in gloo.run(peak_of_copies, str(tmp_path)):
        print(saving, loading)
        assert saving <= 1 / 8 + 0.02 and loading <= 1 / 8 + 0.02, (saving, loading)


def saved_by_torch(root: str) -> list[str]:
    """Fused weights through ``torch.distributed.checkpoint``, and the error without ``checkpointable``."""
    errors = []
    for source, target in (("blocks", "one axis"), ("one axis", "blocks")):
        model = model_on(mesh_of(source), CUTS[source][1])
        try:
            dcp.save(model.state_dict(), checkpoint_id=f"{root}/plain")
        except CheckpointException as error:
            errors.append(str(error))
        dcp.save(shardc.checkpointable(model.state_dict()), checkpoint_id=f"{root}/{source}")
        mesh, specs = mesh_of(target), CUTS[target][1]
        other, expected = model_on(mesh, specs, scale=4.0), model_on(mesh, specs)
        dcp.load(shardc.checkpointable(other.state_dict()), checkpoint_id=f"{root}/{source}")
        for (name, ours), theirs in zip(other.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(local(ours), local(theirs)), (source, name)
    return errors


def test_torchs_own_checkpoints_take_fused_weights_block_by_block(gloo: GlooPool, tmp_path: Path) -> None:
    for errors in gloo.run(saved_by_torch, str(tmp_path)):
        assert len(errors) == 2, errors  # once torch takes them, nobody needs checkpointable
        assert all("key:fused_in has overlapping chunks" in error for error in errors), errors
    with pytest.raises(CheckpointError, match="give it module.state_dict"):
        shardc.checkpointable(nn.Linear(1, 1))
