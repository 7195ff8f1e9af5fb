"""PyTorch's ``op_db`` on virtual ranks: every float32 variant, sharded at random, compared with one device.

A variant is right if values and gradients of all its samples equal those of eager torch on both meshes: in float32
within 1e-5 of the largest value, or, if the op magnifies rounding more than that, in float64 within 1e-10. Random ops
are compared with their own values on one device: the random bits are the same on every mesh. Variants with undefined
values, or with results or operands that are not dense, count as apart. Variants with shapes that depend on values are
guarded: they must be right too, and are listed.
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from captured_once import captured_once

import shardc
from shardc import Mesh, P
from shardc.language.errors import CaptureError
from shardc.ops.random import uniform
from shardc.program.node import op_name
from shardc.program.traffic import fallbacks_of
from shardc.runtime.simulator import interpret

from ..suite import Result, exit_code, print_counts, run_cases, write_json
from .sample import EVEN, UNDEFINED, UNEVEN, NotDense, Sample, odd_samples, samples, variants
from .shardable import Cut, allowed_cuts
from .values import Values, difference, eager, tangent

MESHES = (Mesh(x=4), Mesh(x=2, y=2))
TWO = Mesh(x=2)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DATA_DEPENDENT = {
    "what runs next depends on the value": "reading a value is an error that names the line",
}
MOVES = ("all_gather", "all_to_all", "collective_permute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--uneven", action="store_true", help="torch's own sizes, which 4 ranks do not divide")
    parser.add_argument("--odd", action="store_true", help="empty operands, dims of 1, no dims, and other dtypes")
    parser.add_argument("--samples", type=int, default=3, help="samples of a variant (default 3)")
    parser.add_argument("--trace", action="store_true", help="print where each case failed")


def main(options: argparse.Namespace) -> int:
    """Run the suite, and print counts."""
    start = time.perf_counter()
    patterns = (options.only or "*").split(",")
    names = [name for name in variants() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)][
        :: options.every
    ]
    run = partial(run_variant, uneven=options.uneven, odd=options.odd, count=options.samples, trace=options.trace)
    results = run_cases(run, names, options.jobs)
    sizes = "odd operands" if options.odd else "uneven sizes" if options.uneven else "even sizes"
    print_counts(f"op_db, {sizes}", results)
    print_sharded(results)
    print(f"{time.perf_counter() - start:.0f} seconds")
    write_json(options.json, results)
    return exit_code(results)


def print_sharded(results: Sequence[Result]) -> None:
    """Print how many of the variants with a shardable dim stay sharded, and which do not."""
    shardable = [result for result in results if result.facts.get("cuts")]
    on_fallback = [result for result in results if result.facts.get("fallbacks")]
    kept = [result for result in shardable if not result.facts["fallbacks"]]
    unmoved = [result for result in kept if not result.facts["moved"]]
    runs, in_double = (sum(result.facts.get(key, 0) for result in results) for key in ("runs", "in_double"))
    print(f"{runs} programs run and compared, {in_double} of them in float64, since the op magnifies rounding")
    print(f"shardable, found by cutting and comparing: {len(shardable)} variants")
    if shardable:
        share = 100 / len(shardable)
        print(f"stay sharded, no op on the fallback: {len(kept)}, {share * len(kept):.1f} %")
        print(f"and every such cut stays, nothing moved: {len(unmoved)}, {share * len(unmoved):.1f} %")
    ops = Counter(op for result in on_fallback for op in result.facts["fallbacks"])
    print("ops on the fallback: " + ", ".join(f"{op} {count}" for op, count in ops.most_common()))
    guarded = [f"{result.name} ({', '.join(ops)})" for result in results if (ops := result.facts.get("guarded"))]
    print("guarded, since shapes or branches depend on values: " + ", ".join(guarded))
    for result in kept:
        for moved in result.facts["moved"]:
            print(f"  moved   {result.name}: {moved}")


@dataclass
class _Found:
    """The findings of a variant while its samples run."""

    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    fallbacks: set[str] = field(default_factory=set)
    guarded: set[str] = field(default_factory=set)
    cuts: int = 0
    moved: list[str] = field(default_factory=list)
    samples: int = 0
    runs: int = 0
    in_double: int = 0
    trace: bool = False


def run_variant(name: str, *, uneven: bool = False, odd: bool = False, count: int = 3, trace: bool = False) -> Result:
    """Run each sample of a variant on every mesh, then each cut that the op allows. ``odd``: only ``odd_samples``."""
    warnings.simplefilter("ignore")
    op, found = variants()[name], _Found(trace=trace)
    try:
        chosen = odd_samples(op, count) if odd else samples(name, op, UNEVEN if uneven else EVEN, count)
    except NotDense as error:
        return Result(name, "apart", f"takes {error}")
    for number, sample in enumerate(chosen):
        if odd or found.samples < count:
            with captured_once():
                _run_sample(found, name, number, sample, uneven or odd)
    return _result(name, found)


def _result(name: str, found: _Found) -> Result:
    facts = {
        "runs": found.runs,
        "in_double": found.in_double,
        "fallbacks": sorted(found.fallbacks),
        "guarded": sorted(found.guarded),
        "cuts": found.cuts,
        "moved": sorted(set(found.moved)),
    }
    apart = "; ".join(dict.fromkeys(found.apart))
    for outcome in ("wrong", "refused"):
        texts = list(dict.fromkeys(getattr(found, outcome)))
        if texts:
            return Result(name, outcome, "; ".join(texts[:2]), facts)  # type: ignore[arg-type]
    if name in UNDEFINED:
        return Result(name, "apart", "its values are undefined; they have the right shape", facts)
    if not found.runs:
        return Result(name, "apart", apart or "has no sample that runs on one device", facts)
    return Result(name, "right", apart and f"some samples are apart: {apart}", facts)


def _run_sample(found: _Found, name: str, number: int, sample: Sample, uneven: bool) -> None:
    try:
        expected = eager(sample)
    except NotDense as error:
        found.apart.append(f"returns {error}")
        return
    except Exception as error:
        found.apart.append(f"does not run on one device: {_said(error)}")
        return
    if not expected.outputs:
        found.apart.append("returns no tensor")
        return
    for mesh in MESHES:
        rng = random.Random(f"{name} {number} {mesh}")
        chosen = annotations(sample, mesh, rng, uneven)
        what = f"sample {number}, {mesh}, {_shapes(sample)}, {chosen}"
        try:
            _check(found, name, sample, mesh, chosen, expected, what)
        except Exception as error:
            _refused(found, error, what)
            return
    found.samples += 1
    for cut in allowed_cuts(sample, most=4) if not uneven and found.samples <= 2 else ():
        found.cuts += 1
        _see_if_it_stays(found, sample, cut, number)


def _refused(found: _Found, error: Exception, what: str) -> None:
    for said, reason in DATA_DEPENDENT.items():
        if isinstance(error, CaptureError) and said in str(error):
            found.apart.append(reason)
            return
    found.refused.append(f"{_said(error)} [{what}]")
    if found.trace:
        print(what, file=sys.stderr)
        traceback.print_exception(error)


def _see_if_it_stays(found: _Found, sample: Sample, cut: Cut, number: int) -> None:
    """Annotate a cut that the op allows, and record fallbacks and collectives that move data in forward."""
    if any(dim is not None and tensor.shape[dim] % 2 for tensor, dim in zip(sample.tensors, cut, strict=True)):
        return
    chosen = {f"xs.{i}": P(*[None] * dim, "x") for i, dim in enumerate(cut) if dim is not None}
    try:
        compiled = _compile(sample, TWO, chosen, train=False)
    except Exception as error:
        found.refused.append(f"{_said(error)} [sample {number}, cut {cut}]")
        return
    found.fallbacks |= _fallbacks(compiled)
    moved = [c.kind for c in compiled.collectives if c.phase == "forward" and c.kind in MOVES]
    found.moved += [f"{moved[0]} where {_shapes(sample)} is cut at {cut}"] if moved else []


def annotations(sample: Sample, mesh: Mesh, rng: random.Random, uneven: bool) -> dict[str, P]:
    """Random shardings for most of the tensors; propagation chooses the others."""
    chosen: dict[str, P] = {}
    for i, tensor in enumerate(sample.tensors):
        entries: list[list[str]] = [[] for _ in tensor.shape]
        left = list(tensor.shape)
        for axis, size in mesh.sizes.items():
            open_dims = [dim for dim, rest in enumerate(left) if (rest > 1 if uneven else rest and rest % size == 0)]
            if open_dims and rng.random() < 0.85:
                dim = rng.choice(open_dims)
                entries[dim].append(axis)
                left[dim] = -(-left[dim] // size)
        if rng.random() < 0.85:
            chosen[f"xs.{i}"] = P(*(tuple(axes) or None for axes in entries))
    return chosen


def _compile(sample: Sample, mesh: Mesh, chosen: Mapping[str, P], train: bool = True) -> Any:
    outputs = eager_types(sample) if train else []
    differentiable = tuple(str(i) for i, requires_grad in enumerate(outputs) if requires_grad)
    is_trained = bool(differentiable) and any(tensor.requires_grad for tensor in sample.tensors)
    torch.manual_seed(0)
    return shardc.compile(
        sample.module,
        mesh,
        chosen,
        args=sample.tensors,
        train=is_trained,
        differentiable=differentiable if is_trained else (),
    )


def eager_types(sample: Sample) -> list[bool]:
    """For each output, whether it requires a gradient."""
    torch.manual_seed(0)
    return [output.requires_grad for output in sample.call(*(t * 1 if t.requires_grad else t for t in sample.tensors))]


def _check(
    found: _Found, name: str, sample: Sample, mesh: Mesh, chosen: Mapping[str, P], expected: Values, what: str
) -> None:
    compiled = _compile(sample, mesh, chosen)
    found.fallbacks |= _fallbacks(compiled)
    found.guarded |= {output.name.split()[1] for output in compiled.program.outputs if output.kind == "guard"}
    found.runs += 1
    values = _simulated(compiled, sample)
    if name in UNDEFINED:
        if [output.shape for output in values.outputs] != [output.shape for output in expected.outputs]:
            found.wrong.append(f"another shape [{what}]")
        return
    is_random = any(node.target is uniform for node in compiled.at("canonicalize").calls)
    if is_random:
        drawn = _simulated(compiled, sample, whole=True)
        assert [each.shape for each in drawn.outputs] == [each.shape for each in expected.outputs], what
        expected = drawn
    problem = difference(values, expected, TOLERANCE[torch.float32])
    if problem and not is_random:
        wide = sample.in_double()
        values = _simulated(_compile(wide, mesh, chosen), wide)
        found.in_double += 1
        wide_problem = difference(values, eager(wide), TOLERANCE[torch.float64])
        problem = wide_problem and f"{wide_problem} (float32: {problem})"
    if problem:
        found.wrong.append(f"{problem} [{what}]")


def _simulated(compiled: Any, sample: Sample, whole: bool = False) -> Values:
    """The values of a compiled sample on all virtual ranks, or if ``whole`` on one device."""
    tangents = {
        entry.name: tangent(entry.name, torch.empty(entry.type.shape, dtype=entry.type.dtype, device="meta"))
        for entry in compiled.program.inputs
        if entry.kind == "tangent"
    }
    args = tuple(tensor.detach() for tensor in sample.tensors)
    if whole:
        outputs, gradients = compiled.run(interpret, compiled.at("canonicalize"), args, {}, tangents)
    else:
        outputs, gradients = compiled.simulate(*args, grad_outputs=tangents)
    return Values(list(outputs), gradients)


def _fallbacks(compiled: Any) -> set[str]:
    return {op_name(node.target) for node in fallbacks_of(compiled.at("propagate"))}


def _shapes(sample: Sample) -> str:
    return " ".join(str(list(tensor.shape)) for tensor in sample.tensors)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' | '.join(line.strip() for line in lines[:4])[:300]}"
