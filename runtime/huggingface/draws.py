"""The random keys of parallel modules, stored next to the checkpoints that Accelerate and Trainer write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from ..module.module import ParallelModule

FILE = "shardc_draws.json"


def save_draws(folder: str | os.PathLike[str], models: Iterable[nn.Module], writes: bool) -> None:
    """Write the seed and the step of each parallel module, which are equal on all ranks, if ``writes``."""
    found = [[each.shardc.seed, each.shardc.step] for each in models if isinstance(each, ParallelModule)]
    if writes:
        Path(folder, FILE).write_text(json.dumps(found))


def load_draws(folder: str | os.PathLike[str], models: Iterable[nn.Module]) -> None:
    """Give each parallel module its saved seed and step; leave it as it is if none were saved."""
    path, parallel = Path(folder, FILE), [each for each in models if isinstance(each, ParallelModule)]
    for each, (seed, step) in zip(parallel, json.loads(path.read_text()) if path.exists() else (), strict=False):
        each.shardc.seed, each.shardc.step = seed, step
