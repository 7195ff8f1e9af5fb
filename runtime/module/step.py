"""One compiled call: a user's tensors through the executor, as one node of torch's autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, fx
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
from torch.distributed.tensor import DTensor

from shardc.capture.call import CallingConvention
from shardc.language.errors import OrderError, ShardingError
from shardc.program.lifetime import alone_in_memory, is_row_of_kept
from shardc.program.program import Input, Output, Program, ends_of

from ..comm.dtensor import local
from ..execute.deferred import Sums
from ..execute.executor import Runner, Saved
from ..execute.interpreter import Values
from .border import Border, Door
from .copies import Copies, Made
from .gradients import (
    Accumulation,
    OpenSums,
    handed_over,
    is_accumulated,
    once_only,
    open_gradient,
    open_sums_of,
    rows_apart,
)

State = Mapping[tuple[str, str], Tensor]  # parameters, buffers and constants by kind and name


class Compilation(Protocol):
    """What compiling a call gives: a localized program, and how the call's arguments and results map to it."""

    @property
    def program(self) -> Program: ...
    @property
    def convention(self) -> CallingConvention: ...


class Step:
    """A compiled call, ready for every call of its signature."""

    def __init__(
        self,
        compiled: Compilation,
        border: Border,
        runner: Runner,
        copies: Copies | None = None,
        accumulation: Accumulation | None = None,
    ) -> None:
        self.compiled, self.border, self.runner = compiled, border, runner
        self.program, self.accumulation = compiled.program, accumulation
        self._placeholders, self._results = self.program.placeholders, self.program.results
        self._ends = Ends.of(self.program)
        self.copies = copies if self._ends.computed else None
        self._is_plain = {i: self._comes_back_plain(i) for i in self._ends.outputs}
        self._entries = [self._door(*pair) for pair in zip(self._placeholders, self.program.inputs, strict=True)]
        ends = zip(self._results, self.program.outputs, strict=True)
        self._exits = [self._door(node, end) if node is not None else None for node, end in ends]
        self._starts = dict(self._find_starts())
        self._kept_inputs = [i for i in range(len(self.program.inputs)) if runner.keeps_input(i)]
        self._kept_outputs = {i for i in self._ends.outputs if runner.keeps_output(i)}
        self._passed = [i for i, put in enumerate(self.program.inputs) if put.kind == "input"]
        self._random = [i for i, put in enumerate(self.program.inputs) if put.kind == "random"]
        self._state: State = {}
        self._held: list[Tensor | None] = []
        gradients = {i: node for i in self._ends.gradients.values() if (node := self._results[i]) is not None}
        alone = alone_in_memory(list(gradients.values()))
        self._alone = {i for i, node in gradients.items() if node in alone}
        self._copied = self._ends.buffers.keys() & set(self._kept_inputs)  # written back before the backward reads them

    def __call__(self, state: State, tensors: Iterable[Tensor], draw: tuple[int, int]) -> Any:
        """Run a call with these tensors among its arguments: its result is in the model's own containers.

        ``draw``: the seed and the step that key random ops. Buffers are written back.
        """
        values = self._values(state, tensors, draw)
        if self._ends.tangents and torch.is_grad_enabled():
            outputs = Call.apply(self, *values)
        else:
            with torch.no_grad():
                outputs = self.forward(values)[0]
        return self.compiled.convention.unflatten(outputs)

    def _values(self, state: State, tensors: Iterable[Tensor], draw: tuple[int, int]) -> list[Tensor | None]:
        """Parallel to the program's inputs; what the model holds is looked up where ``state`` is another object."""
        if state is not self._state or not self._held:
            constants = {("buffer", name): each for name, each in self.compiled.convention.constants.items()}
            held, self._state = {**constants, **state}, state
            self._held = [held.get((put.kind, put.name)) for put in self.program.inputs]
        values = list(self._held)
        for i, tensor in zip(self._passed, tensors, strict=True):
            values[i] = tensor
        for i in self._random:
            values[i] = torch.tensor(draw)
        return values

    def forward(self, values: Values) -> tuple[tuple[Tensor, ...], Saved]:
        """Run the forward part: the outputs, and what is saved."""
        with self._as_compiled():
            inputs = self._enter(values)
            results, saved = self.runner.forward(inputs, self._computed(values, inputs))
        columns = list(zip(*results, strict=True))
        for put, i in self._ends.buffers.items():
            buffer = values[put]
            assert buffer is not None
            self._exit(i).write(buffer, _present(columns[i]))
        return tuple(self._output(i, columns[i]) for i in self._ends.outputs), saved

    def backward(
        self, saved: Saved, gradients: Values, given: Given, keep: bool, waiting: Mapping[int, Tensor]
    ) -> list[Tensor | None]:
        """Run the backward part: the gradients of all inputs, DTensors where what was ``given`` is one.

        ``waiting``: by index of the program's outputs, the parameters whose gradients may be left open sums.
        """
        tangents = self._enter(self._as_tangents(gradients))
        if waiting:
            columns, opened = self._accumulate(saved, tangents, keep, waiting)
        else:
            with self._as_compiled():
                results = self.runner.backward(saved, tangents, keep)
            columns = list(zip(*rows_apart(results, tangents, self._alone), strict=True))
        found: list[Tensor | None] = [None] * len(given.held)
        for put, i in self._ends.gradients.items():
            if i in waiting:
                found[put] = open_gradient(opened, i, waiting[i])
            elif pieces := _present(columns[i]):  # of a pipeline, another stage has it
                found[put] = self._exit(i).leave(pieces, put in given.plain)
        return found

    def _accumulate(
        self, saved: Saved, tangents: Sequence[Values], keep: bool, waiting: Mapping[int, Tensor]
    ) -> tuple[list[tuple[Tensor | None, ...]], OpenSums]:
        """Run the backward part, adding to what backwards before made: the gradients by output, and the open sums."""
        assert self.accumulation is not None
        before = open_sums_of(list(waiting.values()), self._close)
        totals = before.take() if before is not None else None
        is_last = totals is not None and self.accumulation.is_last
        with self._as_compiled():
            results, sums = self.runner.accumulate(saved, tangents, keep, totals, is_last)
        columns = list(zip(*rows_apart(results, tangents), strict=True))
        kept, parameters = before or OpenSums.of_kept(waiting, self._close), list(waiting.values())
        opened = OpenSums(sums, self._close, parameters, kept, is_own=totals is not None)
        if is_last:
            opened.end(self._pieces(columns))
        return columns, opened

    def waiting(self, values: Sequence[Tensor | None], nodes: Sequence[Any]) -> dict[int, Tensor]:
        """The parameters whose gradients may be left open sums: none, unless all of them are to be accumulated.

        ``values`` and the ``nodes`` of autograd where their gradients go are parallel to the program's inputs.
        """
        if self.accumulation is None or not self._deferred:
            return {}
        if not all(map(is_accumulated, (nodes[put] for put in self._deferred))):
            return {}
        parameters = {i: values[put] for put, i in self._deferred.items()}
        found: dict[int, Tensor] = {i: each for i, each in parameters.items() if isinstance(each, DTensor)}
        is_all = len(found) == len(parameters)
        return found if is_all and self.accumulation.may_wait(list(found.values())) else {}

    @cached_property
    def _deferred(self) -> dict[int, int]:
        """For an input whose gradient's reduction may run once for several backwards, that output."""
        return {put: i for put, i in self._ends.gradients.items() if i in self.runner.deferred}

    def _close(self, sums: Sums) -> dict[int, Tensor]:
        """Run the reductions that waited: the pieces of gradients by index of the program's outputs."""
        assert self.accumulation is not None
        self.accumulation.note_read()
        with torch.no_grad(), self._as_compiled():
            columns = list(zip(*rows_apart(self.runner.close(sums), [()] * len(sums)), strict=True))
        return self._pieces(columns)

    def _pieces(self, columns: Sequence[Sequence[Tensor | None]]) -> dict[int, Tensor]:
        """The pieces of gradients whose reductions may wait, by index of the program's outputs, which have columns."""
        return {i: local(self._exit(i).leave(_present(columns[i]), is_plain=False)) for i in self.runner.deferred}

    def given(self, values: Values, outputs: Sequence[Tensor]) -> Given:
        """What its backward needs to know of a call, which has run."""
        passed = {i: value for i in self._passed if (value := values[i]) is not None}
        saved = ((i, value) for i in self._kept_inputs if (value := values[i]) is not None)
        pairs = zip(self._ends.outputs, outputs, strict=True)
        shown = [output for i, output in pairs if isinstance(output, DTensor) and i in self._kept_outputs]
        return Given(
            self._held,
            {i: ref(value) for i, value in passed.items()},
            frozenset(i for i, value in passed.items() if not isinstance(value, DTensor)),
            [(i, value._version) for i, value in saved if not value.is_inference()],
            [(ref(output), output._version) for output in shown],
        )

    def _computed(self, values: Values, inputs: Sequence[Values]) -> list[list[Tensor | None]] | None:
        """For each rank the parameters that are kept as they are computed on, parallel to the program's outputs."""
        if self.copies is None:
            return None
        places = self._ends.computed

        def make(into: Made) -> Made:
            made = self.runner.update(inputs, self._rows(into))
            return {name: _present([row[i] for row in made]) for name, i in places.items()}

        given = zip(self.program.inputs, values, strict=True)
        parameters = {put.name: value for put, value in given if put.name in places and value is not None}
        return self._rows(self.copies.get(parameters, self._starts, make))

    def _rows(self, made: Made) -> list[list[Tensor | None]]:
        """For each rank what was made, parallel to the program's outputs."""
        rows: list[list[Tensor | None]] = [[None] * len(self.program.outputs) for _ in self.border.comm.positions]
        for name, i in self._ends.computed.items():
            for row, piece in zip(rows, made.get(name, ()), strict=False):
                row[i] = piece
        return rows

    def _as_compiled(self) -> torch.autocast:
        """Casts are in the program already: none is added while it runs."""
        return torch.autocast(self.border.comm.device.type, enabled=False)

    def _enter(self, values: Values) -> list[list[Tensor | None]]:
        """For each rank its pieces, parallel to the program's inputs."""
        pieces = [None if each is None else door.enter(each) for door, each in zip(self._entries, values, strict=True)]
        for i in self._copied:
            pieces[i] = (each := pieces[i]) and [piece.clone() for piece in each]
        count = len(self.border.comm.positions)
        return [[None if each is None else each[rank] for each in pieces] for rank in range(count)]

    def _as_tangents(self, gradients: Values) -> list[Tensor | None]:
        """The incoming gradients of all outputs as values of the program's inputs, zeros where there is none."""
        values: list[Tensor | None] = [None] * len(self.program.inputs)
        for i, gradient in zip(self._ends.outputs, gradients, strict=True):
            if gradient is not None:
                values[self._tangent(i)] = gradient
        for put in (put for put in self._ends.tangents.values() if values[put] is None):
            type_ = self.program.inputs[put].type
            values[put] = torch.zeros(type_.shape, dtype=type_.dtype, device=self.border.comm.device)
        return values

    def _tangent(self, i: int) -> int:
        name = self.program.outputs[i].name
        if name not in self._ends.tangents:
            raise ShardingError(
                f"output {name!r}", "a gradient reaches it in backward",
                "it was compiled as not differentiable, to keep a dense gradient out of every step",
                f"say differentiable=({name!r},) to parallelize, or detach it",
            )  # fmt: skip
        return self._ends.tangents[name]

    def _output(self, i: int, pieces: Sequence[Tensor | None]) -> Tensor:
        """An output for the user; never a tensor that is saved: it would hold its own graph, and may be changed."""
        output = self._exit(i).leave(_present(pieces), self._is_plain[i])
        if isinstance(output, DTensor):
            return output
        return output.clone() if i in self._kept_outputs else output.detach()

    def _exit(self, i: int) -> Door:
        door = self._exits[i]
        assert door is not None, self.program.outputs[i]
        return door

    def _find_starts(self) -> Iterator[tuple[str, int]]:
        """Of parameters that are rows of what is kept of them, as they are computed on, the first row."""
        for put, node in zip(self.program.inputs, self._placeholders, strict=True):
            kept = self._results[self._ends.computed[put.name]] if put.name in self._ends.computed else None
            if put.kind == "parameter" and kept is not None and is_row_of_kept(self.program, put.name, node, kept):
                stored, computed = self.program.sharding(node), self.program.computed[put.name]
                added = stored.dims[0].axes[len(computed.dims[0].axes) :]
                index = stored.mesh.index(self.border.comm.positions[0], added)
                yield put.name, index * stored.local_shape(put.type.shape)[0]

    def _door(self, node: fx.Node, end: Input | Output) -> Door:
        sharding, shape = self.program.sharding(node), self.program.global_type(node).shape
        return self.border.door(sharding, shape, f"{end.kind} {end.name!r}")

    def _comes_back_plain(self, i: int) -> bool:
        """Whether an output is 0-dim, or an annotation asks for it whole."""
        name, node = self.program.outputs[i].name, self._results[i]
        asked = any(
            pin.kind == "output" and pin.name == name and not pin.sharding.cut_axes and (pin.is_asked or not pin.open)
            for pin in self.program.pins
        )
        return asked or node is None or not self.program.type(node).shape


def _present(pieces: Sequence[Tensor | None]) -> list[Tensor]:
    return [piece for piece in pieces if piece is not None]


@dataclass(frozen=True, slots=True)
class Given:
    """The values of a call, parallel to the program's inputs.

    ``held``: what the model holds; None for the arguments, which are ``passed``, by index: their caller may let go of
    them. ``plain``: the arguments that are no DTensors. ``saved``: of inputs whose memory is saved for backward the
    index and the version; ``shown``: outputs of which the same holds, each with its version.
    """

    held: Sequence[Tensor | None]
    passed: Mapping[int, ReferenceType[Tensor]]
    plain: frozenset[int]
    saved: Sequence[tuple[int, int]]
    shown: Sequence[tuple[ReferenceType[Tensor], int]]

    @property
    def values(self) -> list[Tensor | None]:
        """Those that are still there."""
        values = list(self.held)
        for i, reference in self.passed.items():
            values[i] = reference()
        return values

    def check(self, values: Sequence[Tensor | None]) -> None:
        """RuntimeError where a tensor that the backward needs, of these ``values`` or shown, was changed since."""
        for i, version in self.saved:
            _check_version(values[i], version)
        for reference, version in self.shown:
            _check_version(reference(), version)


def _check_version(tensor: Tensor | None, version: int) -> None:
    if tensor is not None and tensor._version != version:
        what, problem = f"it needs a tensor of shape {list(tensor.shape)}", "that was changed in place after forward"
        raise OrderError("backward", what, problem, "call backward before the optimizer's step")


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


class Call(torch.autograd.Function):
    """The forward part in torch's forward, the backward part in its backward."""

    @staticmethod
    def forward(ctx: Any, step: Step, *values: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs."""
        ctx.set_materialize_grads(False)
        outputs, ctx.saved = step.forward(values)
        ctx.step, ctx.given = step, step.given(values, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs that are not handed to their parameters at once."""
        given = ctx.given.values
        nodes = [node for node, _ in ctx.next_functions][-len(given) :]
        is_graph = torch.is_grad_enabled()
        with torch.no_grad():
            ctx.given.check(given)
            if ctx.step.copies is not None:
                torch.autograd.Variable._execution_engine.queue_callback(ctx.step.copies.note_backward)
            waiting = {} if is_graph else ctx.step.waiting(given, nodes)
            found = ctx.step.backward(ctx.saved, gradients, ctx.given, keeps_graph(), waiting)
        return None, *(once_only(found) if is_graph else handed_over(found, given, nodes))
