"""What a rank of a pipeline stores from step to step: its stages' parameters, their gradients and Adam's states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shardc.cost import ADAM_STATES, gradient_type, nbytes, of_parameters
from shardc.ends import parameters_of
from shardc.program import Program
from shardc.stage import Stage


def stored_bytes(program: Program, names: Collection[str]) -> dict[str, int]:
    """Bytes on one rank of a lowered or localized program of these parameters, their gradients and Adam's states."""
    nodes = parameters_of(program)
    gradients = {name: node for name, node in of_parameters(program, "gradient").items() if name in names}
    return {
        "parameters": sum(nbytes(program.local_type(nodes[name])) for name in names),
        "gradients": sum(nbytes(gradient_type(program, *each)) for each in gradients.items()),
        "optimizer": ADAM_STATES * sum(nbytes(program.local_type(nodes[name])) for name in gradients),
    }


def resident_bytes(program: Program, stages: Sequence[Stage], place: Sequence[int]) -> Iterator[int]:
    """For each stage all of that; what a rank's stages share counts at the first of them."""
    met: dict[int, set[str]] = {rank: set() for rank in place}
    for stage, rank in zip(stages, place, strict=True):
        yield sum(stored_bytes(program, set(stage.parameters) - met[rank]).values())
        met[rank] |= set(stage.parameters)
