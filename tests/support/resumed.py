"""The losses that a job of examples/resume.py or examples/ray_train.py prints, and those of one device."""

from __future__ import annotations

import re

import torch
from gpt import GPT
from resume import CONFIG, batch

import shardc
from shardc import Mesh


def losses(printed: str) -> list[tuple[int, float]]:
    """The printed steps, each with its loss."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+)  loss (\S+)", printed)]


def losses_of_one_device(steps: int, is_scheduled: bool = False) -> list[float]:
    """The losses of uninterrupted training. ``is_scheduled``: the learning rate falls, as in resume.py."""
    torch.manual_seed(0)
    model = shardc.parallelize(GPT(CONFIG), Mesh(one=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000) if is_scheduled else None
    found = []
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        found.append(loss.item())
    return found
