"""Pipelines compared with one device: models that are hard for pipelines, under every schedule, on 2, 3 and 4 ranks.

Each case takes two steps without zero_grad in between, in float64, and evaluates once; losses and gradients must agree
to 1e-12. The models pass dicts and None from block to block and skip over stages; they come with tied weights, masks,
frozen stages, dropout, a batch of 10 in 4 microbatches, and targets of which few count. Interleaved schedules and zb-v
have two stages on each rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import pipeline_models
import torch
from captured_once import captured_once
from gloo_pool import ByPath
from pipeline_models import COLUMNS, Model
from torch import Tensor

import shardc
from shardc import CaptureError, Mesh, Pipeline, ShardingError
from shardc.runtime.comm.launch import Workers

from . import bubbles
from .suite import Result, chosen, exit_code, print_counts, run_cases, write_json

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zb", "zb-h1", "zb-h2", "zb-v", "auto")
RANKS = (2, 3, 4)
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """A name of ``COLUMNS``, a schedule, and the number of ranks of the pipeline."""

    column: str
    schedule: str
    ranks: int

    def __repr__(self) -> str:
        return f"{self.column} {self.schedule} pp={self.ranks}"


@dataclass(frozen=True)
class Run:
    """Losses of two steps and of an evaluation, and the sums of both steps' gradients by name."""

    losses: Tensor
    gradients: dict[str, Tensor | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--processes", action="store_true", help="a dozen cases on 4 and 8 gloo processes")


def main(options: argparse.Namespace) -> int:
    """Run the suite."""
    if options.processes:
        return on_processes(options)
    cases = chosen((Case(*each) for each in product(COLUMNS, SCHEDULES, RANKS)), options)
    results = run_cases(compare, cases, options.jobs)
    print_counts("pipelines", results)
    worst = max((result.facts.get("difference", 0.0) for result in results), default=0.0)
    print(f"largest difference of losses and gradients: {worst:.1e}")
    write_json(options.json, results)
    return exit_code(results)


def on_processes(options: argparse.Namespace) -> int:
    """Run cases on gloo, with optimizer steps and two signatures; a GPT on three axes; and measured bubbles."""
    path, results = pipeline_models.__file__, []
    for count, found in ((4, pipeline_models.CASES), (8, (pipeline_models.EIGHT,))):
        with Workers(count) as workers:
            for case in found:
                ranks = workers.run(ByPath(path, "train"), case, timeout=600)
                far = max(max(*losses, *gradients.values()) for losses, gradients in ranks)
                results.append(_result(f"{case} on {count} processes", far, TOLERANCE))
            if count == 4:
                results += list(idle(workers))
            if count == 8:
                far = max(workers.run(ByPath(path, "train_gpt"), timeout=600))
                results.append(_result("GPT, float32, 20 steps, dp=2, tp=2, pp=2", far, 1e-5))
    print_counts("pipelines", results)
    write_json(options.json, results)
    return exit_code(results)


def idle(workers: Workers) -> Iterator[Result]:
    """Run schedules whose stages sleep; prints the measured and the simulated bubble of each."""
    path = bubbles.__file__
    for case in bubbles.CASES:
        found = bubbles.measure(
            lambda function, case: workers.run(ByPath(path, function.__name__), case, timeout=600), case
        )
        print(f"{case}: bubble {found.measured:.3f} s, simulated {found.simulated:.3f} s; longest lag {found.lag:.0%}")
        yield _result(f"the waiting of {case}", found.lag, bubbles.LAG, "an action starts late, by shares of a part,")


def _result(name: str, difference: float, bound: float, what: str = "losses or gradients differ") -> Result:
    is_right = difference <= bound
    problem = "" if is_right else f"{what} by {difference:.1e}"
    return Result(name, "right" if is_right else "wrong", problem, {"difference": difference})


def compare(case: Case) -> Result:
    """Compare a pipeline with one device."""
    try:
        found = run(case.column, Mesh(pp=case.ranks), Pipeline(microbatches=4, schedule=case.schedule))
    except (ShardingError, CaptureError) as error:
        return Result(repr(case), "refused", str(error).splitlines()[0])
    expected = alone(case.column)
    difference = float((found.losses - expected.losses).abs().max())
    for name, gradient in expected.gradients.items():
        mine = found.gradients[name]
        if gradient is None or mine is None:
            difference = difference if gradient is mine else float("inf")
        else:
            difference = max(difference, float((mine - gradient).abs().max()))
    return _result(repr(case), difference, TOLERANCE)


@cache
def alone(column: str) -> Run:
    """The run on one device, computed once."""
    return run(column, Mesh(one=1))


def run(column: str, mesh: Mesh, pipeline: Pipeline | None = None) -> Run:
    """Take two steps and evaluate; returns losses and gradients."""
    settings, args = COLUMNS[column]
    torch.manual_seed(0)
    model = shardc.parallelize(Model(**settings).double(), mesh, pipeline=pipeline)
    losses = []
    with captured_once():
        for _ in range(2):
            losses.append(model(*args))
            losses[-1].backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        with torch.no_grad():
            losses.append(model.eval()(*args))
    return Run(torch.stack([loss.detach() for loss in losses]), gradients)
