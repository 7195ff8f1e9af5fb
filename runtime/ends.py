"""Which inputs and outputs of a program belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardc.program import Program


@dataclass(frozen=True, slots=True)
class Ends:
    """By index, what belongs together.

    ``outputs``: the model's. ``tangents``: by the output's name, an input. ``buffers`` and ``gradients``: for an input
    the output that is its new value, or its gradient. ``computed``: by the parameter's name, an output.
    """

    outputs: tuple[int, ...]
    tangents: Mapping[str, int]
    buffers: Mapping[int, int]
    gradients: Mapping[int, int]
    computed: Mapping[str, int]

    @staticmethod
    def of(program: Program) -> Ends:
        """Those of a program, whose gradients follow the inputs that require them."""
        inputs, outputs = list(enumerate(program.inputs)), list(enumerate(program.outputs))
        gradients = [i for i, output in outputs if output.kind == "gradient"]
        wanting = [put for put, given in inputs if given.requires_grad] if gradients else []
        assert [program.inputs[put].name for put in wanting] == [program.outputs[i].name for i in gradients]
        named = {given.name: put for put, given in inputs if given.kind == "buffer"}
        return Ends(
            tuple(i for i, output in outputs if output.kind == "output"),
            {given.name: put for put, given in inputs if given.kind == "tangent"},
            {named[output.name]: i for i, output in outputs if output.kind == "buffer"},
            dict(zip(wanting, gradients, strict=True)),
            {output.name: i for i, output in outputs if output.kind == "computed"},
        )
