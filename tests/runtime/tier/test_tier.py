"""What is offloaded is in the tier below at all times, training is the same, and what a device lacks is not needed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from gpt import DATA, GPT, Config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc import P, Precision, Zero
from shardc.runtime.tier import files
from shardc.runtime.tier.files import empty_in, folder_of, made_beside
from shardc.runtime.tier.tier import tier_in

SIZE = Config(layers=1, vocab=51, context=16, width=24, heads=4, dropout=0.1, tied=True)
LIMITED = Path(__file__).with_name("limited.py")


# Files.


def test_a_tensor_in_a_file_is_of_zeros_and_has_no_name(tmp_path: Path) -> None:
    x = empty_in(str(tmp_path), (3, 5), torch.bfloat16)
    assert torch.equal(x, torch.zeros(3, 5, dtype=torch.bfloat16))
    assert folder_of(x[1:].view(-1)) == str(tmp_path) and not list(tmp_path.iterdir())
    assert folder_of(torch.zeros(3)) is None and empty_in(str(tmp_path), (0, 5), torch.float32).shape == (0, 5)


def test_what_is_made_like_a_tensor_in_a_file_is_in_the_same_folder(tmp_path: Path) -> None:
    x = empty_in(str(tmp_path), (2, 3), torch.float32).fill_(3)
    calls = [
        (torch.zeros_like, ()), (torch.ones_like, ()), (torch.full_like, (7,)), (torch.clone, ()),
        (torch.empty_like, ()),
    ]  # fmt: skip
    for function, args in calls:
        op = getattr(torch.ops.aten, function.__name__).default
        made = made_beside(op, x, *args)
        assert made is not None and folder_of(made) == str(tmp_path)
        assert function is torch.empty_like or torch.equal(made, function(x, *args))
    assert made_beside(torch.ops.aten.zeros_like.default, torch.zeros(3)) is None
    assert made_beside(torch.ops.aten.neg.default, x) is None
    assert made_beside(torch.ops.aten.zeros_like.default, x, device="meta") is None
    halves = made_beside(torch.ops.aten.zeros_like.default, x, dtype=torch.float16)
    assert halves is not None and halves.dtype == torch.float16


@pytest.mark.parametrize("dims", [(0, 2, 1, 3), (3, 1, 0, 2), (0, 1, 2, 3)])
def test_what_is_saved_comes_back_with_its_strides(tmp_path: Path, dims: tuple[int, ...]) -> None:
    """On which kernels of backward may rely."""
    saved = torch.randn(2, 5, 4, 3).permute(dims)
    for to in ("host", str(tmp_path)):
        tier = tier_in(to, torch.device("cpu"))
        found = tier.restore(tier.save(saved)())()
        assert torch.equal(found, saved) and found.stride() == saved.stride()


def test_a_folder_that_is_missing_or_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(shardc.ShardingError, match=r"folder '/nowhere': a tensor of 12 B\n.*No such file.*\n  make"):
        empty_in("/nowhere", (3,), torch.float32)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "posix_fallocate", full)
    with pytest.raises(shardc.ShardingError, match=r"No space left on device\n  name a folder"):
        empty_in(str(tmp_path), (3,), torch.float32)
    assert not list(tmp_path.iterdir())


# Training on ranks.


def trained(zero: Zero, axes: tuple[int, ...] = (4,), resume: str = "", save: str = "", **options: Any) -> Any:
    """Losses, parameters, and where all that is stored is at the end."""
    torch.manual_seed(0)
    model, ids = GPT(SIZE), torch.randint(SIZE.vocab, (8, SIZE.context))
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("dp", "tp")[: len(axes)])
    parallel = shardc.parallelize(model, mesh, DATA, zero=zero, seed=1, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    losses = []
    if resume:
        shardc.load(resume, parallel, optimizer)
    for step in range(4):
        if step == 2 and save:
            shardc.save(save, parallel, optimizer).wait()
        if step >= 2 or not resume:
            for _ in range(2):
                loss = parallel(ids, ids)
                loss.backward()
                losses.append(loss.item())
            losses.append(parallel.clip_grad_norm_(0.5).item())
            optimizer.step()
            folders = {kind: folders_of(tensors) for kind, tensors in stored(parallel, optimizer).items()}
            optimizer.zero_grad()
    with torch.inference_mode():
        losses.append(parallel.eval()(ids, ids).item())
    return losses, {name: each.full_tensor() for name, each in parallel.named_parameters()}, folders


def stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    states = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    parameters = list(model.parameters())
    return {"parameters": parameters, "gradients": [each.grad for each in parameters], "states": states}


def folders_of(tensors: list[Any]) -> set[str | None]:
    return {folder_of(each._local_tensor if isinstance(each, DTensor) else each) for each in tensors}


def assert_equal(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name


def everywhere(folder: Path) -> dict[str, set[str]]:
    return {kind: {str(folder)} for kind in ("parameters", "gradients", "states")}


def without(zero: Zero) -> Zero:
    return Zero(zero.axis, zero.stage)


@pytest.mark.parametrize(
    ("what", "stage", "options"),
    [
        ("parameters", 3, {"precision": Precision()}),
        ("optimizer", 1, {}),
        ("optimizer", 3, {}),
    ],
    ids=["streamed in bfloat16", "stage 1", "stage 3"],
)
def test_ranks_train_from_files_as_from_memory(
    gloo: GlooPool, what: Any, stage: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    zero = Zero("dp", stage, offload=what, to=tmp_path)
    for found, wanted in zip(gloo.run(train, zero, options), gloo.run(train, without(zero), options), strict=True):
        assert_equal(found, wanted)
        assert found[2] == everywhere(tmp_path)
    assert not list(tmp_path.iterdir())


def train(zero: Zero, options: dict[str, Any]) -> Any:
    return trained(zero, **options)


def test_a_run_from_files_is_saved_and_goes_on_from_memory_and_on_another_mesh_from_files(
    gloo: GlooPool, tmp_path: Path
) -> None:
    folder, saved = tmp_path / "tier", str(tmp_path / "saved")
    folder.mkdir()
    zero = Zero("dp", 3, offload="parameters", to=folder)
    losses, parameters, _ = gloo.run(save_half, zero, saved)[0]
    (rest, values, where), *_ = gloo.run(resume_half, without(zero), saved)
    assert rest == losses[6:] and where["states"] == {None}
    for other in (zero, Zero("dp", 2, offload="optimizer", to=folder)):
        found, values, where = gloo.run(resume_half, other, saved, (2, 2))[0]
        assert found == pytest.approx(losses[6:], abs=1e-5)
        assert where == everywhere(folder)
        for name, value in parameters.items():
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_states_are_loaded_into_files_and_two_calls_of_one_backward_have_gradients_there(
    gloo: GlooPool, tmp_path: Path
) -> None:
    zero = Zero("dp", 3, offload="parameters", to=f"{tmp_path}/")
    assert set(gloo.run(called_and_loaded, zero, str(tmp_path / "saved"))) == {(str(tmp_path), str(tmp_path))}


def called_and_loaded(zero: Zero, saved: str) -> tuple[Any, Any]:
    """The one folder of gradients, and that of loaded states."""
    mesh, x = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.ones(4, 4)
    parallel = shardc.parallelize(nn.Linear(4, 4), mesh, {"input": P("dp")}, zero=zero)
    (parallel(x).sum() + parallel(2 * x).sum()).backward()
    (of_gradients,) = folders_of([each.grad for each in parallel.parameters()])
    optimizer = torch.optim.Adam(parallel.parameters())
    optimizer.step()
    shardc.save(saved, parallel, optimizer).wait()
    other = torch.optim.Adam(parallel.parameters())
    shardc.load(saved, parallel, other)
    (of_states,) = folders_of(stored(parallel, other)["states"])
    return of_gradients, of_states


@pytest.mark.parametrize("zero", [Zero("dp", 1), Zero("dp", 3, offload="optimizer")], ids=["stage 1", "offloaded"])
def test_what_is_written_through_data_is_computed_with(gloo: GlooPool, zero: Zero) -> None:
    assert gloo.run(written_through_data, zero) == [0.0] * 4


def written_through_data(zero: Zero) -> float:
    mesh, x = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.ones(4, 4)
    parallel = shardc.parallelize(nn.Linear(4, 4), mesh, {"input": P("dp")}, zero=zero)
    assert parallel(x).sum() != 0
    for parameter in parallel.parameters():
        parameter.data.mul_(0)
    return float(parallel(x).sum().detach())


def save_half(zero: Zero, saved: str) -> Any:
    return trained(zero, save=saved)


def resume_half(zero: Zero, saved: str, axes: tuple[int, ...] = (4,)) -> Any:
    return trained(zero, axes, resume=saved)


# Memory.


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is of Linux")
def test_states_of_six_times_the_memory_train_from_files_alone(tmp_path: Path) -> None:
    """The limit is of what the process has beyond torch and the program; in memory it is not enough."""
    from_files = run_limited(str(tmp_path))
    assert from_files.returncode == 0, from_files.stderr[-2000:]
    losses = [float(line) for line in from_files.stdout.split()]
    assert len(losses) == 6 and losses[:3] == pytest.approx(losses[3:], abs=1e-5)
    in_memory = run_limited("host")
    assert in_memory.returncode != 0 and "llocate memory" in in_memory.stderr


def run_limited(to: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(LIMITED), to]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)


def test_a_large_copy_is_the_processes_own_and_lives_as_long_as_its_views() -> None:
    x = torch.arange(2**21, dtype=torch.float32).view(2**10, -1)
    view = tier_in("host", torch.device("cpu")).fetch(x)().t()[1:]
    if not (child := os.fork()):
        view.fill_(0)
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(view, x.t()[1:])
