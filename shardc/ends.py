"""A program's ends by name, and whose they are: what gradients and new values of buffers belong to."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from shardc.fact import Output
from shardc.program import Program
from shardc.sharding import Sharding

End = tuple[Output, fx.Node | None, fx.Node | None]


def parameters_of(program: Program) -> dict[str, fx.Node]:
    """The placeholders of parameters by name."""
    return {name: node for (kind, name), node in program.named_inputs.items() if kind == "parameter"}


def ends_of(program: Program) -> Iterator[End]:
    """Each output, the placeholder that it belongs to, None for the model's own, and what the program returns for it.

    Gradients follow the inputs that require them: a parameter and an input of the model may have one name.
    """
    stored, inputs = program.named_inputs, zip(program.inputs, program.placeholders, strict=True)
    wanting = ((put.name, node) for put, node in inputs if put.requires_grad)
    for output, result in zip(program.outputs, program.results, strict=True):
        if output.kind == "gradient":
            yield output, next(node for name, node in wanting if name == output.name), result
        else:
            kind = {"buffer": "buffer", "computed": "parameter"}.get(output.kind, "")
            yield output, stored.get((kind, output.name)), result


def gradient_names(program: Program) -> dict[str, tuple[str, str]]:
    """For the name that each gradient goes by, in order, the kind and name of the input that it is of.

    An input that shares its name with a parameter has ``input:NAME``.
    """
    keys = {node: key for key, node in program.named_inputs.items()}
    found: dict[str, tuple[str, str]] = {}
    for output, owner, _ in ends_of(program):
        if output.kind == "gradient" and owner is not None:
            kind, name = keys[owner]
            found[f"{kind}:{name}" if name in found else name] = kind, name
    return found


def shardings_of(program: Program) -> dict[str, Sharding]:
    """The sharding of every parameter, buffer, input, output and node, by name."""
    nodes = (node for node in program.graph.nodes if node.op != "output" and not program.has_many(node))
    found = {node.name: program.sharding(node) for node in nodes}
    for output, node in zip(program.outputs, program.results, strict=True):
        if node is not None and output.kind == "output":
            found[output.name] = program.sharding(node)
    for given, node in zip(program.inputs, program.placeholders, strict=True):
        if given.kind != "tangent":
            found[given.name] = program.sharding(node)
    return found
