"""GSPMD's cases: facts from the tests of openxla's partitioners, compiled by shardc, run and scored.

Each case is compared with the values on one device, with the local shapes that it expects, and, if they have been
confirmed, with the bytes that the reference sends.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc

from ..suite import Result, exit_code, print_counts, run_cases, write_json
from . import propagation, rules
from .ops import Case, Function, function_of, spec
from .values import inputs, is_large, smaller, values

CASES = Path(__file__).with_name("cases.json")
SCORED = ("confirmed", "upstream", "analytic")
REFUSALS = (shardc.ShardingError, shardc.CaptureError, NotImplementedError, AssertionError, RuntimeError)


class Model(nn.Module):
    """A function of the case's inputs as a model."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *xs: Tensor) -> Any:
        return self.function(*xs)


def entries(kind: str) -> list[dict[str, Any]]:
    """The entries of the file under ``cases``, ``rules`` or ``propagation``."""
    found: list[dict[str, Any]] = json.loads(CASES.read_text())[kind]
    return found


def cases(only: str | None = None) -> list[Case]:
    """The cases whose names match."""
    return [Case(fields) for fields in entries("cases") if fnmatch.fnmatch(fields["name"], only or "*")]


def score(case: Case) -> Result:
    """Compile a case, compare values and shapes, and count bytes."""
    try:
        compiled = _compile(case)
        wrong = [*_shape_errors(case, compiled), *_value_errors(case, compiled)]
    except REFUSALS as error:
        return Result(case.name, "refused", _first_line(error), {"limit": _limit(case)})
    return Result(case.name, "wrong" if wrong else "right", "; ".join(wrong), _facts(case, compiled))


def _facts(case: Case, compiled: Any) -> dict[str, Any]:
    """Bytes that a rank sends, and those of the reference, or else those that jax was measured to send."""
    plan = _reordering_plan(case) if case.has_device_order else compiled.collectives
    kinds = [f"{each.kind}[{'+'.join(each.axes)}] {each.wire_bytes}" for each in plan]
    sent, limit = sum(each.wire_bytes for each in plan), _limit(case)
    return {"sent": sent, "limit": limit, "is_lean": limit is None or sent <= limit, "collectives": kinds}


def _reordering_plan(case: Case) -> tuple[shardc.Collective, ...]:
    """The plan of a case that reorders devices, by the planner alone, since a program has one mesh."""
    ends = [
        spec(tensor["spec"]).sharding(case.mesh_of(side), tuple(tensor["shape"]), side)
        for side, tensor in (("in", case.fields["inputs"][0]), ("out", case.fields["outputs"][0]))
    ]
    dtype = getattr(torch, case.fields["inputs"][0]["dtype"])
    return shardc.reshard_plan(ends[1].mesh, case.shapes("inputs")[0], dtype, *ends)


def _limit(case: Case) -> int | None:
    fields = case.fields
    return fields.get("reference_wire_bytes_per_device", fields.get("jax_wire_bytes_per_device"))


def is_scored(case: Case) -> bool:
    """Whether the reference's bytes are confirmed."""
    return case.fields["status"].startswith(SCORED)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:240]}"


def _compile(case: Case) -> Any:
    """The case's function, with every input and output placed as the case says."""
    args = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in inputs(case)]
    named = {f"input:xs.{i}": spec(tensor["spec"]) for i, tensor in enumerate(case.fields["inputs"])}
    outputs = case.fields["outputs"]
    names = ["output"] if len(outputs) == 1 else [f"{i}" for i in range(len(outputs))]
    named |= {f"output:{name}": spec(tensor["spec"]) for name, tensor in zip(names, outputs, strict=True)}
    return shardc.compile(Model(function_of(case)), case.mesh, named, args=args, train=False)


def _shape_errors(case: Case, compiled: Any) -> Iterator[str]:
    for side, names in (("inputs", "xs.{}"), ("outputs", "{}")):
        expected = case.fields["expected_local"][side]
        for i, shape in enumerate(expected):
            name = "output" if side == "outputs" and len(expected) == 1 else names.format(i)
            found = compiled.shardings[name].local_shape(case.shapes(side)[i])
            if list(found) != shape:
                yield f"local shape of {name} {list(found)}, expected {shape}"


def _value_errors(case: Case, compiled: Any) -> Iterator[str]:
    """Compare values on all ranks with one device; a case that is too large is compiled again with smaller sizes."""
    if is_large(case):
        case = smaller(case)
        compiled = _compile(case)
    args = values(case)
    whole = function_of(case)(*(arg.clone() for arg in args))
    found, _ = compiled.simulate(*args)
    pairs = zip(*((x,) if isinstance(x, Tensor) else tuple(x) for x in (found, whole)), strict=True)
    for i, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            yield f"output {i} is {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
        elif not _is_equal(ours, theirs):
            yield f"output {i} differs by {(ours.double() - theirs.double()).abs().max():.3g}"


def _is_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Whether outputs are equal: integers exactly, bfloat16 within 2**-7 of the largest, other floats within 1e-5."""
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    tolerance = 2**-7 if theirs.dtype == torch.bfloat16 else 1e-5
    scale = max(1.0, theirs.double().abs().max().item()) if theirs.numel() else 1.0
    return theirs.numel() == 0 or (ours.double() - theirs.double()).abs().max().item() <= tolerance * scale


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options to those of every suite."""


LEAN = 223  # scored cases that are right and send no more than the reference


def main(options: argparse.Namespace) -> int:
    """Run the cases and print counts and misses, then compare rules and propagation with Shardy's.

    It is also a failure if fewer cases are lean than ``LEAN``.
    """
    chosen = cases(options.only)[:: options.every]
    results = run_cases(score, chosen, options.jobs)
    print_counts("gspmd", results)
    lean = _print_bytes([result for case, result in zip(chosen, results, strict=True) if is_scored(case)])
    if options.only is None:
        for kind, check in (("rules", rules.check), ("propagation", propagation.check)):
            found = [check(fields) for fields in entries(kind)]
            print_counts(f"gspmd {kind}", found)
            results += found
    write_json(options.json, results)
    is_fatter = options.only is None and options.every == 1 and lean < LEAN
    return exit_code(results) or int(is_fatter)


def _print_bytes(results: Sequence[Result]) -> int:
    """Print the share of lean cases, and cases that send more than the reference; returns the number of lean ones."""
    lean = [result for result in results if result.outcome == "right" and result.facts["is_lean"]]
    print(f"gspmd: {len(results)} scored, {len(lean)} right and no more bytes, {len(lean) / max(1, len(results)):.1%}")
    for result in results:
        if result.outcome == "right" and not result.facts["is_lean"]:
            said = ", ".join(result.facts["collectives"])
            print(f"  more    {result.name}: {result.facts['sent']} for {result.facts['limit']} ({said})")
    return len(lean)
