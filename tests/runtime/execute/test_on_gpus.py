"""The script of ``make cuda``, tried without a GPU: what it compares, and that it sees a plan that trains otherwise."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import on_gpus
import pytest
from on_gpus import OWN_PLANS, VirtualJob, difference, difference_of_norm
from torch import nn
from trainer import Job, Size, Trainer

VIRTUAL = VirtualJob(4, "loop", "cpu")


@pytest.mark.parametrize("name", ["shardc tp", "shardc zb-v, offloaded"])
def test_a_plan_trains_as_the_plain_model(name: str) -> None:
    assert difference(name, OWN_PLANS[name], VIRTUAL) < 1e-5


def test_a_batch_norm_trains_as_the_plain_one() -> None:
    assert difference_of_norm(VIRTUAL) < 1e-5


@dataclass
class Faster:
    """A plan that learns ten times as fast as it should."""

    def trainer(self, model: nn.Module, job: Job, size: Size) -> Trainer:
        trainer = OWN_PLANS["shardc tp"].trainer(model, job, size)
        for group in trainer.optimizer.param_groups:
            group["lr"] *= 10
        return trainer


def test_a_plan_that_trains_otherwise_is_seen() -> None:
    assert difference("faster", Faster(), VIRTUAL) > 1e-3


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_runs_under_torchrun(ranks: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(Path(on_gpus.__file__)), "--device", "cpu", "--only", "1f1b"]
    run = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=120, check=True)
    assert "shardc 1f1b: losses differ by" in run.stdout


@pytest.mark.sweep
def test_the_script_of_what_is_saved_runs() -> None:
    script = [sys.executable, str(Path(on_gpus.__file__).with_name("saved_on_gpus.py")), "--device", "cpu"]
    sizes = ["--layers", "2", "--width", "64", "--context", "32", "--batch", "2"]
    run = subprocess.run([*script, *sizes], capture_output=True, text=True, timeout=120, check=True)
    assert "gradients differ by rounding alone" in run.stdout


@pytest.mark.sweep
def test_the_script_of_attention_runs() -> None:
    script = [sys.executable, str(Path(on_gpus.__file__).with_name("attention_on_gpus.py")), "--device", "cpu"]
    options = ["--positions", "128", "--only", "float32"]
    run = subprocess.run([*script, *options], capture_output=True, text=True, timeout=120, check=True)
    assert "all are as near to float64 as plain torch is" in run.stdout
