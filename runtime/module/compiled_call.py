"""One compiled call: runs a program on the user's tensors, as one node of torch's autograd graph.

``loss.backward()`` enters at ``ProgramFunction.backward``; autograd puts the gradients that it returns into ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import Any, NoReturn, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, fx
from torch._C._autograd import _get_current_graph_task_keep_graph as retains_graph
from torch.distributed.tensor import DTensor

from shardc.capture.call import CallingConvention, named_arguments
from shardc.capture.model_state import ModelTensors
from shardc.capture.objects import objects_among
from shardc.language.errors import OrderError, ShardingError
from shardc.program.lifetime import alone_in_memory
from shardc.program.program import Input, Output, Program, ends_of, is_small_output

from ..agreement.entry import Entry, Flag, Kind
from ..agreement.gate import Gate, digest
from ..agreement.program import ProgramText
from ..comm.dtensor import local
from ..comm.failure import telling_others
from ..execute.deferred import Sums
from ..execute.executor import Runner, SavedEnvs, without_autocast
from ..execute.part import Values, present
from ..feedback.call import BackwardGradients, CallFeedback
from ..feedback.feedback import Feedback
from ..tensor.reduction import complete_norms
from ..tier.stepping import Gradients
from .accumulation import (
    Accumulation,
    DeferredReduction,
    at_end_of_backward,
    computes_gradient,
    deferred_gradient,
    deferred_reduction_of,
    reduce_now,
    separate_rows,
)
from .conversion import Conversion, Converter, GatheredParameters, ParameterGather, plain
from .request import CallRequest, check_untransformed

Columns = Sequence[Sequence[Tensor | None]]  # for each output of a program its shard on every rank


class Compilation(Protocol):
    """A compiled call: its localized program, and how the call's arguments and results map to the program's."""

    @property
    def program(self) -> Program: ...
    @property
    def convention(self) -> CallingConvention: ...


class CompiledCall:
    """A program that runs for every call of one signature.

    ``gather``: gathers parameters that are stored cut. ``gate``: the module's, which all ranks pass before collectives;
    ``text``: the text of the program that they compare. ``is_of_region``: whether the program is that of a region of
    sizes, at the sizes of the call.

    Inputs and outputs of the program are given by index. ``_saved_inputs`` and ``_saved_outputs``: those whose memory
    backward reads; ``_copied_inputs``: the saved inputs that forward writes. ``_own_gradients``: gradients that share
    no memory with others.
    """

    def __init__(self, compilation: Compilation, conversion: Conversion, runner: Runner,
                 gathered: GatheredParameters | None, accumulation: Accumulation, feedback: Feedback,
                 gate: Gate | None, text: ProgramText, is_of_region: bool = False) -> None:  # fmt: skip
        self.is_of_region = is_of_region
        self.compilation, self.conversion, self.runner = compilation, conversion, runner
        self.gate, self.text = gate, text
        self.accumulation, self.program = accumulation, compilation.program
        self._indices = indices = ProgramIndices.of(self.program)
        nodes = zip(self.program.placeholders, self.program.inputs, strict=True)
        self._inputs = [self._converter(node, put) for node, put in nodes]
        self._names = [
            ((put.kind, put.name), put.kind != "parameter" or bool(node.users))
            for node, put in zip(self.program.placeholders, self.program.inputs, strict=True)
        ]
        results = zip(self.program.results, self.program.outputs, strict=True)
        ends = [(i, node, output) for i, (node, output) in enumerate(results) if node is not None]
        self._outputs = {i: self._converter(node, output) for i, node, output in ends}
        self._is_plain = {i: self._is_returned_plain(i) for i in indices.outputs}
        self.feedback = CallFeedback(feedback, self.program, runner, self._inputs, self._outputs)
        self._needs_no_gradient = [not leaf.requires_grad for _, leaf in compilation.convention.tensors]
        self.gather: ParameterGather | None = None
        if gathered is not None and indices.computed:
            self.gather = ParameterGather(self.program, runner, conversion.comm, indices.computed, gathered)
        self._saved_inputs = [i for i in range(len(self.program.inputs)) if runner.keeps_input(i)]
        self._saved_outputs = {i for i in indices.outputs if runner.keeps_output(i)}
        self._copied_inputs = indices.written.keys() & set(self._saved_inputs)
        inputs = self.program.inputs
        self._written_inputs = {inputs[i].name for i in indices.written if inputs[i].kind == "input"}
        self._changed_objects = {each.path for each in compilation.convention.objects if each.outputs}
        gradients = {i: node for i in indices.gradients.values() if (node := self.program.results[i]) is not None}
        own = alone_in_memory(list(gradients.values()))
        self._own_gradients = {i for i, node in gradients.items() if node in own}

    @property
    def draws(self) -> bool:
        """Whether an op of the program draws random numbers."""
        return bool(self._indices.random)

    def __call__(self, request: CallRequest, random_key: tuple[int, int]) -> Any:
        """Run a call, and return its result in the model's own containers.

        ``random_key``: the seed and the step of random ops. Buffers are written back; so are changes that the model
        makes to the call's arguments.
        """
        self._check_shared(request)
        constants = {("buffer", name): each for name, each in self.compilation.convention.constants.items()}
        known = {**constants, **request.tensors}
        # None for tangents, and for parameters that no op reads: they are not in autograd's graph
        values = [known.get(name) if is_read else None for name, is_read in self._names]
        for i, (_, argument) in zip(self._indices.arguments, request.arguments, strict=True):
            values[i] = argument
        for i in self._indices.random:
            values[i] = _key_tensor(random_key, self.conversion.comm.device)
        if self._indices.tangents and torch.is_grad_enabled():
            outputs: Sequence[Tensor] = ProgramFunction.apply(self, *values)
        else:
            with torch.no_grad():
                outputs, _ = self.forward(values)
        convention = self.compilation.convention
        if request.is_whole:
            count = len(outputs) - convention.num_left
            outputs = [*map(plain, outputs[:count]), *outputs[count:]]
        return convention.unflatten(outputs, request.args, request.kwargs, in_place=True)

    def _check_shared(self, request: CallRequest) -> None:
        """Raise a ShardingError if two arguments share memory or are one object, and the model changes one of them."""
        written, changed = self._written_inputs, self._changed_objects
        named: list[tuple[str, int]] = []
        if written:
            own = ((name, local(each) if isinstance(each, DTensor) else each) for name, each in request.arguments)
            named += [(name, each.untyped_storage()._cdata) for name, each in own if each.numel()]
        if changed:
            arguments = named_arguments(self.compilation.convention.forward, request.args, request.kwargs)
            named += [(path, id(each)) for path, each in objects_among(arguments).items()]
        firsts = dict[int, str]()
        for name, place in named:
            first = firsts.setdefault(place, name)
            if first != name and (written | changed) & {name, first}:
                what, problem = f"it is {first!r}, or shares its memory", "the model changes one of them"
                raise ShardingError(f"input {name!r}", what, problem, "pass a copy of it")

    def gathers(self, tensors: ModelTensors) -> bool:
        """Whether the next call must gather stored parameters."""
        return self.gather is not None and self.gather.is_due(tensors)

    def forward(self, values: Values) -> tuple[tuple[Tensor, ...], SavedEnvs]:
        """Run the forward part. Returns the outputs, and the values saved for backward."""
        with without_autocast(self.conversion.comm.device):
            inputs = self._shards(values)
            inputs = self.feedback.given(inputs) if self.runner.computes_in_forward else inputs
            gathered = None if self.gather is None else self.gather(values, inputs)
            rows, saved = self.runner.forward(inputs, gathered)
        columns: Columns = list(zip(*rows, strict=True))
        for i, output in self._indices.written.items():
            buffer = values[i]
            assert buffer is not None
            self._outputs[output].write(buffer, present(columns[output]))
        outputs: list[Tensor] = []
        for i in self._indices.outputs:
            value = self._outputs[i].to_tensor(present(columns[i]), self._is_plain[i])
            if not isinstance(value, DTensor):  # not the saved tensor, which would keep its graph alive, or be changed
                value = value.clone() if i in self._saved_outputs else value.detach()
            outputs.append(value)
        return tuple(outputs), saved

    def without_gradient(self, outputs: Sequence[Tensor]) -> Iterator[Tensor]:
        """The outputs that need no gradient in the model: they are detached, or depend on data alone."""
        return compress(outputs, self._needs_no_gradient)

    def tensors_for_backward(self, values: Values, outputs: Sequence[Tensor]) -> BackwardTensors:
        """The tensors of a call that its backward refers to, once the call has run."""
        arguments = {i: value for i in self._indices.arguments if (value := values[i]) is not None}
        saved = ((i, value) for i in self._saved_inputs if (value := values[i]) is not None)
        pairs = zip(self._indices.outputs, outputs, strict=True)
        saved_outputs = [each for i, each in pairs if isinstance(each, DTensor) and i in self._saved_outputs]
        return BackwardTensors(
            [None if i in arguments else value for i, value in enumerate(values)],
            {i: ref(value) for i, value in arguments.items()},
            frozenset(i for i, value in arguments.items() if not isinstance(value, DTensor)),
            [(i, value._version) for i, value in saved if not value.is_inference()],
            [(ref(output), output._version) for output in saved_outputs],
        )

    def backward(
        self, saved: SavedEnvs, gradients: Values, plain: frozenset[int], keep: bool, deferred: Mapping[int, Tensor],
        stepped: Gradients | None, of: BackwardGradients,
    ) -> list[Tensor | None]:  # fmt: skip
        """Run the backward part. Returns the gradients of all inputs, as DTensors unless their index is in ``plain``.

        ``gradients``: those of the outputs. ``deferred``: the parameters whose gradients may be reduced later, by index
        of the program's outputs. ``stepped``: takes the gradients of parameters, which are then not returned. ``of``:
        what is special about these gradients.
        """
        starts = self._shards(self._tangents(gradients))
        tangents = starts if self.runner.computes_in_forward else self.feedback.given(starts, of)
        reduction: DeferredReduction | None = None
        if deferred:
            columns, reduction = self._accumulate(saved, tangents, keep, deferred)
        else:
            takers, totals = ((), None) if stepped is None else (stepped.takers, stepped.totals)
            with without_autocast(self.conversion.comm.device):
                if totals is None:
                    rows = self.runner.backward(saved, tangents, keep, takers)
                else:
                    rows, _ = self.runner.accumulate(saved, tangents, keep, totals, True, takers)
            columns = list(zip(*separate_rows(rows, starts, self._own_gradients), strict=True))
        self.feedback.keep(columns, of)
        results: list[Tensor | None] = [None] * len(self.program.inputs)
        tier = self.conversion.tier
        for i, output in self._indices.gradients.items():
            if reduction is not None and output in deferred:
                results[i] = deferred_gradient(reduction, output, deferred[output])
            elif shards := present(columns[output]):  # else another stage of a pipeline has it
                if tier is not None and self.program.inputs[i].kind == "parameter":
                    shards = [tier.stored(each) for each in shards]
                results[i] = self._outputs[output].to_tensor(self.feedback.as_added(output, shards, of), i in plain)
        return results

    def _tangents(self, gradients: Values) -> list[Tensor | None]:
        """The incoming gradients of the outputs as inputs of the program; zeros for outputs without one."""
        indices, values = self._indices, list[Tensor | None]([None] * len(self.program.inputs))
        for i, gradient in zip(indices.outputs, gradients, strict=True):
            name = self.program.outputs[i].name
            if gradient is not None and name not in indices.tangents:
                problem = "it was compiled as not differentiable, to keep a dense gradient out of every step"
                remedy = f"say differentiable=({name!r},) to parallelize, or detach it"
                raise ShardingError(f"output {name!r}", "a gradient reaches it in backward", problem, remedy)
            if gradient is not None:
                values[indices.tangents[name]] = gradient
        for i in indices.tangents.values():
            if values[i] is None:
                type_ = self.program.inputs[i].type
                values[i] = torch.zeros(type_.shape, dtype=type_.dtype, device=self.conversion.comm.device)
        return values

    def enter_backward(self, number: int, gradients: Values, values: Values, mode: str) -> None:
        """Enter the backward of call ``number`` together with all other ranks. ``gradients``: those of the outputs."""
        complete_norms()
        if self.gate is None:
            return
        pairs = zip(self._indices.outputs, gradients, strict=True)
        names = [self.program.outputs[i].name for i, gradient in pairs if gradient is not None]
        text, results = f"backward of {', '.join(names)}, {mode}", self.program.results
        own = [values[i] for i, output in self._indices.gradients.items() if results[output] is not None]
        trained = [each for each in own if isinstance(each, DTensor) and not each.is_meta]  # of this rank's stages
        has_gradients = Flag(any(each.grad is not None for each in trained)) if trained else Flag.UNKNOWN
        entry = Entry(Kind.BACKWARD, self.gate.digest, number, digest(text), is_changed=has_gradients)
        has = "adds to gradients" if has_gradients == Flag.YES else "has no gradients yet"
        self.gate.enter(entry, {"request": lambda: text, "is_changed": lambda: has})

    def accumulated(self, values: Values, nodes: Sequence[Any]) -> Mapping[int, Tensor]:
        """The parameters, by index of the program's outputs, whose gradients go to ``.grad`` and may be reduced later.

        These are all with a gradient that the runner may defer, or none. ``values``, and ``nodes``, the autograd nodes
        that receive their gradients, are in the order of the program's inputs.
        """
        outputs = {i: output for i, output in self._indices.gradients.items() if output in self.runner.deferred}
        parameters = {output: each for i, output in outputs.items() if isinstance(each := values[i], DTensor)}
        is_all = len(parameters) == len(outputs) and all(computes_gradient(nodes[i]) for i in outputs)
        return parameters if is_all else {}

    def deferrable(self, parameters: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """The ``accumulated`` parameters whose reduction should wait: all, or none."""
        waits = bool(parameters) and self.accumulation.begin_backward(list(parameters.values()))
        return parameters if waits else {}

    def stepped(self, values: Values, nodes: Sequence[Any], accumulated: Mapping[int, Tensor]) -> Gradients | None:
        """Steps all parameters as their gradients come; None if the optimizer steps after backward.

        ``values`` and ``nodes``: as for ``accumulated``. ``accumulated``: its result, parameters whose reductions may
        have been deferred.
        """
        stepping, taken = self.accumulation.stepping, self.runner.taken
        if stepping is None or not taken:
            return None
        pairs: list[tuple[int, Any, int]] = [
            (i, values[i], output) for i, output in self._indices.gradients.items() if output in taken
        ]
        if not all(computes_gradient(nodes[i]) and stepping.steps(parameter) for i, parameter, _ in pairs):
            return None
        parameters, totals = {output: parameter for _, parameter, output in pairs}, None
        before = deferred_reduction_of(list(accumulated.values()), self._reduce)
        if before is None or before.adds_to_others:
            reduce_now(parameters.values())
        else:
            totals = before.take()
            for each in accumulated.values():
                each.grad = None  # it represents these sums
        count = len(self.conversion.comm.positions)
        return Gradients(stepping, self.conversion.tier, parameters, self._gradient, count, totals)

    def _gradient(self, output: int, shards: Sequence[Tensor]) -> Tensor:
        return self._outputs[output].to_tensor(shards, is_plain=False)

    def _accumulate(
        self, saved: SavedEnvs, tangents: Sequence[Values], keep: bool, parameters: Mapping[int, Tensor]
    ) -> tuple[Columns, DeferredReduction]:
        """Run the backward part, and add its sums on this rank to those of earlier backwards.

        If this is expected to be the last backward before gradients are read, it runs their reductions too.
        """
        before = deferred_reduction_of(list(parameters.values()), self._reduce)
        totals = before.take() if before is not None else None
        is_last = totals is not None and self.accumulation.is_last
        with without_autocast(self.conversion.comm.device):
            rows, sums = self.runner.accumulate(saved, tangents, keep, totals, is_last)
        columns: Columns = list(zip(*separate_rows(rows, tangents), strict=True))
        before = before or DeferredReduction.of_gradients(parameters, self._reduce)
        reduction = DeferredReduction(sums, self._reduce, list(parameters.values()), before, totals is not None)
        if is_last:
            reduction.complete(self._reduced(columns))
            at_end_of_backward(reduction.settle)
        return columns, reduction

    def _reduce(self, sums: Sums) -> dict[int, Tensor]:
        """Run the deferred reductions. Returns this rank's shards of gradients, by index of the program's outputs."""
        complete_norms()
        if self.gate is not None:
            self.gate.enter(Entry(Kind.REDUCE, self.gate.digest))
        self.accumulation.note_read()
        with torch.no_grad(), telling_others(), without_autocast(self.conversion.comm.device):
            states = self.feedback.given([[None] * len(self.program.inputs) for _ in sums])
            rows = separate_rows(self.runner.close(sums, states), [()] * len(sums))
        columns = list(zip(*rows, strict=True))
        self.feedback.keep(columns)
        return self._reduced(columns)

    def _reduced(self, columns: Columns) -> dict[int, Tensor]:
        gradients = {i: present(columns[i]) for i in self.runner.deferred}
        return {i: local(self._outputs[i].to_tensor(each, is_plain=False)) for i, each in gradients.items()}

    def _shards(self, values: Values) -> list[list[Tensor | None]]:
        """The shards of each rank, in the order of the program's inputs."""
        pairs = zip(self._inputs, values, strict=True)
        columns = [None if each is None else converter.to_shards(each) for converter, each in pairs]
        for i in self._copied_inputs:
            columns[i] = (shards := columns[i]) and [each.clone() for each in shards]
        count = len(self.conversion.comm.positions)
        return [[None if each is None else each[rank] for each in columns] for rank in range(count)]

    def _converter(self, node: fx.Node, end: Input | Output) -> Converter:
        sharding, shape = self.program.sharding(node), self.program.global_type(node).shape
        return self.conversion.converter(sharding, shape, f"{end.kind} {end.name!r}")

    def _is_returned_plain(self, i: int) -> bool:
        """Whether an output is small, or an annotation says that it is whole."""
        output, node = self.program.outputs[i], self.program.results[i]
        pins = [pin for pin in self.program.pins if (pin.kind, pin.name) == ("output", output.name)]
        is_annotated = any(not pin.sharding.cut_axes and (pin.is_returned_whole or not pin.open) for pin in pins)
        return is_annotated or node is None or is_small_output(self.program, output, node)


def _key_tensor(key: tuple[int, int], device: torch.device) -> Tensor:
    """A random key, filled in by kernels that take its numbers as arguments: nothing is copied from the host."""
    seed, step = key
    result = torch.full((2,), step, dtype=torch.int64, device=device)
    result[:1].fill_(seed)
    return result


class ProgramFunction(torch.autograd.Function):
    """The program's forward part in torch's forward, its backward part in torch's backward."""

    @staticmethod
    def forward(ctx: Any, call: CompiledCall, *values: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, ctx.saved = call.forward(values)
        ctx.call, ctx.tensors = call, call.tensors_for_backward(values, outputs)
        ctx.are_tensors = [value is not None for value in values]
        ctx.number = 0 if call.gate is None else call.gate.calls
        ctx.mark_non_differentiable(*call.without_gradient(outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs, which autograd adds to ``.grad``."""
        call, values, creates_graph = ctx.call, ctx.tensors.values, torch.is_grad_enabled()
        edges = iter(ctx.next_functions)  # of the tensors among its arguments
        nodes = [next(edges)[0] if is_tensor else None for is_tensor in ctx.are_tensors]
        with torch.no_grad(), telling_others():
            check_untransformed("backward of a parallel model", gradients)
            with nullcontext() if call.gate is None else call.gate.telling():
                if call.accumulation.stepping is not None:
                    call.accumulation.stepping.begin_backward()
                ctx.tensors.check(values)
            accumulated = {} if creates_graph else call.accumulated(values, nodes)
            mode = "with create_graph" if creates_graph else "accumulated" if accumulated else "as they are"
            mode += ", in step_in_backward" if call.accumulation.stepping is not None else ""
            call.enter_backward(ctx.number, gradients, values, mode)
            if call.gather is not None:
                at_end_of_backward(call.gather.cache.note_backward)
            of = call.feedback.begin_backward(nodes)
            stepped = None if creates_graph else call.stepped(values, nodes, accumulated)
            deferred = call.deferrable(accumulated) if stepped is None else {}
            deferred = {} if of.added else deferred  # these are scaled now, and sums that wait are not
            results = call.backward(ctx.saved, gradients, ctx.tensors.plain, retains_graph(), deferred, stepped, of)
        if creates_graph:
            results = NoSecondDerivative.apply(len(results), *results, *gradients, *values)
        return None, *results


class NoSecondDerivative(torch.autograd.Function):
    """Returns gradients unchanged, and raises an OrderError if a derivative of them is computed.

    Its further arguments are the tensors that they depend on, so that autograd comes here from any of them.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The first ``count`` tensors."""
        return tuple(None if each is None else each.detach() for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        """Raise the error."""
        problem = "a gradient of a parallel model has no gradient itself"
        raise OrderError("backward", "it computes a second derivative", problem, "leave create_graph out")


@dataclass(frozen=True, slots=True)
class BackwardTensors:
    """The tensors of a call that its backward refers to, by index of the program's inputs.

    ``model``: the model's own; None in place of the ``arguments``, which their caller may free. ``plain``: the indices
    of arguments that are not DTensors. ``versions``: indices and versions of inputs whose memory backward reads.
    ``outputs``: outputs whose memory backward reads, each with its version.
    """

    model: Sequence[Tensor | None]
    arguments: Mapping[int, ReferenceType[Tensor]]
    plain: frozenset[int]
    versions: Sequence[tuple[int, int]]
    outputs: Sequence[tuple[ReferenceType[Tensor], int]]

    @property
    def values(self) -> list[Tensor | None]:
        """The inputs; None for arguments that are freed."""
        values = list(self.model)
        for i, reference in self.arguments.items():
            values[i] = reference()
        return values

    def check(self, values: Sequence[Tensor | None]) -> None:
        """Raise an OrderError if a tensor that backward reads was changed in place since forward."""
        inputs = [(values[i], version) for i, version in self.versions]
        for tensor, version in (*inputs, *((reference(), version) for reference, version in self.outputs)):
            if tensor is not None and tensor._version != version:
                what = f"it needs a tensor of shape {list(tensor.shape)}"
                problem, remedy = "that was changed in place after forward", "call backward before the optimizer's step"
                raise OrderError("backward", what, problem, remedy)


@dataclass(frozen=True, slots=True)
class ProgramIndices:
    """The indices of a program's inputs and outputs, and of the pairs that belong together.

    ``outputs``: the model's outputs. ``arguments``: inputs that are arguments of the call. ``random``: random keys, if
    an op draws. ``tangents``: by an output's name, the input that is its gradient. ``written`` and ``gradients``: by
    input, the output that is its new value, or its gradient. ``computed``: by a parameter's name, the output that is
    the gathered parameter.
    """

    outputs: tuple[int, ...]
    arguments: tuple[int, ...]
    random: tuple[int, ...]
    tangents: Mapping[str, int]
    written: Mapping[int, int]
    gradients: Mapping[int, int]
    computed: Mapping[str, int]

    @staticmethod
    def of(program: Program) -> ProgramIndices:
        """The indices of a program."""
        inputs, outputs = list(enumerate(program.inputs)), list(enumerate(program.outputs))
        places = {node: i for i, node in enumerate(program.placeholders)}
        owned = [(output.kind, places[owner], i) for i, (output, owner, _) in enumerate(ends_of(program)) if owner]
        return ProgramIndices(
            tuple(i for i, output in outputs if output.kind == "output"),
            tuple(i for i, put in inputs if put.kind == "input"),
            tuple(i for i, put in inputs if put.kind == "random" and program.placeholders[i].users),
            {put.name: i for i, put in inputs if put.kind == "tangent"},
            {owner: i for kind, owner, i in owned if kind in ("buffer", "changed")},
            {owner: i for kind, owner, i in owned if kind == "gradient"},
            {output.name: i for i, output in outputs if output.kind == "computed"},
        )
