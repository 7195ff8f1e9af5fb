"""The error feedback of one compiled call: its program takes residuals and momenta, and makes new residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardc.program.program import Program, ends_of, residual_owner

from ..execute.executor import Rows, Runner
from ..execute.part import Values
from ..module.conversion import Converter
from .feedback import Feedback


@dataclass(frozen=True, slots=True)
class BackwardGradients:
    """What is special about the gradients of one backward.

    ``added``: by index of the program's outputs, the gradients that are added to a momentum and sent as they are.
    ``unwanted``: by index of the program's inputs, the residuals of gradients that the backward does not ask for; they
    are kept as they were.
    """

    added: frozenset[int] = frozenset()
    unwanted: frozenset[int] = frozenset()


USUAL = BackwardGradients()


class CallFeedback:
    """Gives a program what codes left out of gradients and the momenta that are sent, and keeps what it leaves out.

    ``inputs`` and ``outputs``: the converters of those of the program, the latter by index. By index of an input:
    ``_residuals``, the output that is the new residual; ``_momenta``, the parameter. ``_gradients``: by the name of a
    parameter the output that is its gradient.
    """

    def __init__(self, feedback: Feedback, program: Program, runner: Runner, inputs: Sequence[Converter],
                 outputs: Mapping[int, Converter]) -> None:  # fmt: skip
        self.feedback, self.program, self.runner, self._inputs, self._outputs = (
            feedback,
            program,
            runner,
            inputs,
            outputs,
        )
        places = {node: i for i, node in enumerate(program.placeholders)}
        self._momenta = {i: put.name for i, put in enumerate(program.inputs) if put.kind == "momentum"}
        self._residuals, self._gradients = dict[int, int](), dict[str, int]()
        for i, (output, owner, result) in enumerate(ends_of(program)):
            if output.kind == "residual" and owner is not None and runner.reads_input(places[owner]):
                self._residuals[places[owner]] = i
            elif owner is not None and result is not None and program.inputs[places[owner]].kind == "parameter":
                self._gradients |= {output.name: i} if output.kind == "gradient" else {}

    def begin_backward(self, nodes: Sequence[Any]) -> BackwardGradients:
        """Note a backward. ``nodes``: the autograd nodes that receive gradients, in the order of the inputs."""
        added, unwanted = set[str](), frozenset[int]()
        if self.feedback.momentum is not None:
            added = self.feedback.momentum.note_backward(self._momenta.values(), self._gradients)
        if self._residuals:
            inputs = self.program.inputs
            asked = {
                put.name for put, node in zip(inputs, nodes, strict=True) if put.kind == "parameter" and _is_asked(node)
            }
            unwanted = frozenset(i for i in self._residuals if residual_owner(inputs[i].name) not in asked)
        return BackwardGradients(frozenset(self._gradients[name] for name in added), unwanted)

    def given(self, rows: Sequence[Values], of: BackwardGradients = USUAL) -> Rows:
        """Rows of inputs with the residuals and the momenta. The program may write over the residuals."""
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
            sent = (name for name in self._momenta.values() if _present(columns[self._gradients[name]]))
            self.feedback.momentum.note_sent(sent)
        for i, output in self._residuals.items():
            if i not in of.unwanted and (shards := _present(columns[output])):
                residual = self._residual(i)
                if self.runner.computes_in_forward:  # shards of the change
                    shards = [*map(torch.add, self._inputs[i].to_shards(residual), shards)]
                self._outputs[output].write(residual, shards)

    def as_added(self, output: int, shards: list[Tensor], of: BackwardGradients) -> list[Tensor]:
        """The shards of a gradient as they are added to ``.grad``: scaled if that is a momentum."""
        if output not in of.added or self.feedback.momentum is None:
            return shards
        return [each * (1 - self.feedback.momentum.option.beta) for each in shards]

    def _residual(self, index: int) -> Tensor:
        """What codes left out of a gradient, by index of the program's inputs."""
        node, put = self.program.placeholders[index], self.program.inputs[index]
        zeros = partial(self._inputs[index].zeros, put.type.dtype)
        return self.feedback.residuals.tensor(put.name, put.type, self.program.sharding(node), zeros)


def _present(shards: Values) -> list[Tensor]:
    return [each for each in shards if each is not None]


def _is_asked(node: Any) -> bool:
    """Whether the running backward asks for the gradient that a node receives."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that autograd.grad asks for
        return True
