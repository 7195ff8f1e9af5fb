"""Trains a GPT and goes on after a rank dies: torchrun restarts all ranks, and they load the latest checkpoint.

::

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py --steps 20
    torchrun --standalone --nproc-per-node 1 examples/resume.py --steps 40    # go on with another number of ranks
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from gpt import DATA, GPT, Config
from pipeline import leave, say
from torch import Tensor

import shardc
from shardc import Mesh, Zero

CONFIG = Config(layers=1, dropout=0.1)


def main() -> None:
    arguments = parsed()
    mesh, zero = Mesh(dp=int(os.environ["WORLD_SIZE"])), Zero("dp", 3)
    torch.manual_seed(0)
    model = shardc.parallelize(GPT(CONFIG), mesh, DATA, zero=zero, args=batch(0), runtime="distributed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    step, saving = 0, None
    if (arguments.path / "latest").exists():
        step = shardc.load(arguments.path, model, optimizer, scheduler=scheduler)["step"]
        say(f"goes on after step {step} with {mesh.size} ranks")
    while step < arguments.steps:
        loss = model(*batch(step))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        say(f"step {step}  loss {loss.item():.6f}")
        if step % arguments.every == 0 or step == arguments.steps:  # a thread writes while training goes on
            saving = shardc.save(
                arguments.path, model, optimizer, scheduler=scheduler, step=step, keep=2, asynchronous=True
            )
    if saving is not None:
        saving.wait()
    leave()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, on every rank. A DataLoader would also be positioned by the step."""
    ids = torch.randint(CONFIG.vocab, (2, 8, CONFIG.context), generator=torch.Generator().manual_seed(step))
    return ids[0], ids[1]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, default=Path("build/resume"), help="the folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
