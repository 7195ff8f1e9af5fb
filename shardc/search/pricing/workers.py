"""Forked processes that share the work of compiling plans."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class Workers(Generic[T, R]):
    """Up to ``count`` processes that call a function on the items of ``map``.

    They are forked at the first ``map`` and share what the function reads at that time; only items and results are
    sent. Only Linux has them, since forking is not safe elsewhere, and a daemonic process has none: it may not fork.
    """

    function: Callable[[T], R]
    count: int = 1
    _processes: dict[Connection, BaseProcess] = field(default_factory=dict)

    def map(self, items: Sequence[T]) -> list[tuple[T, R]]:
        """The items with their results, in any order; none if there are fewer than two items, or no processes.

        An item for which the function raises an error, or whose process dies, has no result: the caller can call the
        function itself and sees the error. If an error ends ``map``, such as a Ctrl-C, the processes end too.
        """
        if len(items) < 2 or not self._started():
            return []
        left, running, found = iter(items), dict[Connection, T](), list[tuple[T, R]]()
        try:
            for connection in [*self._processes]:
                self._give(connection, left, running)
            while running:
                ready = wait([*running])
                for connection in [each for each in running if each in ready]:
                    item = running.pop(connection)
                    try:
                        found += [(item, result) for result in connection.recv()]
                        self._give(connection, left, running)
                    except (EOFError, OSError):
                        self._remove(connection)
        except BaseException:
            self.close()
            raise
        return found

    def close(self) -> None:
        """End the processes; a later ``map`` forks new ones."""
        processes, self._processes = self._processes, {}
        for connection, process in processes.items():
            connection.close()
            process.kill()
        for process in processes.values():
            process.join()

    def _started(self) -> bool:
        """Whether there are processes, after they are started."""
        can_fork = sys.platform == "linux" and not multiprocessing.current_process().daemon
        while can_fork and self.count > max(1, len(self._processes)):
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            inherited = (*self._processes, ours)
            process = context.Process(target=_serve, args=(theirs, self.function, inherited), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process
        return bool(self._processes)

    def _give(self, connection: Connection, left: Iterator[T], running: dict[Connection, T]) -> None:
        """Send the next item, if there is one, to a process that waits for it."""
        for item in left:
            running[connection] = item
            with suppress(OSError):  # the process died; ``recv`` finds out
                connection.send(item)
            return

    def _remove(self, connection: Connection) -> None:
        """Forget a process that died, and start none in its place: there may be too little memory for so many."""
        connection.close()
        self._processes.pop(connection).join()
        self.count -= 1


def _serve(connection: Connection, function: Callable[[T], R], inherited: Sequence[Connection]) -> None:
    """Call the function on each item that arrives, until the first process closes the connection or ends."""
    for each in inherited:
        each.close()  # so that only the first process holds them, and its end is seen
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    warnings.simplefilter("ignore")  # the first process shows them
    torch.set_num_threads(1)  # those of the first process are not here, and waiting for them would never end
    gc.freeze()  # what is shared stays as it is: collecting it would copy it
    with suppress(EOFError, OSError):
        while True:
            item, results = connection.recv(), list[R]()
            with suppress(Exception):
                results.append(function(item))
            connection.send(results)
