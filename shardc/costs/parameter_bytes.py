"""Bytes on one rank that stay between steps: parameters, their gradients and the optimizer's states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from shardc.language.sharding import TensorType
from shardc.program.lifetime import is_row_of_kept
from shardc.program.program import Program, ends_of, parameters_of
from shardc.program.stages import Stage

ADAM_STATES = 2  # exp_avg and exp_avg_sq in the parameter's dtype: 8 bytes for a local fp32 element


def nbytes(type_: TensorType | None) -> int:
    """The bytes of a value on one rank; 0 for a value that is no tensor."""
    return 0 if type_ is None else type_.nbytes


def persistent_bytes(program: Program) -> dict[str, int]:
    """Bytes by class of all parameters, with the copies of them that are kept to compute on."""
    parameters, kept = parameters_of(program), results_by_parameter(program, "computed")
    rows = [name for name, node in kept.items() if is_row_of_kept(program, name, parameters[name], node)]
    separate = [node for name, node in parameters.items() if name not in rows]
    stored = sum(nbytes(program.local_type(node)) for node in (*separate, *kept.values()))
    return {**stored_bytes(program, parameters), "parameters": stored}


def stored_bytes(program: Program, names: Collection[str]) -> dict[str, int]:
    """Bytes by class of these parameters as they are stored, their gradients and Adam's states."""
    nodes = parameters_of(program)
    gradients = {name: node for name, node in results_by_parameter(program, "gradient").items() if name in names}
    return {
        "parameters": sum(nbytes(program.local_type(nodes[name])) for name in names),
        "gradients": sum(nbytes(gradient_type(program, *each)) for each in gradients.items()),
        "optimizer": ADAM_STATES * sum(nbytes(program.local_type(nodes[name])) for name in gradients),
    }


def resident_bytes(program: Program, stages: Sequence[Stage], place: Sequence[int]) -> Iterator[int]:
    """The stored bytes of each stage, all classes together; parameters of several stages of a rank count once."""
    counted: dict[int, set[str]] = {rank: set() for rank in place}
    for stage, rank in zip(stages, place, strict=True):
        yield sum(stored_bytes(program, set(stage.parameters) - counted[rank]).values())
        counted[rank] |= set(stage.parameters)


def results_by_parameter(program: Program, kind: str) -> dict[str, fx.Node]:
    """The results of a kind, ``gradient`` or ``computed``, by the names of their parameters."""
    names = {node: name for name, node in parameters_of(program).items()}
    ends = ((owner, node) for output, owner, node in ends_of(program) if output.kind == kind and owner in names)
    return {names[owner]: node for owner, node in ends if node is not None}


def gradient_type(program: Program, name: str, node: fx.Node) -> TensorType | None:
    """The type of a parameter's gradient on one rank, between backward and the optimizer's step."""
    zero = program.options.zero
    if zero is None or zero.stage != 1 or name not in program.computed:
        return program.local_type(node)
    shape = program.computed[name].local_shape(program.global_type(node).shape)
    return TensorType(shape, program.type(node).dtype)
