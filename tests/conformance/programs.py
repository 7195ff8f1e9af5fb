"""Random programs of many ops, sizes, meshes and annotations, compared with one device after every pass.

Hypothesis draws the programs and shrinks those that fail; the default test run checks a small share of them.
"""

from __future__ import annotations

import argparse
import traceback

import hypothesis
from hypothesis import strategies as st
from random_model import check_program

from .suite import Result, exit_code, print_counts, run_cases, write_json

PER_CASE = 50  # programs drawn from one seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite: the number of programs, and a seed."""
    parser.add_argument("--examples", type=int, default=2000, help="programs (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="which programs (default 0)")


def main(options: argparse.Namespace) -> int:
    """Run the programs; returns 1 if one is wrong. A case is 50 programs; a wrong case reports the smallest failure."""
    count = -(-options.examples // PER_CASE)
    results = run_cases(run_case, range(options.seed * count, (options.seed + 1) * count, options.every), options.jobs)
    print_counts(f"programs, {PER_CASE} a case", results)
    write_json(options.json, results)
    return exit_code(results)


def run_case(seed: int) -> Result:
    """Draw and check the programs of a seed."""
    limits = hypothesis.settings(
        max_examples=PER_CASE, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    try:
        hypothesis.seed(seed)(limits(hypothesis.given(st.data())(check_program)))()
    except BaseException:  # hypothesis raises groups of errors of any kind
        return Result(f"seed {seed}", "wrong", traceback.format_exc())
    return Result(f"seed {seed}", "right", facts={"programs": PER_CASE})
