"""The environment that torchrun gives to each rank, for libraries that read it: Accelerate reads and keeps it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState


@contextmanager
def as_torchrun() -> Iterator[None]:
    """Within the block, this rank of a job looks as if torchrun had started it."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, values):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
