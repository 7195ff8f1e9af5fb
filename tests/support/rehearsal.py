"""A training step without a device: one rank of a job of fake processes, with every tensor on meta.

What makes an accelerator and its host wait for each other is an error here: torch reads no number of a tensor on meta
and copies none to the host, and ``watched`` refuses tensors that are made on the host. Streams, pinned memory and the
order of NCCL's calls only an accelerator shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def fake_job(num_ranks: int) -> Iterator[None]:
    """In the block this process is the first of ``num_ranks``, the others of which are not there."""
    devices = [*dist.Backend.backend_capability["fake"], "meta"]
    with mock.patch.dict(dist.Backend.backend_capability, fake=devices):
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


class StallError(AssertionError):
    """An op makes a tensor on the host, which a device would wait for."""


class watched(TorchDispatchMode):
    """In the block, an op whose result is not on meta is a StallError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        if func.namespace != "c10d" and devices - {"meta"}:
            raise StallError(f"{func} makes a tensor on {', '.join(sorted(devices))}")
        return result
