"""Shared by all suites: results of cases, processes that run cases, printed counts, and results as JSON."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from collector import exempt_imports

Outcome = Literal["right", "wrong", "refused", "late", "apart"]
C = TypeVar("C")
DAY = 86_400.0
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "refused", "late", "apart")


@dataclass(frozen=True)
class Result:
    """The outcome of a case. ``detail``: why it is not right. ``facts``: further values that the suite reports."""

    name: str
    outcome: Outcome
    detail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def chosen(cases: Iterable[C], options: argparse.Namespace) -> list[C]:
    """Every Nth of the cases whose names match ``--only``, where ``--every`` is N."""
    return [case for case in cases if fnmatchcase(str(case), options.only or "*")][:: options.every]


def run_cases(
    run: Callable[[Any], Result],
    cases: Sequence[Any],
    jobs: int,
    limit: float | None = None,
    watch: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """Run all cases; returns their results in order. Several jobs run in forked processes of one thread each.

    A case that ends its process is refused. One that takes longer than ``limit`` seconds is late; with a limit, a
    single job also runs in a forked process. After each case, ``watch`` is called with all results so far.
    """
    torch.set_num_threads(1)
    exempt_imports()
    results: dict[int, Result] = {}

    def enter(number: int, result: Result) -> None:
        results[number] = result
        watch([results[each] for each in sorted(results)])
        if len(results) % 50 == 0:
            print(f"{len(results)} of {len(cases)} cases", file=sys.stderr, flush=True)

    if jobs <= 1 and limit is None:
        for number, case in enumerate(cases):
            enter(number, run(case))
        return list(results.values())
    waiting = list(enumerate(cases))[::-1]
    workers = [_Worker(run, limit or DAY) for _ in range(min(jobs, len(cases)))]
    for worker in workers:
        worker.give(waiting)
    while busy := [worker for worker in workers if worker.case is not None]:
        wait([worker.pipe for worker in busy], timeout=min(worker.seconds_left for worker in busy))
        for worker in busy:
            if worker.pipe.poll() or worker.seconds_left <= 0:
                enter(*worker.take())
                worker.give(waiting)
    for worker in workers:
        worker.process.kill()
    return [results[number] for number in range(len(cases))]


class _Worker:
    """A forked process that runs one case after another; if it dies, a new process replaces it."""

    def __init__(self, run: Callable[[Any], Result], limit: float) -> None:
        self.run = run
        self.limit = limit
        self.begun = 0.0
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
            self.begun = time.monotonic()
            self.pipe.send(self.case[1])

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.begun + self.limit - time.monotonic())

    def take(self) -> tuple[int, Result]:
        assert self.case is not None
        number, case = self.case
        try:
            if self.pipe.poll():
                return number, self.pipe.recv()
            result = Result(str(case), "late", f"not done after {self.limit:.0f} s")
            self.process.kill()
            self.process.join()
        except EOFError:
            self.process.join()
            result = Result(str(case), "refused", f"its process died of signal {-(self.process.exitcode or 0)}")
        self._start()
        return number, result


def _serve(run: Callable[[Any], Result], pipe: Connection) -> None:
    parent = os.getppid()
    while True:
        while not pipe.poll(1):
            if os.getppid() != parent:  # the parent has ended
                return
        case = pipe.recv()
        try:
            result = run(case)
        except Exception as error:  # an error of the suite itself
            result = Result(str(case), "refused", f"the suite failed: {type(error).__name__}: {error}")
        pipe.send(result)


def print_counts(suite: str, results: Iterable[Result]) -> None:
    """Print a line of counts, then a line for every case that is not right."""
    results = list(results)
    counts = Counter(result.outcome for result in results)
    print(f"{suite}: {len(results)} cases, " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    for result in results:
        if result.outcome != "right":
            print(f"  {result.outcome:7} {result.name}: {result.detail}")


def write_json(path: str | None, results: Iterable[Result]) -> None:
    """Write all results if a path is given. A reader finds the old file or the new file, never a part."""
    if path:
        part = Path(f"{path}.part")
        part.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
        part.replace(path)


def read_json(path: str | None) -> list[Result]:
    """The results of a file that ``write_json`` wrote; an empty list if there is no such file."""
    if not path or not Path(path).exists():
        return []
    return [Result(**each) for each in json.loads(Path(path).read_text())]


def exit_code(results: Iterable[Result]) -> int:
    """1 if a case is wrong, refused or late, else 0."""
    return int(any(result.outcome in ("wrong", "refused", "late") for result in results))
