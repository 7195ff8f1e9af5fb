"""Trains a GPT in two pipeline stages and on one device: on virtual ranks, or on real ranks under torchrun.

::

    python examples/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline.py
    shardc dump examples/pipeline.py:tied --mesh dp=2,pp=2 --pipeline pp,microbatches=4 --only stages
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from gpt import GPT, Config, Target, plan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

import shardc
from shardc import Mesh, Pipeline


def tied(mesh: Mesh | None = None) -> Target:
    """A GPT with dropout whose head is its token embedding, so that the first and the last stage share a weight."""
    torch.manual_seed(0)
    config = Config(tied=True, dropout=0.1)
    ids, targets = torch.randint(config.vocab, (2, 10, config.context))
    targets[:, 20:] = -100  # ignored: the loss is the mean over all other targets, in whichever microbatch
    return GPT(config), (ids, targets), {}, plan(mesh)


@record
def main() -> None:
    model, args, _, _ = tied()
    alone = shardc.parallelize(model, Mesh(one=1))  # with the same dropout masks; plain PyTorch has others
    pipeline = Pipeline(axis="pp", microbatches=4, schedule="1f1b", balance="flops")  # 3, 3, 3 and 1 sequences
    piped = shardc.parallelize(model, mesh(), pipeline=pipeline, args=args)
    say(piped.program.dump(only="stages"))

    runs = [(run, torch.optim.AdamW(run.parameters(), lr=1e-3)) for run in (alone, piped)]
    for step in range(5):
        losses = []
        for run, optimizer in runs:
            loss = run(*args)  # in a pipeline the whole step: forward and backward of all microbatches
            loss.backward()  # in a pipeline, puts the gradients into .grad
            run.clip_grad_norm_(1.0)  # the norm over all stages; torch's own function sees one rank's
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        say(f"step {step}  one device {losses[0]:.6f}  two stages {losses[1]:.6f}")
    leave()


def mesh() -> Mesh | DeviceMesh:
    """Two virtual ranks, or all ranks of torchrun."""
    if "WORLD_SIZE" not in os.environ:
        return Mesh(pp=2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("pp",))


def say(line: str) -> None:
    """Print on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(line)


def leave() -> None:
    """End a job without the interpreter's clean-up, during which threads of gloo sometimes crash."""
    if dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
