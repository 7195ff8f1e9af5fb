"""Axes of the mesh that cut no work, each with a sentence that says what to annotate."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from shardc.language.mesh import MICROBATCH, idle_axis_text
from shardc.language.partition import P
from shardc.language.text import over_layers
from shardc.program.communication import members
from shardc.program.node import is_cast, is_getitem, is_view
from shardc.program.program import Program, parameters_of

OF_DATA = ("dp", "ddp", "fsdp", "data", "batch")  # names of axes that usually cut the batch
OF_STAGES = ("pp", "stage")


def idle_axis_notes(program: Program) -> tuple[str, ...]:
    """A sentence for each axis over which no op is cut, so that all its ranks compute the same."""
    idle = idle_axes(program)
    if program.mesh is None or not idle:
        return ()
    sizes, stored = program.mesh.sizes, _cutting_axes(program, program.graph.nodes)
    return tuple(
        idle_axis_text(name, sizes[name], _remedy(program, name, sizes[name]), name in stored) for name in idle
    )


def idle_axes(program: Program) -> tuple[str, ...]:
    """The axes of several ranks over which no op is cut."""
    sizes = program.mesh.sizes if program.mesh else {}
    names = [name for name, size in sizes.items() if size > 1 and name != MICROBATCH]
    ops = [node for node in program.calls if not (members(node) or is_view(node) or is_cast(node) or is_getitem(node))]
    busy = _cutting_axes(program, ops) if names else set()
    return tuple(name for name in names if name not in busy)


def _cutting_axes(program: Program, nodes: Iterable[fx.Node]) -> set[str]:
    """The names of the axes that cut a value of the nodes, or over which one is partial."""
    shardings = (sharding for node in nodes for sharding in program.shardings(node) if sharding is not None)
    return {part.name for sharding in shardings for part in sharding.used_parts}


def _remedy(program: Program, axis: str, size: int) -> str:
    """The remedy: stages for an axis of stages, the batch of an input for an axis of data, else the largest weight."""
    if axis in OF_STAGES:
        return f"cut the model into stages along it, by pipeline=Pipeline({axis!r}) or --pipeline {axis}"
    inputs, weights = _candidates(program, "input", size), _candidates(program, "parameter", size)
    batches = [(name, dim) for name, dim, _ in inputs if dim == 0]
    if batches and (axis in OF_DATA or not weights):
        return f"annotate the batch of an input with it, as {batches[0][0]}: {P(axis)!r}"
    if not weights:
        return "leave it out of the mesh, since no dim is as long and whole"
    name, dim, _ = max(weights, key=lambda each: each[2])
    return f"annotate a weight with it, as {_of_equal_layers(program, name)}: {P(*[None] * dim, axis)!r}"


def _candidates(program: Program, kind: str, size: int) -> list[tuple[str, int, int]]:
    """The inputs of a kind with a whole dim that divides by ``size``: the name, the first such dim, the bytes."""
    found = []
    for put, node in zip(program.inputs, program.placeholders, strict=True):
        shardings = program.shardings(node)
        if put.kind == kind and shardings and shardings[0] is not None:
            type_ = program.global_type(node)
            dims = [i for i, dim in enumerate(shardings[0].dims) if not dim.all_axes and not type_.shape[i] % size]
            found += [(put.name, dims[0], type_.nbytes)] if dims else []
    return found


def _of_equal_layers(program: Program, name: str) -> str:
    """The glob for a parameter in all layers where it has one shape, or else its name."""
    nodes = parameters_of(program)
    glob = over_layers(name)
    shapes = {program.global_type(node).shape for other, node in nodes.items() if over_layers(other) == glob}
    return glob if len(shapes) == 1 else name
