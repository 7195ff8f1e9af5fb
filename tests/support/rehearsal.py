"""Rehearses a training step without a device: one rank of a job of fake processes, with every tensor on meta.

A step in which an accelerator and its host wait for each other raises an error: torch cannot read a number of a meta
tensor or copy it to the host, and ``watched`` refuses tensors that are made on the host. It also refuses a collective
that is waited for before a call that computes with its result. Streams, pinned memory and the order of NCCL's calls
can only be tested on an accelerator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, partialmethod
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardc.api import Compiled
from shardc.language.machine import LOCAL_KINDS
from shardc.runtime.comm.distributed import TorchComm, make_device_mesh
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.lower import Place
from shardc.runtime.execute.part import PartRunner

RUN, WAIT = PartRunner.run, torch.ops._c10d_functional.wait_tensor.default


@contextmanager
def fake_job(num_ranks: int) -> Iterator[None]:
    """Within the block, this process is the first of ``num_ranks`` ranks; the others do not exist."""
    devices = [*dist.Backend.backend_capability["fake"], "meta"]
    with mock.patch.dict(dist.Backend.backend_capability, fake=devices):
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def rehearse(compiled: Compiled) -> None:
    """Run forward and backward of a compiled program as the first rank. Raises a StallError if a device would wait."""
    program = compiled.program
    values: dict[str, list[Tensor | None]] = {"inputs": [], "tangents": []}
    for put, node in zip(program.inputs, program.placeholders, strict=True):
        value = torch.empty(program.local_type(node).shape, dtype=program.local_type(node).dtype, device="meta")
        values["inputs"].append(value if put.kind != "tangent" else None)
        values["tangents"].append(value if put.kind == "tangent" else None)
    with fake_job(compiled.mesh.size):
        runner = Executor(program, TorchComm(make_device_mesh(compiled.mesh, "meta")))
        with watched():
            _, saved = runner.forward([values["inputs"]])
            runner.backward(saved, [values["tangents"]])


class StallError(AssertionError):
    """A device would wait for a tensor that the host makes, or for a collective whose result is not read yet."""


@dataclass(slots=True)
class Unread:
    """A collective that was waited for: the storages of its results, and the call that must read them."""

    kind: str
    results: set[int]
    reader: Place | None = None


class watched(TorchDispatchMode):
    """Within the block, an op that makes a device wait without need raises a StallError.

    The result of each op must be on meta. A call that waits for a collective must compute with its result or send it.
    Reductions to shards are exempt: the third waits for the first, to bound their memory. State: ``started``, the kinds
    of all collectives; ``_starting``, the kind of the collective that is being started; ``_is_waiting``, whether one is
    being waited for; ``_unread``, collectives that were waited for and have not been read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self._starting, self._is_waiting = "", False
        self._unread: list[Unread] = []

    def __enter__(self) -> watched:
        self._patches = ExitStack()
        for name in ("start", "start_bucket"):
            start = partial(self._start, getattr(TorchComm, name))
            self._patches.enter_context(mock.patch.object(TorchComm, name, partialmethod(start)))
        self._patches.enter_context(mock.patch.object(PartRunner, "run", partialmethod(partial(self._run, RUN))))
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
        if func.namespace != WAIT.namespace and not func.is_view and not self._is_waiting:
            self._read((args, kwargs))
        return result

    def _read(self, operands: Any) -> None:
        """Record that the current call computes with these tensors or sends them."""
        now, storages = _running(), _storages(operands)
        for each in self._unread:
            if each.reader not in (None, now):
                place = each.reader and f"{each.reader.name} ({each.reader.line})"
                raise StallError(f"{each.kind} is waited for by {place}, which does not read its result")
            each.reader = now
        self._unread = [each for each in self._unread if each.results.isdisjoint(storages)]

    def _run(self, run: Any, part: PartRunner, *args: Any) -> None:
        """Run a part of a program; at its end every collective has been waited for."""
        run(part, *args)
        self._unread.clear()

    def _start(self, start: Any, comm: TorchComm, first: Any, operands: Any, *args: Any, **kwargs: Any) -> Any:
        kind = first if isinstance(first, str) else first.kind
        self.started.append(kind)
        self._read(operands)
        with mock.patch.object(self, "_starting", kind):
            finish = start(comm, first, operands, *args, **kwargs)

        def wait() -> Any:
            self._is_waiting = True  # computations of a wait itself do not count as reading another collective
            results = finish()
            self._is_waiting = False
            if kind not in ("reduce_scatter", *LOCAL_KINDS):
                self._unread.append(Unread(kind, _storages(results)))
            return results

        return wait


def _storages(nest: Any) -> set[int]:
    """The storages of the tensors among nested arguments."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)}


def _running() -> Place | None:
    """The place of the program's call that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if frame.f_back.f_code is RUN.__code__ and "module" in frame.f_back.f_locals:
            own = frame.f_back.f_locals
            place: Place | None = own["self"].place_at(own["module"], frame.f_lineno)
            return place
        frame = frame.f_back
    return None
