"""A training step without a device: one rank of a job of fake processes, with every tensor on meta.

What makes an accelerator and its host wait for each other is an error here: torch reads no number of a tensor on meta
and copies none to the host, and ``watched`` refuses tensors that are made on the host. It refuses a collective that is
waited for before something computes with its result, too. Streams, pinned memory and the order of NCCL's calls only an
accelerator shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardc.language.machine import LOCAL_KINDS
from shardc.runtime.comm.distributed import TorchComm
from shardc.runtime.execute import executor

WAIT = torch.ops._c10d_functional.wait_tensor.default


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
    """A device would wait: for a tensor that the host makes, or for a collective whose result nothing reads yet."""


class watched(TorchDispatchMode):
    """In the block, an op that a device would wait for without need is a StallError.

    Its result must be on meta. Between the wait for a collective and the first op that computes with its result, no
    other op may compute. Reductions to shards are left out: the third one waits for the first, to bound their memory.
    State: ``_starting``: the kind of the collective that is being started. ``_unread``: of each collective that was
    waited for and is not read yet, its kind and the storages of its results.
    """

    def __init__(self) -> None:
        super().__init__()
        self._starting = ""
        self._unread: list[tuple[str, set[int]]] = []

    def __enter__(self) -> watched:
        self._patches = ExitStack()
        for name in ("start", "start_bucket"):
            start = partial(self._start, getattr(TorchComm, name))
            self._patches.enter_context(mock.patch.object(TorchComm, name, partialmethod(start)))
        self._patches.enter_context(mock.patch.object(executor, "run", partial(self._run, executor.run)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        if func.namespace != "c10d" and devices - {"meta"}:
            raise StallError(f"{func} makes a tensor on {', '.join(sorted(devices))}")
        if func is WAIT and self._starting:
            raise StallError(f"{self._starting} is waited for where it is started")
        if func.namespace != WAIT.namespace and not func.is_view:
            self._read(func, _storages((args, kwargs)))
        return result

    def _read(self, func: Any, storages: set[int]) -> None:
        self._unread = [(kind, results) for kind, results in self._unread if results.isdisjoint(storages)]
        if self._unread:
            raise StallError(f"{self._unread[0][0]} is waited for before {func}, which does not read its result")

    def _run(self, run: Any, *args: Any) -> None:
        """Run a part of a program, at whose end every collective is waited for."""
        run(*args)
        self._unread.clear()

    def _start(self, start: Any, comm: TorchComm, first: Any, *args: Any, **kwargs: Any) -> Any:
        kind = first if isinstance(first, str) else first.kind
        self._starting = kind
        try:
            finish = start(comm, first, *args, **kwargs)
        finally:
            self._starting = ""

        def wait() -> Any:
            results = finish()
            if kind not in ("reduce_scatter", *LOCAL_KINDS):
                self._unread.append((kind, _storages(results)))
            return results

        return wait


def _storages(nest: Any) -> set[int]:
    """The storages of the tensors among nested arguments."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)}
