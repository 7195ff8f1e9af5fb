"""Starts a torch.distributed job of local processes: fresh interpreters, gloo over loopback, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from shardc.language.errors import CommunicationError, RankError, error_text

from .failure import SECONDS, is_communication, note_failure
from .messages import loopback, private_loopback


def launch(
    fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float | None = None, private_network: bool = False
) -> list[Any]:
    """Run ``fn(*args)`` on every rank of a new job of ``nprocs`` local processes; return the results by rank.

    ``fn`` and ``args`` must be picklable. Raises a RuntimeError with the traceback of the rank that failed first, not
    of the ranks that waited for it, and a TimeoutError after ``timeout`` seconds. No process outlives the call, even if
    the process that called is killed.
    ``private_network``: give the job a loopback interface of its own if the system allows it.
    """
    with Workers(nprocs, private_network) as workers:
        return workers.run(fn, *args, timeout=timeout)


class Workers:
    """The processes of one job, which run one function after the other.

    After a failure all processes are stopped, since some may hang in a collective.
    """

    def __init__(self, nprocs: int, private_network: bool = False) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="shardc")
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        with private_loopback() if private_network else nullcontext():
            for rank in range(nprocs):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, nprocs, self._directory.name), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run ``fn(*args)`` on every rank; return the results by rank."""
        request = pickle.dumps((fn, args))
        for connection in self._connections:
            connection.send_bytes(request)
        try:
            return self._replies(timeout)
        except BaseException:
            self.stop()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether all processes can run another function."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Make every process leave the job and end."""
        for connection in self._connections:
            connection.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(timeout=30)
        self.stop()

    def stop(self) -> None:
        """End every process now."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._directory.cleanup()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replies(self, timeout: float | None) -> list[Any]:
        """Receive the results by rank, or raise the error of the rank that failed first.

        Ranks that waited for that rank fail too, sometimes before its end is noticed: ``later`` has their errors.
        """
        results, later, died = dict[int, Any](), dict[int, str](), dict[int, str]()
        while len(results) < len(self._connections):
            is_over = bool(later or died)
            waited_for = [c for rank, c in enumerate(self._connections) if not {rank} & {*results, *later, *died}]
            ready = wait(waited_for, 2 * SECONDS if is_over else timeout) if waited_for else []
            if not ready and is_over:
                raise RuntimeError(_failure(later, died))
            if not ready:
                what = f"not done after {timeout} s"
                problem = "one may wait for a collective that another does not make"
                missing = sorted(set(range(len(self._connections))) - set(results))
                raise TimeoutError(error_text(f"ranks {missing}", what, problem, "say a longer timeout="))
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    kind, reply = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    died[rank] = self._ending(rank)
                    continue
                if kind == "error":
                    raise RuntimeError(f"rank {rank} failed:\n{reply}")
                (results if kind == "result" else later)[rank] = reply
        return [results[rank] for rank in range(len(self._connections))]

    def _ending(self, rank: int) -> str:
        self._processes[rank].join()
        code = self._processes[rank].exitcode or 0
        name = f", {signal.Signals(-code).name}" if code < 0 else ""
        return f"rank {rank} died with exit code {code}{name}"


def _failure(later: Mapping[int, str], died: Mapping[int, str]) -> str:
    """The error of a job some of whose ranks died, or whose ranks all report the failure of another one."""
    others = [f"rank {rank} failed:\n{text}" for rank, text in later.items()]
    if not died:
        return others[0]
    waits = [f"rank {rank} was in {text.strip().splitlines()[-1].partition(': ')[2]}" for rank, text in later.items()]
    return "\n".join([*died.values(), *waits[:1]])


def _serve(connection: Connection, rank: int, nprocs: int, directory: str) -> None:
    """The main function of a worker: join the job; run functions until one fails, or the parent stops or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and stops all workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    store = FileStore(f"{directory}/store", nprocs)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nprocs)
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except EOFError:
            request = None
        if request is None:
            leave()
        fn, args = request
        try:
            reply = "result", fn(*args)
        except Exception as error:
            note_failure(error)
            is_later = isinstance(error, (CommunicationError, RankError)) or is_communication(error)
            reply = "later" if is_later else "error", traceback.format_exc()
        connection.send_bytes(pickle.dumps(reply))
        if reply[0] != "result":
            leave(1)


def _end_with_parent() -> None:
    """End this process when the parent ends, even by a signal and while a function runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def leave(exit_code: int = 0) -> NoReturn:
    """End this process without the interpreter's clean-up, in which gloo's threads sometimes crash."""
    if exit_code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
