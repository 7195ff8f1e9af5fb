"""The error feedback of one compiled call: its program takes residuals and momenta, and makes new residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardc.program.program import Program, ends_of, parameters_of, residual_owner

from ..execute.executor import Rows, Runner
from ..execute.part import Values, present
from ..module.accumulation import computes_gradient
from ..module.conversion import Converter
from .feedback import Feedback


@dataclass(frozen=True, slots=True)
class BackwardGradients:
    """The gradients of one backward that are not handled as usual.

    ``added``: gradients that this program does not turn into momenta, although ``.grad`` is one; by index of the
    program's outputs. ``unwanted``: the residuals of gradients that the backward does not compute for anybody, which
    stay as they are; by index of the program's inputs.
    """

    added: frozenset[int] = frozenset()
    unwanted: frozenset[int] = frozenset()


USUAL = BackwardGradients()


class CallFeedback:
    """The error feedback of one compiled call.

    ``inputs`` and ``outputs``: the converters of the program's inputs and outputs, the latter by index. By index of an
    input: ``_residuals``, the output that replaces the residual; ``_owners``, the input that is the parameter of the
    residual; ``_momenta``, the name of the parameter. ``_gradients``: by name of a parameter, the output that is its
    gradient.
    """

    def __init__(self, feedback: Feedback, program: Program, runner: Runner, inputs: Sequence[Converter],
                 outputs: Mapping[int, Converter]) -> None:  # fmt: skip
        self.feedback, self.program, self.runner = feedback, program, runner
        self._inputs, self._outputs = inputs, outputs
        places = {node: i for i, node in enumerate(program.placeholders)}
        self._momenta = {i: put.name for i, put in enumerate(program.inputs) if put.kind == "momentum"}
        self._residuals, self._gradients = dict[int, int](), dict[str, int]()
        for i, (output, owner, result) in enumerate(ends_of(program)):
            if output.kind == "residual" and owner is not None and runner.reads_input(places[owner]):
                self._residuals[places[owner]] = i
            elif owner is not None and result is not None and program.inputs[places[owner]].kind == "parameter":
                self._gradients |= {output.name: i} if output.kind == "gradient" else {}
        parameters = {name: places[node] for name, node in parameters_of(program).items()}
        owners = {i: parameters.get(residual_owner(program.inputs[i].name)) for i in self._residuals}
        self._owners = {i: owner for i, owner in owners.items() if owner is not None}
        if feedback.residuals.sources:
            self.fill()

    def fill(self) -> None:
        """Create the program's residuals from loaded ones, so that a checkpoint saved next contains them."""
        for i in self._residuals:
            self._residual(i)

    def begin_backward(self, nodes: Sequence[Any]) -> BackwardGradients:
        """Note a backward. ``nodes``: the autograd nodes that receive gradients, in the order of the inputs."""
        added, momentum = set[str](), self.feedback.momentum
        if momentum is not None:
            added = momentum.note_backward(self._momenta.values(), self._gradients)
        unwanted = (i for i, owner in self._owners.items() if not computes_gradient(nodes[owner], of_returned=True))
        return BackwardGradients(frozenset(self._gradients[name] for name in added), frozenset(unwanted))

    def given(self, rows: Sequence[Values], of: BackwardGradients = USUAL) -> Rows:
        """Rows of inputs, with the residuals and momenta filled in. The program may write over the residuals."""
        states = {i: self._residual(i) for i in self._residuals}
        states = {i: each.clone() if i in of.unwanted else each for i, each in states.items()}
        if self.feedback.momentum is not None:
            states |= zip(self._momenta, self.feedback.momentum.of(self._momenta.values()), strict=True)
        result = [list(row) for row in rows]
        for i, state in states.items():
            for row, piece in zip(result, self._inputs[i].to_shards(state), strict=True):
                row[i] = piece
        return result

    def keep(self, columns: Sequence[Values], of: BackwardGradients = USUAL) -> None:
        """Keep what codes left out of gradients, and note the momenta that were sent.

        ``columns``: for each output its shards, None where these were not computed.
        """
        if self.feedback.momentum is not None:
            sent = (name for name in self._momenta.values() if present(columns[self._gradients[name]]))
            self.feedback.momentum.note_sent(sent)
        for i, output in self._residuals.items():
            if i not in of.unwanted and (shards := present(columns[output])):
                residual = self._residual(i)
                if self.runner.computes_in_forward:  # shards of the change
                    shards = [*map(torch.add, self._inputs[i].to_shards(residual), shards)]
                self._outputs[output].write(residual, shards)

    def as_added(self, output: int, shards: list[Tensor], of: BackwardGradients) -> list[Tensor]:
        """The shards of a gradient, times 1 - beta if they are added to a momentum."""
        if output not in of.added or self.feedback.momentum is None:
            return shards
        return [each * (1 - self.feedback.momentum.option.beta) for each in shards]

    def _residual(self, index: int) -> Tensor:
        """What codes left out of a gradient, by index of the program's inputs."""
        node, put = self.program.placeholders[index], self.program.inputs[index]
        zeros = partial(self._inputs[index].zeros, put.type.dtype)
        return self.feedback.residuals.tensor(put.name, put.type, self.program.sharding(node), zeros)
