"""Accelerate's own loop trains a parallel module on the ranks of a job as it trains the model on one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from as_torchrun import as_torchrun
from gloo_pool import GlooPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

import shardc
from shardc import Mesh, P, ShardingError, Zero

PLAN = {"x": P("dp"), "up.weight": P("tp"), "down.weight": P(None, "tp")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 4)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        logits = self.down(self.drop(self.up(x).relu()))
        return logits if target is None else (nn.functional.cross_entropy(logits, target), logits)


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    draw = [(torch.randn(8, generator=generator), torch.randint(0, 4, (), generator=generator)) for _ in range(42)]
    return draw


def run(mesh: Any, folder: str, seed: int = 0, precision: str = "no") -> tuple[list[Any], bool]:
    """An epoch, a checkpoint, an epoch, an evaluation, and the second epoch again from the checkpoint."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    module: Any = shardc.parallelize(Net(), mesh, PLAN, zero=Zero("dp", 3))
    loaders = [DataLoader(samples(), batch_size=8, shuffle=shuffle) for shuffle in (True, False)]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, 1.0, 0.1, 9)
    torch.manual_seed(seed)  # the order of samples is the first rank's
    module, optimizer, train, test, scheduler = accelerator.prepare(module, optimizer, *loaders, scheduler)

    def epoch() -> list[Any]:
        losses, norms = [], []
        for x, target in train:
            with accelerator.accumulate(module):
                loss, _ = module(x, target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(module.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return [losses, norms, scheduler.get_last_lr()]

    def evaluate() -> list[float]:
        module.eval()
        with torch.no_grad():
            pairs = [accelerator.gather_for_metrics((module(x), target)) for x, target in test]
        module.train()
        logits, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
        return [len(logits), nn.functional.cross_entropy(logits, targets).item()]

    first = epoch()
    accelerator.save_state(folder)
    second, evaluated = epoch(), evaluate()
    accelerator.load_state(folder)
    state = accelerator.get_state_dict(module)
    assert bool(state) is accelerator.is_main_process
    return [first, second, evaluated], epoch() == second


def alone(folder: str, precision: str = "no") -> list[Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    found, is_equal = run(Mesh(dp=2, tp=2), folder, 0, precision)
    assert is_equal
    return found


def on_ranks(folder: str, precision: str = "no") -> tuple[list[Any], bool]:
    with as_torchrun():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return run(mesh, folder, dist.get_rank(), precision)


def flat(values: Any) -> list[float]:
    return [each for value in values for each in flat(value)] if isinstance(values, list) else [values]


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 2e-2)])
def test_ranks_train_save_and_load_as_one_device(
    gloo: GlooPool, tmp_path: Path, precision: str, tolerance: float
) -> None:
    expected = flat(alone(str(tmp_path / "alone"), precision))
    for found, is_equal in gloo.run(on_ranks, str(tmp_path / "ranks"), precision):
        assert flat(found) == pytest.approx(expected, abs=tolerance) and is_equal
    assert expected[-2] == 42  # samples that were gathered


def states(source: str) -> float:
    """The loss after loading what was saved elsewhere."""
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")) if dist.is_initialized() else Mesh(dp=1, tp=1)
    module: Any = shardc.parallelize(Net(), mesh, PLAN)
    module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    scheduler = accelerator.prepare(LinearLR(optimizer.optimizer, 1.0, 0.1, 9))
    accelerator.load_state(source)
    x, target = (torch.stack(each) for each in zip(*samples(), strict=True))
    for _ in range(2):
        loss, _ = module(x, target)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    return loss.item()


def states_on_ranks(source: str) -> float:
    with as_torchrun():
        return states(source)


def test_a_state_is_loaded_on_another_mesh_and_on_one_device(gloo: GlooPool, tmp_path: Path) -> None:
    source = str(tmp_path / "ranks")
    gloo.run(on_ranks, source)
    AcceleratorState._reset_state(reset_partial_state=True)
    expected = states(source)
    assert gloo.run(states_on_ranks, source) == pytest.approx([expected] * 4, abs=1e-5)


def misuse() -> list[str]:
    """Errors of an Accelerator that knows of one process, of one with a loader, and of one that is to cut the model."""
    errors = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for case in ("untold", "loader", "parallelism"):
        with as_torchrun():
            config = ParallelismConfig() if case == "parallelism" else None
            accelerator = Accelerator(cpu=case != "untold", parallelism_config=config)
            if case == "loader":
                accelerator.prepare(DataLoader(samples()))
            try:
                accelerator.prepare(shardc.parallelize(Net(), mesh, PLAN))
            except ShardingError as error:
                errors.append(str(error))
    return errors


def test_an_accelerator_that_would_split_batches_is_refused(gloo: GlooPool) -> None:
    for not_told, loader_first, parallelism in gloo.run(misuse):
        assert "it uses parallelism_config\n  the module is cut already" in parallelism
        assert not_told.endswith("it knows 1 process on cpu\n  the job has 4\n  say Accelerator(cpu=True)")
        assert "say prepare(model, optimizer, loader) in one call, or prepare the model first" in loader_first


def triggered() -> tuple[bool, bool, str]:
    """A trigger that one rank has set; a second one that nobody has; the class of another Accelerator's model."""
    with as_torchrun():
        accelerator, other = Accelerator(cpu=True), Accelerator(cpu=True)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        accelerator.prepare(shardc.parallelize(Net(), mesh, PLAN))
        if dist.get_rank() == 2:
            accelerator.set_trigger()
        return accelerator.check_trigger(), accelerator.check_trigger(), type(other.prepare(Net())).__name__


def test_a_trigger_reaches_all_ranks_and_other_accelerators_are_as_they_were(gloo: GlooPool) -> None:
    assert gloo.run(triggered) == [(True, False, "DistributedDataParallel")] * 4


SCRIPT = """
import os, torch, shardc
from accelerate import Accelerator
from shardc import Mesh, P
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) if "RANK" in os.environ else Mesh(dp=2)
model = shardc.parallelize(nn.Linear(4, 2), mesh, {"input": P("dp")})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, in loader:
    loss = accelerator.gather(model(x)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"{len(x)} rows of {accelerator.num_processes} device, loss {loss.item():.4f}")
accelerator.end_training()
"""
LAUNCHERS = {
    "accelerate launch": ["accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.slow
def test_launchers_start_the_same_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    printed = {}
    for name, module in LAUNCHERS.items():
        command, environment = [sys.executable, "-m", *module, "train.py"], os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        printed[name] = done.stdout
    assert printed["torchrun"] == printed["accelerate launch"]
    assert printed["torchrun"].count("4 rows of 1 device, loss") == 3
