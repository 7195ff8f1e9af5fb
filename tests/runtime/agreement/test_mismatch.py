"""Ranks that differ are refused on every rank, in words, before a wrong number is applied, and none of them hangs."""

import contextlib
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardc
from shardc import Mesh, P

ODD = 2  # the rank that differs from the others
SECONDS = 5.0
STEPS = 4


class Net(nn.Module):
    def __init__(self, width=16, depth=4, activation="relu", rate=0.1, annotated=False, boundary=None):
        super().__init__()
        sizes = [8, *[width] * (depth - 1), 8]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation, self.dropout = activation, nn.Dropout(rate)
        self.annotated, self.boundary = annotated, boundary

    def forward(self, x, target):
        for i, layer in enumerate(self.layers):
            if i == self.boundary:
                shardc.stage_boundary()
            x = shardc.annotate(x, P()) if self.annotated else x
            x = self.dropout(getattr(torch, self.activation)(layer(x)))
        return nn.functional.mse_loss(x, target)


@dataclass
class Run:
    """What one rank does. ``skips``: pairs of a step and a call that it leaves out; ``rows``: of the batch by step."""

    mesh: Mesh
    annotations: dict
    options: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    skips: set = field(default_factory=set)
    rows: dict = field(default_factory=dict)
    modes: dict = field(default_factory=dict)
    before: dict = field(default_factory=dict)  # functions to call before a step
    patch: Any = field(default_factory=contextlib.nullcontext)


def plan(name):
    data = {"x": P("dp"), "target": P("dp")}
    tensor = {"layers.1.weight": P("tp"), "layers.2.weight": P(None, "tp")}
    if name == "dp":
        return Run(Mesh(dp=4), data)
    if name == "tp":
        return Run(Mesh(tp=4), tensor)
    if name == "zero 3":
        return Run(Mesh(dp=4), data, {"zero": shardc.Zero("dp", stage=3)})
    if name == "pipeline":
        return Run(Mesh(dp=2, pp=2), data, {"pipeline": shardc.Pipeline("pp", microbatches=2)})
    return Run(Mesh(dp=2, tp=2), {**data, **tensor})


PLANS = ("dp", "tp", "zero 3", "pipeline", "dp x tp")


def attempt(name, change):
    """Train, with a change on the odd rank: the error, the steps that were made, the seconds until the error.

    Also whether parameters are those after the last step that all ranks made.
    """
    run, rank = plan(name), dist.get_rank()
    if rank == ODD and change:
        CHANGES[change][0](run)
    torch.manual_seed(0)
    dist.barrier()
    begin, steps, before, parallel, optimizer = time.monotonic(), 0, None, None, None
    try:
        with run.patch:
            model = Net(**run.model).to(run.dtype)
            parallel = shardc.parallelize(model, run.mesh, run.annotations, runtime="distributed", **run.options)
        for step in range(1, STEPS + 1):
            begin = time.monotonic()
            run.before.get(step, lambda parallel: None)(parallel)
            parallel.train(run.modes.get(step, True))
            loss = parallel(*batch(run, step))
            optimizer = optimizer or torch.optim.AdamW(parallel.parameters(), lr=0.01)
            before = pieces(parallel)
            if (step, "backward") not in run.skips:
                loss.backward()
            if (step, "step") not in run.skips:
                optimizer.step()
            if (step, "zero_grad") not in run.skips:
                optimizer.zero_grad()
            steps, before = step, pieces(parallel)
        return "trained", "", steps, True, 0.0
    except Exception as error:
        seconds = time.monotonic() - begin
        unchanged = before is None or all(map(torch.equal, before, pieces(parallel)))
        return type(error).__name__, without_numbers(error), steps, unchanged, seconds


def batch(run, step):
    generator, rows = torch.Generator().manual_seed(step), run.rows.get(step, 8)
    return tuple(torch.randn(rows, 8, generator=generator, dtype=run.dtype) for _ in range(2))


def pieces(parallel):
    return [each._local_tensor.clone() for each in parallel.parameters()]


def without_numbers(error):
    """The text of an error without the numbers of modules, which count all that the processes have made."""
    text = re.sub(r"\(module [\d.]+, call (\d+)\)", r"(call \1)", str(error))
    return re.sub(r" \(module [\d.]+\)", "", text)


def annotation(run):
    run.annotations = {**run.annotations, "layers.0.weight": P(next(iter(run.mesh.axis_names)))}


def other_names(run):
    run.mesh = Mesh(**{f"{name}x": size for name, size in run.mesh.sizes.items()})


def wrong_argument(run):
    run.before[3] = lambda parallel: parallel(torch.ones(8, 8))


def error_in_forward(run):
    def change(parallel):
        parallel.shardc.model.activation = "no_such_activation"

    run.before[3] = change


def option(**options):
    return lambda run: run.options.update(options)


def model(**sizes):
    return lambda run: run.model.update(sizes)


def pipeline(**options):
    return option(pipeline=shardc.Pipeline(**{"axis": "pp", "microbatches": 2, **options}))


OTHER_MESH = "make a module on meshes of different ranks"
CHANGES = {  # a change, the steps that all ranks make before it, the lines of the error between its first and its last
    "annotation": (annotation, 0, ["nothing in its place", "annotation 'layers.0.weight': P('{axis}')"]),
    "annotation in the model": (model(annotated=True), 0, ["they have different programs", "# ", "test_mismatch.py:"]),
    "mesh": (other_names, 0, ["mesh {mesh}", "mesh {mesh}"]),
    "mesh of fewer ranks": (lambda run: setattr(run, "mesh", Mesh(dp=3)), 0, [OTHER_MESH]),
    "mesh of more ranks": (lambda run: setattr(run, "mesh", Mesh(dp=8)), 0, ["mesh {mesh}", "mesh Mesh(dp=8)"]),
    "layers": (model(depth=5), 0, ["parameter 'layers.3.bias': f32[8] on rank 0, f32[16] on rank 2"]),
    "width": (model(width=32), 0, ["parameter 'layers.0.bias': f32[16] on rank 0, f32[32] on rank 2"]),
    "activation": (model(activation="tanh"), 0, ["relu = relu(", "# test_mismatch.py:", "tanh = tanh("]),
    "dropout rate": (model(rate=0.2), 0, ["lt = lt(uniform, 0.9)", "lt = lt(uniform, 0.8)", "# dropout, test_mis"]),
    "dtype": (lambda run: setattr(run, "dtype", torch.float64), 0, ["'layers.0.bias': f32[16] on rank 0, f64[16]"]),
    "first shape": (lambda run: run.rows.update({1: 16}), 0, ["input 'x': f32[8, 8]", "input 'x': f32[16, 8]"]),
    "fourth shape": (lambda run: run.rows.update({4: 16}), 3, ["(call 4)", "input 'x': f32[8, 8]", "f32[16, 8]"]),
    "backward": (lambda run: run.skips.add((2, "backward")), 1, [
        "rank 0 calls backward of Net (call 2); rank 2 calls forward of Net (call 3): a backward was skipped",
    ]),
    "step": (lambda run: run.skips.add((2, "step")), 2, [
        "each calls forward of Net (call 3)", "rank 0 has written its parameters since call 2; "
        "rank 2 has not written its parameters since call 2: an optimizer's step was skipped on one rank",
    ]),
    "zero_grad": (lambda run: run.skips.add((2, "zero_grad")), 2, [
        "rank 0 has no gradients yet; rank 2 adds to gradients: zero_grad was skipped on one rank",
    ]),
    "mode": (lambda run: run.modes.update({3: False}), 2, [
        "module (model) is in train mode", "module (model) is in eval mode", "call train() or eval() on every rank",
    ]),
    "bucket": (option(bucket=1), 0, ["option bucket=26214400", "option bucket=1", "give every rank the same options"]),
    "zero": (option(zero=shardc.Zero("dp", stage=2)), 0, ["option zero=", "option zero=Zero(axis='dp', stage=2)"]),
    "version": (lambda run: setattr(run, "patch", mock.patch.object(torch, "__version__", "2.0.0")), 0, [
        f"version {torch.__version__} of torch", "version 2.0.0 of torch", "install the same versions on every rank",
    ]),
    "seed": (lambda run: run.before.update({2: lambda parallel: setattr(parallel, "seed", 5)}), 1, [
        "each calls forward of Net (call 2), and they would draw different random numbers", "seed 0, step 1", "seed 5",
    ]),
    "wrong option": (option(initial="broadcst"), 0, ["parallelize: initial='broadcst'", "did you mean broadcast?"]),
    "wrong argument": (wrong_argument, 2, ["the inputs: forward takes (x, target)", "missing a required argument"]),
    "error in forward": (error_in_forward, 2, ["module 'torch' has no attribute 'no_such_activation'"]),
    "schedule": (pipeline(schedule="gpipe"), 0, ["schedule='1f1b'", "schedule='gpipe'"]),
    "microbatches": (pipeline(microbatches=4), 0, ["microbatches=2", "microbatches=4"]),
    "cuts": (pipeline(cuts=("layers.3",)), 0, ["cuts=None", "cuts=tuple('layers.3')"]),
    "stage boundary": (model(boundary=3), 0, ["they have different programs", "stage "]),
}  # fmt: skip
OF_PIPELINES = ("schedule", "microbatches", "cuts", "stage boundary")
FAILS_ALONE = ("wrong option", "wrong argument", "error in forward", "mesh of fewer ranks")  # others are told


CASES = [(name, change) for name in PLANS for change in CHANGES if change not in OF_PIPELINES or name == "pipeline"]
CASES.remove(("pipeline", "annotation in the model"))  # which microbatches do not have whole
FIRST = [  # each change on one plan, and each plan
    (PLANS[i % len(PLANS)], change) for i, change in enumerate(CHANGES) if change not in OF_PIPELINES
]  # fmt: skip


def check(gloo, name, change):
    """Every rank raises within seconds, for the reason that the change is, and has applied nothing since."""
    _, good_steps, expected = CHANGES[change]
    outcomes = gloo.run(attempt, name, change)
    for rank, (kind, text, steps, is_unchanged, seconds) in enumerate(outcomes):
        is_told = change in FAILS_ALONE and rank != ODD
        assert kind == ("RankError" if is_told else kind) and kind in ("RankError", "ShardingError", "AttributeError")
        assert text.startswith(f"rank {ODD} failed: ") == is_told
        for part in expected:
            assert part.format(axis=plan(name).mesh.axis_names[0], mesh=plan(name).mesh) in text, text
        assert seconds < SECONDS and is_unchanged
        assert steps == good_steps + (change == "backward" and rank == ODD)
    assert change in FAILS_ALONE or len({text for _, text, *_ in outcomes}) == 1


@pytest.mark.parametrize(("name", "change"), FIRST)
def test_a_rank_that_differs_is_refused_on_every_rank(gloo, name, change):
    check(gloo, name, change)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "change"), [case for case in CASES if case not in FIRST])
def test_a_rank_that_differs_is_refused_under_every_plan(gloo, name, change):
    check(gloo, name, change)


@pytest.mark.parametrize("name", PLANS)
def test_ranks_that_are_alike_train(gloo, name):
    assert gloo.run(attempt, name, "") == [("trained", "", STEPS, True, 0.0)] * 4
