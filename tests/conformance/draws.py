"""The same numbers at every scale: initial parameters, dropout masks and 20 steps of Adam, on every small mesh.

A GPT with dropout, in float64, is initialised and trained on each mesh of at most 16 ranks and 3 axes, and compared
with the mesh of one rank: initial parameters and masks bit for bit, losses and parameters to 1e-10. No size of the
model need divide.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from captured_once import captured_once
from gpt import DATA, GPT, MEGATRON, Config
from torch import Tensor

import shardc
from shardc import CaptureError, Mesh, P, ShardingError
from shardc.ops.random import uniform
from shardc.program.node import operand
from shardc.program.program import Output, Program
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.execute.executor import Executor
from shardc.runtime.simulator import cut_inputs, join_outputs

from .suite import Result, chosen, exit_code, print_counts, run_cases, write_json

STEPS = 20
BATCH = 6
TOLERANCE = 1e-10
CONFIG = Config(vocab=23, context=6, layers=2, heads=4, width=16, dropout=0.2)
ROLES = {"dp": DATA, "tp": MEGATRON, "fsdp": {"tokens.weight": P("fsdp"), "*.up.weight": P(P.OPEN, "fsdp")}}


@dataclass(frozen=True)
class Run:
    """Results on a mesh: digests of initial parameters and of each step's masks, losses, and final parameters."""

    initial: str
    masks: tuple[str, ...]
    losses: Tensor
    parameters: dict[str, Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of Adam (default {STEPS})")


def main(options: argparse.Namespace) -> int:
    """Run the suite."""
    found = chosen(cases(), options)
    trained_alone(options.steps)  # once, before the processes start
    results = run_cases(lambda mesh: compare(mesh, options.steps), found, options.jobs)
    print_counts("draws", results)
    for what in ("initial parameters", "masks"):
        print(f"different sha256 of {what}: {len({result.facts.get(what) for result in results})}")
    worst = max((result.facts.get("difference", 0.0) for result in results), default=0.0)
    print(f"largest difference of losses and parameters over {options.steps} steps: {worst:.1e}")
    write_json(options.json, results)
    return exit_code(results)


def cases() -> list[Mesh]:
    """Every mesh with axes dp, tp and fsdp in this order, and those of one axis also with only tp or only fsdp."""
    meshes = all_meshes(16)
    named = [Mesh(**dict(zip(ROLES, mesh.shape, strict=False))) for mesh in meshes]
    alone = [Mesh(**{role: mesh.size}) for mesh in meshes[1:] if len(mesh.shape) == 1 for role in ("tp", "fsdp")]
    return named + alone


def all_meshes(num_ranks: int = 16, num_axes: int = 3) -> list[Mesh]:
    """The mesh of one rank, and all of at most ``num_ranks`` ranks and ``num_axes`` axes of two ranks or more."""
    names = "abcdefgh"[:num_axes]
    shapes = itertools.chain.from_iterable(
        itertools.product(range(2, num_ranks + 1), repeat=count) for count in range(1, num_axes + 1)
    )
    fitting = [shape for shape in shapes if math.prod(shape) <= num_ranks]
    return [Mesh(a=1), *(Mesh(**dict(zip(names, shape, strict=False))) for shape in fitting)]


def compare(mesh: Mesh, steps: int = STEPS) -> Result:
    """Compare the run on a mesh with the run on one rank."""
    try:
        found = train(mesh, steps)
    except (ShardingError, CaptureError) as error:
        return Result(repr(mesh), "refused", str(error).splitlines()[0])
    expected = trained_alone(steps)
    difference = max(_difference(a, b) for a, b in _pairs(found, expected))
    facts = {"initial parameters": found.initial, "masks": _joined(found.masks), "difference": difference}
    problems = [
        *(["initial parameters differ"] if found.initial != expected.initial else []),
        *(["masks differ"] if found.masks != expected.masks else []),
        *(["a step's masks are another's"] if len(set(found.masks)) != steps else []),
        *([f"losses or parameters differ by {difference:.1e}"] if not difference <= TOLERANCE else []),
    ]
    return Result(repr(mesh), "wrong" if problems else "right", ", ".join(problems), facts)


@cache
def trained_alone(steps: int) -> Run:
    """The run on one rank, computed once."""
    return train(Mesh(dp=1), steps)


def train(mesh: Mesh, steps: int) -> Run:
    """Initialise and train on a mesh; returns the results."""
    annotations = {pattern: spec for role in mesh.axis_names for pattern, spec in ROLES[role].items()}
    model = shardc.init_parameters(lambda: GPT(CONFIG).double(), mesh, annotations, seed=7)
    initial = digest(dict(model.named_parameters()).items())
    parallel = shardc.parallelize(model, mesh, annotations)
    parallel.seed = 11
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses: list[Tensor] = []
    masks: list[str] = []
    drawing: Drawing | None = None
    for _ in range(steps):
        ids, targets = torch.randint(CONFIG.vocab, (2, BATCH, CONFIG.context), generator=generator)
        step = parallel.step
        with captured_once():
            loss = parallel(ids, targets)
        drawing = drawing or Drawing(parallel.program.program)
        masks.append(digest(drawing.masks(parallel.seed, step).items()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    final = {name: parameter.detach() for name, parameter in parallel.named_parameters()}
    return Run(initial, tuple(masks), torch.stack(losses), final)


class Drawing:
    """The part of a localized program that draws dropout masks."""

    def __init__(self, program: Program) -> None:
        alone = program.copy()
        below = [node for node in alone.calls if str(node.target) == "aten.lt.Scalar"]
        masks = {f"{operand(node).args[1]}": node for node in below if operand(node).target is uniform}
        alone.output_node.args = (tuple(masks.values()),)
        alone.outputs = tuple(Output(key, "output") for key in masks)
        alone.remove_dead()
        assert alone.mesh is not None
        self.program, self.runner = alone, Executor(alone, SimulatedComm(alone.mesh))

    def masks(self, seed: int, step: int) -> dict[str, Tensor]:
        """The whole masks of a step, by the key of each draw."""
        inputs = [torch.zeros(entry.type.shape, dtype=entry.type.dtype) for entry in self.program.inputs]
        inputs[[entry.kind for entry in self.program.inputs].index("random")] = torch.tensor([seed, step])
        outputs, _ = self.runner.forward(cut_inputs(self.program, inputs))
        pairs = zip(self.program.outputs, join_outputs(self.program, outputs), strict=True)
        return {output.name: mask for output, mask in pairs if mask is not None}


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """The sha256 of tensors, with their names, dtypes and shapes."""
    found = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _joined(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _pairs(found: Run, expected: Run) -> list[tuple[Tensor, Tensor]]:
    return [
        (found.losses, expected.losses),
        *((found.parameters[name], value) for name, value in expected.parameters.items()),
    ]


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value if that is above 1."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1))
