"""What suites share: a result for each case, cases run by several processes, counts printed and written as JSON."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

Outcome = Literal["right", "wrong", "refused", "apart"]
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "refused", "apart")


@dataclass(frozen=True)
class Result:
    """What became of a case. ``detail``: why it is not right; ``facts``: what the suite wants to know besides."""

    name: str
    outcome: Outcome
    detail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def run_cases(run: Callable[[Any], Result], cases: Sequence[Any], jobs: int) -> list[Result]:
    """Every case's result, in order; with more than one job in forked processes of one thread each."""
    torch.set_num_threads(1)
    if jobs <= 1:
        return [run(case) for case in cases]
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=200) as pool:
        return pool.map(run, cases, chunksize=1)


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
