"""Task 1: a user's training loop with accumulation, a schedule, clipping, evaluation, sampling and resuming."""

import os
import sys
from pathlib import Path

import torch
from gpt import GPT, Config
from hf_gpt2 import is_first_rank, leave
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import shardc
from shardc import Mesh, P

CONFIG = Config(vocab=64, context=16, layers=1, heads=2, width=32, dropout=0.1)
ANNOTATIONS = {"ids": P("dp"), "targets": P("dp")}


def make_mesh(ranks):
    if "WORLD_SIZE" not in os.environ:
        return Mesh(dp=ranks)
    return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))


class Run:
    def __init__(self, mesh):
        torch.manual_seed(0)
        self.mesh, self.model = mesh, shardc.parallelize(GPT(CONFIG), mesh, ANNOTATIONS, zero=shardc.Zero("dp", 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=20)

    def train(self, rows, accumulate=2):
        self.model.train()
        loader = DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=4)
        losses = []
        for step, (ids, targets) in enumerate(shardc.shard_loader(loader, self.mesh, P("dp")), 1):
            loss = self.model(ids, targets)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if step % accumulate == 0:
                self.model.clip_grad_norm_(1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
        return losses

    def evaluate(self, rows):
        self.model.eval()
        with torch.no_grad():
            return self.model(rows[:, :-1], rows[:, 1:]).item()

    def sample(self, length=4):
        self.model.eval()
        ids = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            for _ in range(length):
                logits = self.model(ids)
                best = int(logits[0, -1].argmax())
                ids = torch.cat([ids, torch.tensor([[best]])], 1)
        return ids[0].tolist()


def main(folder, ranks=2):
    rows = torch.randint(64, (24, 17), generator=torch.Generator().manual_seed(1))
    run = Run(make_mesh(ranks))
    losses = run.train(rows[:16])
    shardc.save(folder, run.model, run.optimizer, scheduler=run.scheduler)
    losses += run.train(rows[:16])
    resumed = Run(make_mesh(ranks))
    shardc.load(folder, resumed.model, resumed.optimizer, scheduler=resumed.scheduler)
    again = resumed.train(rows[:16])
    assert max(abs(a - b) for a, b in zip(losses[4:], again, strict=True)) < 1e-6
    return losses, run.evaluate(rows[16:]), run.sample()


if __name__ == "__main__":
    result = main(Path(sys.argv[1]))
    if is_first_rank():
        print(*result, sep="\n")
    leave()
