"""Measures the machine from within a job: collectives over each axis, computation, and both at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.language.collective_kind import CollectiveKind
from shardc.language.machine import ANY, Machine
from shardc.language.mesh import Mesh
from shardc.language.sharding import ceil_div
from shardc.program.collective import wire_bytes

from ..comm.distributed import TorchComm, make_device_mesh
from .device import works
from .fit import Beside, Computed, Sent, fitted_device, fitted_link

ROUNDS = 7
UNNAMED = "ranks"  # the axis of an unnamed mesh; its link stands for every axis
SIZES = (2**10, 2**14, 2**18, 2**20, 2**22)  # float32 elements of the larger of operand and result
Shape = Callable[[int, int], tuple[int, ...]]
KINDS: dict[CollectiveKind, tuple[tuple[Any, ...], Shape]] = {  # arguments after the axes; shapes by elements and ranks
    "all_reduce": (("sum",), lambda numel, count: (numel,)),
    "all_gather": ((0,), lambda numel, count: (ceil_div(numel, count),)),
    "reduce_scatter": (("sum", 0), lambda numel, count: (count, ceil_div(numel, count))),
    "all_to_all": ((0, 1), lambda numel, count: (ceil_div(numel, 64 * count), 64 * count)),
}


def bench_links(mesh: Mesh, rounds: int = ROUNDS) -> Machine:
    """Measure the machine of this job; the result is the same on all ranks, and all must call it."""
    bench = Bench(TorchComm(make_device_mesh(mesh, "cuda" if torch.cuda.is_available() else "cpu")))
    for _ in range(rounds):
        bench.round()
    return bench.machine()


@dataclass(slots=True)
class Case:
    """A function that is timed ``repeat`` times in a row, and the ``seconds`` of one call by round."""

    run: Callable[[], object]
    repeat: int = 1
    seconds: list[float] = field(default_factory=list)


class Bench:
    """All measurements, taken in rounds, so that a change of the machine's speed affects all of them.

    All ranks begin at once, since those of one host share its memory and its processors. They compute without a pause,
    as in a training step.
    """

    def __init__(self, comm: TorchComm) -> None:
        self.comm = comm
        self.works = list(works(comm.device))
        self.computing = [Case(work.run, work.repeat) for work in self.works]
        self.sent = [each for axis in comm.mesh.axis_names for each in self._collectives(axis)]
        self.beside = [(axis, *self._both(axis)) for axis in comm.mesh.axis_names if comm.mesh.axis_size(axis) > 1]
        for case in self._cases:
            case.run()

    def round(self) -> None:
        """Time every case once."""
        dist.barrier()
        for case in self.computing:
            self._time(case)
        for case in self._cases[len(self.computing) :]:
            dist.barrier()
            self._time(case)

    def machine(self) -> Machine:
        """The machine fitted to the slowest rank of each round, for computation as a whole and for each collective."""
        rows: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(rows, [case.seconds for case in self._cases])
        count = len(self.computing)
        rounds = zip(*(zip(*cases[:count], strict=True) for cases in rows), strict=True)  # seconds of each rank
        latest = zip(*(max(each, key=sum) for each in rounds), strict=True)
        computed = [
            Computed(work.name, work.rate, work.flops, work.nbytes, seconds, work.dtype)
            for work, seconds in zip(self.works, latest, strict=True)
        ]
        ranks = zip(*(row[count:] for row in rows), strict=True)
        slowest = iter([tuple(map(max, zip(*each, strict=True))) for each in ranks])
        sent = [replace(each, seconds=next(slowest)) for each, _ in self.sent]
        beside = [Beside(axis, *(next(slowest) for _ in range(3))) for axis, *_ in self.beside]
        links = {}
        for axis, *_ in self.beside:
            own = [each for each in sent if each.axis == axis], [each for each in beside if each.axis == axis]
            links[ANY if axis == UNNAMED else axis] = fitted_link(*own)
        return Machine(links, fitted_device(computed, f"the measured {self.comm.device.type}"))

    @property
    def _cases(self) -> list[Case]:
        both = [case for _, *cases in self.beside for case in cases]
        return [*self.computing, *(case for _, case in self.sent), *both]

    def _collectives(self, axis: str) -> Iterator[tuple[Sent, Case]]:
        """Collectives over one axis, of all kinds and sizes, on operands that nobody else reads."""

        def send(kind: CollectiveKind, x: Tensor, args: tuple[Any, ...]) -> object:
            return self.comm.start(kind, [x.clone()], (axis,), *args, is_own=True)()

        count = self.comm.mesh.axis_size(axis)
        for kind, (args, shape) in KINDS.items() if count > 1 else ():
            for numel in SIZES:
                x = torch.ones(shape(numel, count), device=self.comm.device)
                payload = x.nbytes * (count if kind == "all_gather" else 1)
                sent = Sent(axis, kind, count, wire_bytes(kind, payload, count), ())
                yield sent, Case(partial(send, kind, x, args))

    def _both(self, axis: str) -> tuple[Case, Case, Case]:
        """Matrix products, an all_reduce that takes about as long, and both at once."""
        a, x = torch.ones(512, 512, device=self.comm.device), torch.ones(2**21, device=self.comm.device)

        def compute() -> list[Tensor]:
            return [a @ a for _ in range(4)]

        def start() -> Callable[[], Sequence[Tensor]]:
            return self.comm.start("all_reduce", [x.clone()], (axis,), "sum")

        def both() -> None:
            finish = start()
            compute()
            finish()

        return Case(compute, 3), Case(lambda: start()(), 3), Case(both, 3)

    def _time(self, case: Case) -> None:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(case.repeat):
            case.run()
        self._synchronize()
        case.seconds.append((time.perf_counter() - start) / case.repeat)

    def _synchronize(self) -> None:
        if self.comm.device.type != "cpu":
            torch.get_device_module(self.comm.device.type).synchronize()
