"""Measures the links and devices of a job, and fits latency and bandwidth to the times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardc.language.machine import ANY, WHOLE_PAYLOAD, CollectiveKind, Device, Link, Machine, num_steps
from shardc.language.mesh import Mesh
from shardc.language.sharding import ceil_div, dtype_name
from shardc.program.collective import wire_bytes

from ..comm.distributed import TorchComm, make_device_mesh

ROUNDS = 7
UNNAMED = "ranks"  # the axis of an unnamed mesh; its link stands for every axis
SIZES = (2**10, 2**14, 2**18, 2**20, 2**22)  # float32 elements of the larger of operand and result
Shape = Callable[[int, int], tuple[int, ...]]
KINDS: dict[CollectiveKind, tuple[tuple[Any, ...], Shape]] = {  # arguments after the axes; shapes by elements and ranks
    "all_reduce": (("sum",), lambda numel, count: (numel,)),
    "all_gather": ((0,), lambda numel, count: (ceil_div(numel, count),)),
    "reduce_scatter": (("sum", 0), lambda numel, count: (count, ceil_div(numel, count))),
    "all_to_all": ((0, 0), lambda numel, count: (count, ceil_div(numel, count))),
}  # along the first dim, where a rank copies nothing: predictions add the copies of other dims


def bench_links(mesh: Mesh, rounds: int = ROUNDS) -> Machine:
    """Measure the machine of this job; the result is the same on all ranks, and all must call it."""
    bench = Bench(TorchComm(make_device_mesh(mesh, "cuda" if torch.cuda.is_available() else "cpu")))
    for _ in range(rounds):
        bench.round()
    return bench.machine()


@dataclass(slots=True)
class Case:
    """A function that is timed over ``repeat`` calls in a row. ``seconds``: of one call, by round."""

    run: Callable[[], object]
    repeat: int = 1
    seconds: list[float] = field(default_factory=list)


def time_together(cases: Sequence[Case]) -> None:
    """Time cases one after another, and divide the total time among them in proportion to their processor time.

    Ranks that share processors take turns of some milliseconds. A short case may include all of a wait, or none of it.
    """
    start, busy = time.perf_counter(), []
    for case in cases:
        begun = time.thread_time()
        for _ in range(case.repeat):
            case.run()
        busy.append(time.thread_time() - begun)
    stretch = (time.perf_counter() - start) / sum(busy)
    for case, seconds in zip(cases, busy, strict=True):
        case.seconds.append(stretch * seconds / case.repeat)


class Bench:
    """All measurements, taken in rounds, so that a change of the machine's speed affects all of them.

    All ranks begin at once, since those of one host share its memory and processors. They compute without a pause, as
    in a training step.
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
        if self.comm.device.type == "cpu":
            time_together(self.computing)
        else:
            for case in self.computing:
                self._time(case)
        for case in self._cases[len(self.computing) :]:
            dist.barrier()
            self._time(case)

    def machine(self) -> Machine:
        """The machine fitted to the slowest rank of each round: for all computation together, and per collective."""
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
        return Machine(links, fitted_device(computed, self.comm.device.type))

    @property
    def _cases(self) -> list[Case]:
        both = [case for _, *cases in self.beside for case in cases]
        return [*self.computing, *(case for _, case in self.sent), *both]

    def _collectives(self, axis: str) -> Iterator[tuple[Sent, Case]]:
        """Collectives of all kinds and sizes over one axis, on operands that nobody else reads; and messages."""

        def send(kind: CollectiveKind, x: Tensor, args: tuple[Any, ...]) -> object:
            return self.comm.start(kind, [x.clone()], (axis,), *args, is_own=True)()

        count = self.comm.mesh.axis_size(axis)
        for kind, (args, shape) in KINDS.items() if count > 1 else ():
            for numel in SIZES:
                x = torch.ones(shape(numel, count), device=self.comm.device)
                payload = x.nbytes * (count if kind == "all_gather" else 1)
                sent = Sent(axis, kind, count, wire_bytes(kind, payload, count), ())
                yield sent, Case(partial(send, kind, x, args))
        for numel in SIZES if count > 1 else ():
            x = torch.ones(numel, device=self.comm.device)
            yield Sent(axis, "send", count, x.nbytes, ()), Case(lambda x=x: self.comm.rotate([[x]], (axis,))())  # type: ignore[misc]

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


PRODUCTS = ((1024, 256, 256), (1024, 256, 1024), (1024, 1024, 256), (256, 1024, 1024), (1024, 256, 4096))  # m, k, n
LARGE = ((4096, 4096, 4096), (8192, 1024, 4096))  # for accelerators, which smaller products do not fill
ROWS, WIDTH = 2048, 1024  # of elementwise ops


@dataclass(frozen=True, slots=True)
class Work:
    """A call with its operations and bytes, as in ``Computed``. ``repeat``: the number of runs in a row."""

    name: str
    rate: str
    run: Callable[[], object]
    flops: int = 0
    nbytes: int = 0
    dtype: str = "float32"
    repeat: int = 4


def works(device: torch.device) -> Iterator[Work]:
    """All work for a device."""
    is_cpu = device.type == "cpu"
    for dtype in (torch.float32, torch.float64) if is_cpu else (torch.float32, torch.bfloat16):
        for m, k, n in (PRODUCTS if dtype is torch.float32 else PRODUCTS[:2]) if is_cpu else LARGE:
            a, b = (torch.ones(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))
            name = dtype_name(dtype)
            yield Work(f"mm {m}x{k}x{n}", "flops", lambda a=a, b=b: a @ b, 2 * m * k * n, dtype=name)  # type: ignore[misc]
    query, key, value = (torch.randn(4, 4, 256, 64, device=device, requires_grad=True) for _ in range(3))

    def attention() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(out, (query, key, value), out.detach())

    flops = 7 * 2 * 4 * 4 * 256 * 256 * 64  # of 2 products forward and 5 backward
    yield Work("attention", "attention", attention, flops)
    yield from _others(device)
    yield _update(device)
    one = torch.ones((), device=device)
    yield Work("add", "call", lambda: one + one, nbytes=12, repeat=200)


def _others(device: torch.device) -> Iterator[Work]:
    """Ops that read and write memory; each has a new result, like a program's ops."""
    x, y = (torch.randn(ROWS, WIDTH, device=device) for _ in range(2))
    weight, nbytes = torch.ones(WIDTH, device=device), x.nbytes
    yield Work("add", "memory", lambda: x + y, nbytes=3 * nbytes)
    yield Work("gelu", "memory", lambda: F.gelu(x), nbytes=2 * nbytes)
    yield Work("norm", "memory", lambda: F.layer_norm(x, (WIDTH,), weight, weight), nbytes=2 * nbytes)
    yield Work("softmax", "memory", lambda: torch.log_softmax(x, -1), nbytes=2 * nbytes)
    yield Work("copy", "memory", lambda: x.t().contiguous(), nbytes=2 * nbytes)
    yield Work("sum", "memory", lambda: x.sum(0), nbytes=nbytes)


def _update(device: torch.device) -> Work:
    """AdamW's step reads parameter, gradient and two states, and writes all but the gradient."""
    parameters = [nn.Parameter(torch.ones(2**20, device=device)) for _ in range(8)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    step = torch.optim.AdamW(parameters, fused=True).step
    return Work("AdamW", "update", step, nbytes=7 * sum(each.nbytes for each in parameters))


LEAST = 1e-9  # seconds, the shortest time of anything
ITERATIONS = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A measured kind of collective over an axis. Each rank sends ``wire_bytes``. ``seconds``: by round."""

    axis: str
    kind: CollectiveKind
    num_ranks: int
    wire_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """A measured call of ``flops`` operations on ``nbytes`` bytes. ``seconds``: by round.

    ``rate``: the rate that it measures: ``flops`` of a ``dtype``, ``attention``, ``memory``, ``update``, or the
    shortest ``call``.
    """

    name: str
    rate: str
    flops: int
    nbytes: int
    seconds: tuple[float, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Beside:
    """A computation and a collective over an axis, each alone and both at once, in seconds by round."""

    axis: str
    computing: tuple[float, ...]
    sending: tuple[float, ...]
    both: tuple[float, ...]


def fitted_link(sent: Sequence[Sent], beside: Sequence[Beside]) -> Link:
    """The latency and bandwidth of an axis that fit the median times best, for all collectives and for each kind.

    Messages to one rank are fitted apart: a network may carry them faster than exchanges among all ranks.
    """
    kinds = dict.fromkeys(each.kind for each in sent)
    by_kind = tuple((kind, *_fitted([each for each in sent if each.kind == kind])) for kind in kinds)
    shares = []  # the time that overlapping saves, as a share of the shorter of computation and collective
    for each in beside:
        computing, sending, both = map(_median, (each.computing, each.sending, each.both))
        shares.append(min(1.0, max(0.0, (computing + sending - both) / min(computing, sending))))
    collectives = [each for each in sent if each.kind not in WHOLE_PAYLOAD]
    return Link(*_fitted(collectives), median(shares) if shares else 1.0, "the measured link", by_kind)


def _fitted(sent: Sequence[Sent]) -> tuple[float, float]:
    """Latency and bandwidth for which ``steps * latency + bytes / bandwidth`` has the least relative error.

    Each equation is divided by the time that the previous iteration fitted, so that a short collective counts as much
    as a long one. If it were divided by the measured time, a collective that took too long would count for less.
    """
    rows = [(num_steps(each.kind, each.num_ranks), each.wire_bytes, _median(each.seconds)) for each in sent]
    scales = [seconds for *_, seconds in rows]
    for _ in range(ITERATIONS):
        x, y = _least_squares([(a / s, b / s, t / s) for (a, b, t), s in zip(rows, scales, strict=True)])
        scales = [max(LEAST, a * x + b * y) for a, b, _ in rows]
    return x, 1 / y


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The nonnegative ``x, y`` for which ``a x + b y`` is nearest to ``t`` over all rows ``(a, b, t)``.

    Computed in Python floats, which give the same bits on every rank; the bits of ``torch.linalg.lstsq`` depend on the
    alignment of memory.
    """
    aa, ab, bb, at, bt = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = aa * bb - ab * ab
    x, y = (at * bb - bt * ab) / determinant, (aa * bt - ab * at) / determinant
    if x < 0:
        return 0.0, bt / bb
    return (x, y) if y > 0 else (at / aa, LEAST / max(row[1] for row in rows))


def fitted_device(computed: Sequence[Computed], device_type: str) -> Device:
    """A device whose rates are the total work of all calls of a kind divided by their total time."""
    dtypes = dict.fromkeys(each.dtype for each in computed if each.rate == "flops")
    flops = {dtype: _rate(each for each in computed if (each.rate, each.dtype) == ("flops", dtype)) for dtype in dtypes}
    by_rate: Mapping[str, list[Computed]] = {
        rate: [each for each in computed if each.rate == rate] for rate in ("attention", "memory", "update", "call")
    }
    return Device(
        flops,
        memory=_rate(by_rate["memory"]),
        call=min(_median(each.seconds) for each in by_rate["call"]),
        attention=_rate(by_rate["attention"]) / flops["float32"],
        update=_rate(by_rate["update"]),
        name=f"the measured {device_type}",
        packs=device_type != "cpu",
    )


def _rate(computed: Iterable[Computed]) -> float:
    """Operations per second, or bytes if there are none, by the median time of a round of all calls.

    The median of each short call alone would hide occasional delays by other load.
    """
    calls = list(computed)
    rounds = list(map(sum, zip(*(each.seconds for each in calls), strict=True)))
    return sum(each.flops or each.nbytes for each in calls) / _median(rounds)


def _median(seconds: Sequence[float]) -> float:
    return max(LEAST, median(seconds))
