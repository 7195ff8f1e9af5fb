"""Which inputs and outputs of a program belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardc.ends import ends_of
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
        """Those of a program."""
        outputs = list(enumerate(program.outputs))
        places = {node: put for put, node in enumerate(program.placeholders)}
        owned = [(output.kind, owner, i) for i, (output, owner, _) in enumerate(ends_of(program))]
        buffers, gradients = (
            {places[owner]: i for its, owner, i in owned if its == kind and owner is not None}
            for kind in ("buffer", "gradient")
        )
        return Ends(
            tuple(i for i, output in outputs if output.kind == "output"),
            {given.name: put for put, given in enumerate(program.inputs) if given.kind == "tangent"},
            buffers,
            gradients,
            {output.name: i for i, output in outputs if output.kind == "computed"},
        )
