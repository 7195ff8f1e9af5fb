"""Capture: a model and example inputs in, the joint graph of its forward and backward out, with nothing allocated.

One trace does it all: ``make_fx`` over the user's own module with fake, functionalized tensors and ``autograd.grad``
inside. Measured on GPT-2 of transformers, 12 layers (T 1024, B 16): 1.6 s and 2200 nodes, against 3.0 s for
``torch.export`` followed by ``make_fx``, which leaves in-place ops behind, and 2.7 s for ``torch.export`` followed by
``aot_export_joint_with_descriptors``, of nearly the same graph.

Blocks that are alike are traced once: ``blocks/``.

The eager path of the model is captured if possible. If it depends on the values of tensors, the path that the model
offers to compilers (``torch.compiler.is_compiling()``) is tried, then both paths again with guards on those values.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardc.capture.annotations import Match, annotate_output, annotating
from shardc.capture.assembly import TraceSignature, assemble
from shardc.capture.blocks.alike import alike_blocks
from shardc.capture.blocks.calls import BlockCalls
from shardc.capture.call import (
    CallingConvention,
    OutputLeaves,
    call_leaves,
    call_signature,
    differentiable_names,
    named_arguments,
    output_leaves,
    rebuild_call,
)
from shardc.capture.containers import Tree
from shardc.capture.decompositions import Casting, FunctionRewrites, decompositions, unfused_recurrent_layers
from shardc.capture.higher_order import REPLACED, higher_order_ops
from shardc.capture.microbatches import counting_marks, marks_passed
from shardc.capture.model import (
    borrow,
    current_tensor,
    follow_modules,
    idle_hooks,
    no_checkpoints,
    no_outer_checkpoint,
    override_attribute,
    plain_tensors,
    replace_tensors,
    state_names,
)
from shardc.capture.objects import CallObjects, ObjectAfter, Returned, preserved
from shardc.capture.signature import Constant
from shardc.capture.values.masks import Masks
from shardc.capture.values.refusals import (
    DATA_DEPENDENT,
    OWN_COLLECTIVE,
    Guards,
    NoValueError,
    Refusals,
    Unfit,
    capture_error,
    failing_place,
    is_collective,
    is_lookup_by_value,
    is_whole,
    known_number,
    no_seeds,
    python_effects,
    user_location,
)
from shardc.capture.values.region import Region, Symbols
from shardc.capture.values.unknown import UnknownNumber, UnknownValueError
from shardc.language.errors import CaptureError, ShardingError, note_place_in_model
from shardc.language.sharding import TensorType
from shardc.language.size import symbolic_of
from shardc.options import Precision
from shardc.program.node import last_node, nodes_after
from shardc.program.opaque import Opaque, hold_opaques
from shardc.program.program import Input, Output, Program
from shardc.program.provenance import Phase, Source


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured program and how it is called.

    ``aliases``: for every further name of a tied parameter or buffer its first name, which the program uses.
    ``modules``, ``differentiable``, ``precision``: the arguments of its capture. ``region``: the sizes at which it
    holds, if some dims may have several.
    """

    program: Program
    convention: CallingConvention
    aliases: Mapping[str, str]
    modules: Mapping[str, Match]
    differentiable: tuple[str, ...]
    precision: Precision | None
    region: Region | None = None

    @property
    def has_guards(self) -> bool:
        """Whether the program holds only for some values of the inputs."""
        return any(output.kind == "guard" for output in self.program.outputs)


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    train: bool = True,
    modules: Mapping[str, Match] | None = None,
    differentiable: tuple[str, ...] = (),
    precision: Precision | None = None,
    symbols: Symbols | None = None,
) -> Captured:
    """Capture the call ``model(*args, **kwargs)`` as a program.

    Only shapes and dtypes of tensors are read, and values where guards need them. Parameters may be on meta. ``train``
    adds the backward; it starts from the field ``loss`` of the output, else from its 0-dim tensors, else from all of
    them; further outputs by name in ``differentiable``. ``modules``: annotations of modules' outputs, by path.
    ``symbols``: for dims that may have other sizes. Raises a CaptureError that names the user's line if the model has
    no graph.
    """
    region = Region(symbols) if symbols else None
    joint = _Joint(model, args, kwargs, train, modules or {}, differentiable, precision, region)
    try:
        traced = joint.trace()
    except (CaptureError, ShardingError):
        raise
    except Exception as error:
        is_explained = is_lookup_by_value(error) or is_collective(error)
        if is_explained or isinstance(error, (RuntimeError, TypeError, ArithmeticError, UnknownValueError)):
            raise capture_error(error, model) from error
        note_place_in_model(error, failing_place(error, model))
        raise
    return joint.captured(traced)


def is_same_capture(
    captured: Captured,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    train: bool,
    modules: Mapping[str, Match],
    differentiable: tuple[str, ...],
    precision: Precision | None,
) -> bool:
    """Whether ``capture`` with these arguments would give ``captured`` again. Values of tensors are not compared."""
    asked = tuple(modules.items()), tuple(differentiable), precision
    if asked != (tuple(captured.modules.items()), tuple(captured.differentiable), captured.precision):
        return False
    parameters, buffers, _ = state_names(model)
    types = {name: TensorType.of(tensor) for name, tensor in {**parameters, **buffers}.items()}
    stored = [put for put in captured.program.inputs if put.kind in ("parameter", "buffer")]  # constants included
    has_same_types = all(types.get(put.name, put.type) == put.type for put in stored)
    return has_same_types and call_signature(model, args, kwargs, train) == captured.convention.signature


@dataclass(eq=False)
class _Joint:
    """The forward and backward of a call as one function of flat tensors, in the order of ``inputs``.

    State: ``outputs``, ``output_tree``, ``tangents`` and ``objects``, which ``run`` sets while it is traced;
    ``refusals``, ``masks`` and ``tracker``, which see each call of the trace; ``guards``, those of the trace;
    ``has_guards``, whether ops of torch get guards, since no path of the model has a graph without; ``opaque``, the
    opaque calls, which a traced graph names by their keys alone.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    train: bool
    modules: Mapping[str, Match]
    differentiable: tuple[str, ...]
    precision: Precision | None
    region: Region | None
    outputs: OutputLeaves = field(init=False)
    output_tree: Tree = field(init=False)
    objects: tuple[ObjectAfter, ...] = field(init=False)
    refusals: Refusals = field(init=False)
    masks: Masks = field(init=False)
    tracker: SourceTracker = field(init=False)
    guards: Guards = field(init=False)
    has_guards: bool = False
    tangents: tuple[Input, ...] = ()
    opaque: list[Opaque] = field(default_factory=list)
    has_blocks: bool = True
    blocks: BlockCalls | None = None

    def __post_init__(self) -> None:
        parameters, buffers, self.aliases = state_names(self.model)
        leaves, _ = call_leaves(self.model.forward, self.args, self.kwargs)
        passed = {name: value for name, value in leaves if isinstance(value, torch.Tensor)}
        by_kind: Any = {"parameter": parameters, "buffer": buffers, "input": passed}
        inputs = [
            Input(name, kind, self._type(kind, name, tensor), tensor.requires_grad)
            for kind, tensors in by_kind.items()
            for name, tensor in tensors.items()
        ]
        self.inputs = (*inputs, Input("random", "random", TensorType((2,), torch.int64)))
        self.values = (*parameters.values(), *buffers.values(), *passed.values(), None)
        tensors = [*passed.values(), *parameters.values(), *buffers.values()]
        self.device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))

    def trace(self) -> fx.GraphModule:
        """The graph of the model. Blocks that are alike are traced once; if that fails, each by itself."""
        try:
            return self._trace_path()
        except Exception:
            if self.blocks is None or not self.blocks.placed:
                raise
        self.has_blocks = False
        return self._trace_path()

    def _trace_path(self) -> fx.GraphModule:
        """The graph of the model's eager path, else of its path for compilers.

        It has no guards if possible; else guards on ops of torch; else also guards on numbers that the model reads.
        """
        for has_guards, reads_numbers in ((False, False), (True, False), (True, True)):
            for is_compiling in (False, True):
                self.guards, self.has_guards = Guards(self.opaque), has_guards
                self.refusals, self.masks = Refusals(reads_numbers), Masks(self.guards, by_index=has_guards)
                with override_attribute(torch.compiler, "_is_compiling_flag", is_compiling):
                    try:
                        return self._trace()
                    except Exception as error:
                        if isinstance(error, DATA_DEPENDENT) or self.refusals.gave_unknown:
                            latest = error
                        elif not is_compiling:  # the path for compilers may fail where it was not meant to be taken
                            raise
        raise latest

    def _trace(self) -> fx.GraphModule:
        shapes = None if self.region is None else self.region.shapes
        # it imports torch._dynamo, which no patch may disturb
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
        self.alike = alike_blocks(self.model) if self.has_blocks and not self.has_guards else []
        fake_log = logging.getLogger("torch._subclasses.fake_tensor")
        with (
            borrow(self.model, self.train),
            preserved(named_arguments(self.model.forward, self.args, self.kwargs)),
            torch.inference_mode(False),
            torch.autograd.set_multithreading_enabled(False),
            torch.autograd.set_detect_anomaly(False),  # there are no numbers yet
            unfused_recurrent_layers(),
            FunctionRewrites(self.masks),
            no_checkpoints(),
            no_outer_checkpoint(),
            higher_order_ops(self.opaque),
            annotating(),
            counting_marks(),
            python_effects(self.model),
            idle_hooks(self.model),
            override_attribute(fake_log, "disabled", True),  # our error says it
            no_seeds(),
            _use_lazy_graph_module(True),  # the graph module never runs, so no code is generated for it
            self.refusals,
            fake_mode,
            enable_python_dispatcher(),
        ):
            fakes = [
                torch.empty(
                    [*map(symbolic_of, put.type.shape)],
                    dtype=put.type.dtype,
                    device=self.device,
                    requires_grad=put.requires_grad,
                )
                for put in self.inputs
            ]
            traced = make_fx(dispatch_functionalize(self.run, FunctionalTensorMode()), decompositions())(*fakes)
            assert self.blocks is not None
            self.blocks.write_out(traced)
            hold_opaques(traced)
            self.masks.check(traced.graph)
            return traced

    def _type(self, kind: str, name: str, tensor: torch.Tensor) -> TensorType:
        """The type of an input, with symbols for the dims that may have other sizes."""
        type_ = TensorType.of(tensor)
        return self.region.type(name, type_) if self.region is not None and kind == "input" else type_

    def run(self, *tensors: torch.Tensor) -> list[torch.Tensor | None]:
        """The traced function; ``TraceSignature`` describes its results."""
        keys = [(str(entry.kind), entry.name) for entry in self.inputs]
        named = dict(zip(keys, tensors, strict=True))
        before = {entry.name: entry.requires_grad for entry in self.inputs if entry.kind == "input"}
        casting = Casting(self.model, self.precision)
        used = casting.enter(named)
        replace_tensors(self.model, _of_kinds(used, "parameter", "buffer"), self.aliases)
        args, kwargs = rebuild_call(self.model.forward, self.args, self.kwargs, _of_kinds(used, "input"))
        objects = CallObjects(named_arguments(self.model.forward, args, kwargs))
        guards = self.guards if self.has_guards else None
        self.tracker = SourceTracker(self.model, self.modules, self.refusals, guards, self.region)
        self.guards.begin(self.values)
        self.blocks = BlockCalls(
            self.model, self.alike, self.tracker, self.masks.check, self.region and self.region.shapes
        )
        self.blocks.stand_in()
        with self.tracker, torch.set_grad_enabled(self.train):
            self.outputs, results, self.output_tree = output_leaves(self.model(*args, **kwargs), objects)
            self.objects, left = objects.after({leaf.path for _, leaf in self.outputs if isinstance(leaf, Returned)})
            for name, leaf in self.outputs:
                if isinstance(leaf, Constant) and isinstance(leaf.value, UnknownNumber):
                    raise Unfit(
                        f"its output {name!r} is a number, which is unknown during capture", "return the tensor"
                    )
            casting.check_unchanged()
            tangents, gradients = self._backward(dict(results), used, casting) if self.train else ([], [])
            for (kind, name), x in named.items():
                if kind == "input" and x.grad_fn is not None and not before[name]:
                    problem = "the forward writes to it what has a gradient"
                    raise CaptureError(f"input {name!r}", problem, "return the new value, or write its detach()")
            after = (current_tensor(self.model, name) if kind == "buffer" else x for (kind, name), x in named.items())
            outputs = [tensor.detach() for _, tensor in (*results, *left)]
            inputs_after = [tensor.detach() for tensor in after]
            return [*outputs, *gradients, *inputs_after, *tangents, *self.guards.results]

    def _backward(
        self, outputs: Mapping[str, torch.Tensor], used: Mapping[tuple[str, str], torch.Tensor], casting: Casting
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
        names = differentiable_names(self.outputs, self.differentiable)
        with self.guards.unknown():
            starts = [outputs[name] for name in names]
            tangents = [torch.empty(start.shape, dtype=start.dtype, device=self.device) for start in starts]
        named_tangents = zip(names, tangents, strict=True)
        self.tangents = tuple(Input(name, "tangent", TensorType.of(tangent)) for name, tangent in named_tangents)
        entries = [entry for entry in self.inputs if entry.requires_grad]
        sources = [used[entry.kind, entry.name] for entry in entries]
        if not names or not sources:
            return tangents, [None] * len(sources)
        self.tracker.phase = "backward"
        with torch.autocast(self.device.type, enabled=False):
            gradients: list[torch.Tensor | None] = [*torch.autograd.grad(starts, sources, tangents, allow_unused=True)]
            for i, entry in enumerate(entries):
                self.tracker.latest = Source(entry.name.rpartition(".")[0], self.tracker.latest.location, "backward")
                gradients[i] = casting.leave(entry, gradients[i])
            return tangents, gradients

    def captured(self, traced: fx.GraphModule) -> Captured:
        """The traced graph as a program with its calling convention."""
        forward, signature = self.model.forward, call_signature(self.model, self.args, self.kwargs, self.train)
        convention = CallingConvention(forward, self.outputs, self.output_tree, signature, {}, self.objects)
        results = [Output(name, "output") for name, _ in convention.tensors]
        if self.train:
            results += [Output(entry.name, "gradient") for entry in self.inputs if entry.requires_grad]
        guards = tuple(Output(name, "guard") for name in self.guards.names)
        trace = TraceSignature(self.inputs, tuple(results), self.tangents, guards)
        program, constants = assemble(traced, trace, self.tracker.sources, plain_tensors(self.model))
        skipped = (f"{place} checks values: no step runs it" for place in self.refusals.passed_over)
        masked = (f"{each} selects by a mask: all rows are computed, those of it count" for each in self.masks.places)
        program = replace(program, notes=(*program.notes, *skipped, *masked))
        convention = replace(convention, constants=constants)
        return Captured(
            program, convention, self.aliases, self.modules, self.differentiable, self.precision, self.region
        )


def _of_kinds(named: Mapping[tuple[str, str], torch.Tensor], *kinds: str) -> dict[str, torch.Tensor]:
    return {name: tensor for (kind, name), tensor in named.items() if kind in kinds}


class SourceTracker(TorchDispatchMode):
    """Records where in the user's model each traced node comes from; a backward node has the source of its forward op.

    If there are ``guards``, an op whose result depends on values gets one. If the user's own line reads the values, it
    gets one only for whole numbers, which may be sizes.

    State: ``modules``, the paths of the running modules; ``by_sequence``, by the sequence number of an autograd node
    the source of the op that made it; ``count``, the number of calls of forward; ``latest``, the source of backward's
    last op; ``outer``, the sequence number of the autograd node in whose backward the trace runs, else -1;
    ``stop``, the code that runs the model.
    """

    supports_higher_order_operators = True

    def __init__(
        self, model: nn.Module, annotations: Mapping[str, Match], refusals: Refusals, guards: Guards | None,
        region: Region | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.refusals, self.guards, self.region = refusals, guards, region
        self.modules: list[str] = []
        self.phase: Phase = "forward"
        self.sources: dict[fx.Node, Source] = {}
        self.by_sequence: dict[int, Source] = {}
        self.latest, self.count, self.outer, self.stop = Source(), 0, _current_sequence(), _Joint.run.__code__
        for path, entry in annotations.items():
            annotate: Any = lambda module, args, output, entry=entry: annotate_output(output, entry)  # noqa: E731
            model.get_submodule(path).register_forward_hook(annotate)
        follow_modules(model, self.modules)

    @contextmanager
    def apart(self, path: str, stop: CodeType) -> Iterator[None]:
        """In the block of code it records a separate trace: of the module at ``path``, which the code ``stop`` runs."""
        before = self.phase, self.latest, self.count, list(self.modules), self.outer, self.stop
        self.phase, self.modules[:], self.outer, self.stop = "forward", [path], _current_sequence(), stop
        try:
            with self:
                yield
        finally:
            self.phase, self.latest, self.count, self.modules[:], self.outer, self.stop = before

    @property
    def place(self) -> Source:
        """The present place in the model."""
        line = user_location(sys._getframe(1), stop=self.stop)
        return Source(self.modules[-1] if self.modules else "", line, marks=marks_passed())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator) and str(func) in REPLACED:
            raise Unfit(f"{func} is called as an op", "call the function of torch of that name, which takes closures")
        if getattr(func, "namespace", "").removeprefix("_").startswith("c10d"):
            raise Unfit(*OWN_COLLECTIVE)
        mode = get_proxy_mode()
        assert mode is not None
        last = last_node(mode.tracer.graph)
        source = self._source()
        if func.namespace == "aten" and not func._schema.returns and not func._schema.is_mutable:
            return None  # it only checks values, which are unknown during capture
        try:
            return func(*args, **(kwargs or {}))
        except DATA_DEPENDENT as error:
            return self._value_at_capture(error, func, args, kwargs or {}, source)
        finally:
            for node in nodes_after(last):
                self.sources[node] = source

    def _value_at_capture(
        self, error: Exception, func: Any, args: Any, kwargs: Mapping[str, Any], source: Source
    ) -> Any:
        """The result of an op that reads values of tensors; raises the error if they are unknown."""
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        if isinstance(error, DataDependentOutputException):
            with _disable_current_modes():
                number = known_number(last_node(tracer.graph), tracer.root)
            if number is not None:
                if self.region is not None:
                    self.region.numbers.append((last_node(tracer.graph), tracer.root, number))
                return number
        is_user_read = self.refusals.is_user_read
        if is_user_read is None:
            is_user_read = isinstance(error, DataDependentOutputException)
        is_number = self.refusals.reads_numbers and is_whole(args[0])
        if self.guards is None or (is_user_read and not is_number):
            raise error
        try:
            return self.guards.add(func, args, kwargs, source.location or "the model")
        except NoValueError as reason:
            raise error from reason

    def _source(self) -> Source:
        sequence = _current_sequence()
        if sequence == self.outer and self.phase == "forward":
            line = user_location(sys._getframe(2), stop=self.stop)
            source = Source(self.modules[-1] if self.modules else "", line, marks=marks_passed(), ordinal=self.count)
            self.count += 1
            self.by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, source)  # type: ignore[attr-defined]
            return source
        if sequence != self.outer and (known := self.by_sequence.get(sequence)):
            self.latest = replace(known, phase=self.phase)
        return self.latest


def _current_sequence() -> int:
    """The sequence number of the autograd node whose backward runs; -1 if none does."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())
