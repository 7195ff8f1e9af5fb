"""Jobs in which one rank fails on purpose, and reports of the other ranks; forked from a process that has torch."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Mesh, P, Pipeline, Zero
from shardc.runtime.agreement.agreement import Agreement
from shardc.runtime.comm.messages import loopback

VICTIM = 1
KINDS = ("killed", "terminated", "stopped", "raises", "exits", "out of memory")
PHASES = ("compile", "first collective", "forward", "backward", "optimizer")
PLANS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {"x": P("dp")}, {}),
    "tp": ({"tp": 2}, {"*.down.weight": P(None, "tp")}, {}),
    "zero 3": ({"dp": 2}, {"x": P("dp")}, {"zero": Zero("dp", stage=3)}),
    "pipeline": ({"pp": 2}, {}, {"pipeline": Pipeline(axis="pp", microbatches=2, cuts=("layers.1",))}),
    "dp and tp": ({"dp": 2, "tp": 2}, {"x": P("dp"), "*.down.weight": P(None, "tp")}, {}),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Two layers; ``trap`` is called while the model is captured."""

    def __init__(self, trap: Any = lambda: None) -> None:
        super().__init__()
        self.layers, self.trap = nn.ModuleList(Layer() for _ in range(2)), [trap]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.trap[0]()
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


@dataclass(frozen=True)
class Failure:
    """A failure of one rank: the plan of the job, how the rank fails, and in which phase of a step."""

    plan: str
    kind: str
    phase: str

    def __str__(self) -> str:
        return f"{self.plan}: {self.kind} at {self.phase}"


@dataclass(frozen=True)
class Report:
    """The error that a surviving rank raised, its cause, and the ``seconds`` since the failure.

    ``waits_since``: when this rank last began to exchange messages; if that is later, ``seconds`` count from it.
    """

    rank: int
    kind: str
    text: str
    cause: str
    seconds: float
    waits_since: float = 0.0


def fail(kind: str, connection: Connection) -> None:
    """Fail in one of ``KINDS``; ``sleeps`` makes the other ranks wait."""
    connection.send(time.time())
    if kind == "sleeps":
        time.sleep(60)
    if kind == "raises":
        raise ValueError("this rank has a problem")
    if kind == "out of memory":
        raise MemoryError
    if kind == "exits":
        os._exit(0)
    names = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "stopped": signal.SIGSTOP}
    os.kill(os.getpid(), names[kind])
    time.sleep(60)


def run_rank(rank: int, failure: Failure, path: str, connection: Connection, seconds: float) -> None:
    """Train for three steps; the victim fails in the second step, or while it compiles."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    sizes, annotations, options = PLANS[failure.plan]
    mesh = Mesh(**sizes)
    store = dist.FileStore(path, mesh.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.size, timeout=timedelta(seconds=seconds))
    is_victim, args = rank == VICTIM, (torch.randn(8, 8), torch.randn(8, 8))

    reached, exchange = [0.0], Agreement.exchange

    def noted(agreement: Agreement, *args: Any) -> list[bytes]:
        reached.append(time.time())
        return exchange(agreement, *args)

    Agreement.exchange = noted  # only in this process, which ends with the job

    def trap() -> None:
        if is_victim and failure.phase == "compile":
            fail(failure.kind, connection)

    try:
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)  # its groups wait 30 minutes
        module = shardc.parallelize(Model(trap), device_mesh, annotations, **options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01) if failure.plan != "pipeline" else None
        for step in range(3):
            traps = {"first collective": 1, "forward": 2, "backward": 10**9}
            if is_victim and step == 1 and failure.phase in traps:
                set_trap(module, traps[failure.phase], lambda: fail(failure.kind, connection))
            loss = module(*args)
            optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=0.01)
            if is_victim and step == 1 and failure.phase == "backward":
                set_trap(module, 1, lambda: fail(failure.kind, connection))
            loss.backward()
            if is_victim and step == 1 and failure.phase == "optimizer":
                fail(failure.kind, connection)
            optimizer.step()
            optimizer.zero_grad()
        connection.send(Report(rank, "nothing", "", "", time.time()))
    except (Exception, KeyboardInterrupt) as error:
        if not is_victim:
            kind, cause = type(error).__name__, str(error.__cause__)
            connection.send(Report(rank, kind, str(error), cause, time.time(), reached[-1]))
    os._exit(0)


def set_trap(module: Any, count: int, spring: Any) -> None:
    """Call ``spring`` at the ``count``-th collective that this rank starts or message that it takes."""
    conversion = module.shardc.conversion
    comm, channel, left = conversion.torch_comm, getattr(conversion, "channel", None), [count]

    def trapped(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                spring()
            return method(*args, **kwargs)

        return call

    comm.start, comm.start_bucket = (
        trapped(type(comm).start.__get__(comm)),
        trapped(type(comm).start_bucket.__get__(comm)),
    )
    if channel is not None:
        channel.take = trapped(type(channel).take.__get__(channel))


@functools.cache
def forking() -> Any:
    """A context that forks processes within a second, from one that has imported everything a job needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["failing_job_preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server reads this variable, but not pytest's own paths
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({"PYTHONPATH": before} if before is not None else {})
    return context


def run_job(
    failure: Failure, seconds: float = 60.0, patience: float = 60.0, interrupted: int | None = None
) -> list[Report]:
    """Run a job; returns the reports of all ranks but the victim. No process is left running.

    ``seconds``: the timeout of the job. ``interrupted``: a rank that gets a Ctrl-C half a second after the failure.
    """
    context, count = forking(), Mesh(**PLANS[failure.plan][0]).size
    with tempfile.TemporaryDirectory() as directory:
        pairs = [context.Pipe(duplex=False) for _ in range(count)]
        processes = []
        for rank, (_, theirs) in enumerate(pairs):
            args = (rank, failure, f"{directory}/store", theirs, seconds)
            processes.append(context.Process(target=run_rank, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
        try:
            end, reports, failed_at = time.monotonic() + patience, list[Report](), 0.0
            while len(reports) < count - 1 and (left := end - time.monotonic()) > 0:
                for ready in wait([ours for ours, _ in pairs if not ours.closed], left):
                    try:
                        message = ready.recv()
                    except EOFError:
                        ready.close()
                        continue
                    if isinstance(message, Report):
                        reports.append(message)
                    else:
                        failed_at = message
                        if interrupted is not None:
                            time.sleep(0.5)
                            os.kill(processes[interrupted].pid, signal.SIGINT)
                if all(ours.closed for ours, _ in pairs):
                    break
        finally:
            for process in processes:
                process.kill()
                process.join()
    found = [replace(each, seconds=each.seconds - max(failed_at, each.waits_since)) for each in reports]
    return sorted(found, key=lambda each: each.rank)
