"""Runs a program in this process: on all virtual ranks of its mesh, or whole on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.language.mesh import MICROBATCH, Mesh
from shardc.language.sharding import Sharding
from shardc.program.program import OF_BACKWARD, Program

from .comm.comm import Comm
from .comm.dtensor import pad, shard, unshard
from .comm.simulated import SimulatedComm
from .execute.executor import Executor, Runner
from .execute.part import Values
from .pipeline.runner import PipelineRunner


@torch.no_grad()
def simulate(program: Program, inputs: Values, comm: Comm | None = None) -> list[Tensor | None]:
    """Run a localized program on all virtual ranks, with whole tensors in and out.

    ``inputs`` are in the order of the program's inputs, results in that of its outputs; an absent value is None.
    Replicas must agree bit for bit: else an AssertionError names the value. ``comm`` counts the bytes that each rank
    sends.
    """
    assert program.level == "localized" and program.mesh is not None, program.level
    pieces, has_stages = cut_inputs(program, inputs), program.options.pipeline is not None
    comm = comm or SimulatedComm(_stage_mesh(program.mesh) if has_stages else program.mesh, _device(inputs))
    runner: Runner = PipelineRunner(program, comm) if has_stages else Executor(program, comm)
    outputs, saved = runner.forward(pieces)
    is_late = [put.kind in OF_BACKWARD for put in program.inputs]
    if has_stages and not any(is_late):
        return join_outputs(program, outputs)
    tangents = [[x.clone() if late and x is not None else None for x, late in zip(row, is_late, strict=True)]
                for row in pieces]  # fmt: skip
    gradients = runner.backward(saved, tangents)
    return join_outputs(program, [_merged(*pair) for pair in zip(outputs, gradients, strict=True)])


def _stage_mesh(mesh: Mesh) -> Mesh:
    """The mesh of one pipeline stage: the program's mesh without the axis of microbatches."""
    return Mesh(device_ids=None, **{name: size for name, size in mesh.sizes.items() if name != MICROBATCH})


@torch.no_grad()
def interpret(program: Program, inputs: Values) -> list[Tensor | None]:
    """Run a program of any level below localized on one device; reshards and collectives are identities."""
    assert program.level != "localized", program.level
    executor = Executor(program, device=_device(inputs))
    outputs, saved = executor.forward([inputs])
    return _merged(outputs[0], executor.backward(saved, [inputs])[0])


def cut_inputs(program: Program, inputs: Values) -> list[list[Tensor | None]]:
    """Each rank's pieces of whole inputs, padded."""
    assert program.mesh is not None
    shardings = [program.sharding(node) for node in program.placeholders]
    pairs = list(zip(inputs, shardings, strict=True))

    def piece(whole: Tensor, sharding: Sharding, position: int) -> Tensor:
        return pad(shard(whole, sharding, position), sharding, whole.shape, position)

    ranks = range(program.mesh.size)
    return [[None if value is None else piece(value, cut, rank) for value, cut in pairs] for rank in ranks]


def join_outputs(program: Program, pieces: Sequence[Values]) -> list[Tensor | None]:
    """Whole outputs from all ranks' pieces; None for an output that no rank has."""
    whole: list[Tensor | None] = []
    for node, output, column in zip(program.results, program.outputs, zip(*pieces, strict=True), strict=True):
        result, present = None, [piece for piece in column if piece is not None]
        if node is not None and present:
            shape, name = program.global_type(node).shape, f"{output.kind} {output.name!r}"
            result = unshard(present, program.sharding(node), shape, name)
        whole.append(result)
    return whole


def _device(inputs: Values) -> torch.device:
    """The device of most inputs."""
    devices = Counter(value.device for value in inputs if value is not None)
    return devices.most_common(1)[0][0] if devices else torch.device("cpu")


def _merged(outputs: Values, gradients: Values) -> list[Tensor | None]:
    return [output if output is not None else gradient for output, gradient in zip(outputs, gradients, strict=True)]
