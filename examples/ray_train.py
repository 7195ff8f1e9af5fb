"""Trains a GPT by one function in workers of Ray Train or on ranks of torchrun; both go on after a worker dies.

::

    python examples/ray_train.py --workers 2
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ray_train.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import DATA, GPT
from pipeline import leave, say
from resume import CONFIG, batch
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Zero

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Report = Callable[[int, float, Path | None], None]


def train(steps: int, every: int, folder: Path, start: Path | None, report: Report) -> None:
    """Train until ``steps``, from checkpoint ``start`` if given; all ranks report each step, loss and checkpoint."""
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = shardc.parallelize(GPT(CONFIG), mesh, DATA, zero=Zero("dp", 3), args=batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if start is not None:
        step = shardc.load(start, model, optimizer)["step"]
        say(f"goes on after step {step} with {mesh.size()} ranks")
    while step < steps:
        loss = model(*batch(step))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        say(f"step {step}  loss {loss.item():.6f}")
        is_saved = step % every == 0 or step == steps
        report(step, loss.item(), shardc.save(folder, model, optimizer, step=step).wait() if is_saved else None)


def train_in_worker(config: dict[str, Any]) -> None:
    """Train in a worker of Ray, from the last checkpoint that Ray knows."""
    import ray.train

    last = ray.train.get_checkpoint()
    train(**config, start=last and Path(last.path), report=report_to_ray)


def report_to_ray(step: int, loss: float, saved: Path | None) -> None:
    """Tell Ray where a checkpoint is; the ranks have written their shards to its storage already."""
    import ray.train

    is_told = saved is not None and os.environ["RANK"] == "0"
    checkpoint = ray.train.Checkpoint.from_directory(saved) if is_told else None
    mode = ray.train.CheckpointUploadMode.NO_UPLOAD
    ray.train.report({"step": step, "loss": loss}, checkpoint=checkpoint, checkpoint_upload_mode=mode)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, help="start so many workers of Ray; without it torchrun starts ranks")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    options.add_argument("--folder", type=Path, default=Path("build/ray_train"), help="of the checkpoints")
    args = options.parse_args()
    folder = args.folder.resolve()

    if args.workers is None:
        start = folder if (folder / "latest").exists() else None
        train(args.steps, args.every, folder, start, report=lambda step, loss, saved: None)
        leave()
        return
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    result = TorchTrainer(
        train_in_worker,
        train_loop_config={"steps": args.steps, "every": args.every, "folder": folder},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=DEVICE == "cuda"),
        run_config=RunConfig(
            name=folder.name, storage_path=str(folder.parent), failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    print(f"the last checkpoint is {result.checkpoint.path}, its loss {result.metrics['loss']:.6f}")


if __name__ == "__main__":
    main()
