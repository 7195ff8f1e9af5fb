"""What suites share: a result for each case, cases run by several processes, counts printed and written as JSON."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from collector import exempt_imports

Outcome = Literal["right", "wrong", "refused", "apart"]
C = TypeVar("C")
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "refused", "apart")


@dataclass(frozen=True)
class Result:
    """What became of a case. ``detail``: why it is not right; ``facts``: what the suite wants to know besides."""

    name: str
    outcome: Outcome
    detail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def chosen(cases: Iterable[C], options: argparse.Namespace) -> list[C]:
    """The cases whose names match ``--only``, and of these every Nth, as ``--every`` says."""
    return [case for case in cases if fnmatchcase(str(case), options.only or "*")][:: options.every]


def run_cases(run: Callable[[Any], Result], cases: Sequence[Any], jobs: int) -> list[Result]:
    """Every case's result, in order; with more than one job in forked processes of one thread each.

    A case that ends its process is refused.
    """
    torch.set_num_threads(1)
    exempt_imports()
    if jobs <= 1:
        return [run(case) for case in cases]
    results: dict[int, Result] = {}
    waiting = list(enumerate(cases))[::-1]
    workers = [_Worker(run) for _ in range(min(jobs, len(cases)))]
    for worker in workers:
        worker.give(waiting)
    while busy := [worker for worker in workers if worker.case is not None]:
        ready = wait([worker.pipe for worker in busy])
        for worker in busy:
            if worker.pipe in ready:
                number, result = worker.take()
                results[number] = result
                worker.give(waiting)
                if len(results) % 50 == 0:
                    print(f"{len(results)} of {len(cases)} cases", file=sys.stderr, flush=True)
    for worker in workers:
        worker.process.kill()
    return [results[number] for number in range(len(cases))]


class _Worker:
    """A forked process that runs one case after another; another takes its place when it dies."""

    def __init__(self, run: Callable[[Any], Result]) -> None:
        self.run = run
        self.case: tuple[int, Any] | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.run, other))
        self.process.start()
        other.close()

    def give(self, waiting: list[tuple[int, Any]]) -> None:
        self.case = waiting.pop() if waiting else None
        if self.case:
            self.pipe.send(self.case[1])

    def take(self) -> tuple[int, Result]:
        assert self.case is not None
        number, case = self.case
        try:
            return number, self.pipe.recv()
        except EOFError:
            self.process.join()
            died = Result(str(case), "refused", f"its process died of signal {-(self.process.exitcode or 0)}")
            self._start()
            return number, died


def _serve(run: Callable[[Any], Result], pipe: Connection) -> None:
    parent = os.getppid()
    while True:
        while not pipe.poll(1):
            if os.getppid() != parent:  # no one asks any more
                return
        case = pipe.recv()
        try:
            result = run(case)
        except Exception as error:  # of the suite itself
            result = Result(str(case), "refused", f"the suite failed: {type(error).__name__}: {error}")
        pipe.send(result)


def print_counts(suite: str, results: Iterable[Result]) -> None:
    """One line of counts, then a line for every case that is not right."""
    results = list(results)
    counts = Counter(result.outcome for result in results)
    print(f"{suite}: {len(results)} cases, " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    for result in results:
        if result.outcome != "right":
            print(f"  {result.outcome:7} {result.name}: {result.detail}")


def write_json(path: str | None, results: Iterable[Result]) -> None:
    """Every result, where a path is given."""
    if path:
        Path(path).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def exit_code(results: Iterable[Result]) -> int:
    """1 where a case is wrong or refused."""
    return int(any(result.outcome in ("wrong", "refused") for result in results))
