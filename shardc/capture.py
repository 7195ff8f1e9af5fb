"""Capture: a model and example inputs in, the joint graph of its forward and backward out, with nothing allocated.

One trace does it all: ``make_fx`` over the user's own module with fake, functionalized tensors and ``autograd.grad``
inside. Measured on GPT-2 of transformers, 12 layers (T 1024, B 16): 1.6 s and 2200 nodes, against 3.0 s for
``torch.export`` followed by ``make_fx``, which leaves in-place ops behind, and 2.7 s for ``torch.export`` followed by
``aot_export_joint_with_descriptors``, of nearly the same graph.

The eager path of the model is captured where it can be. Where it branches on the values of tensors, the path that it
offers to compilers (``torch.compiler.is_compiling()``) is tried.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardc.annotations import annotate_output, annotating
from shardc.borrow import borrowed, changed, follow_modules, held, no_checkpoints, plain_tensors, state_names, swap
from shardc.constant import known_number
from shardc.convention import (
    CallingConvention,
    Leaves,
    TensorLeaf,
    call_leaves,
    call_signature,
    differentiable_names,
    leaf_of,
    output_leaves,
    rebuild_call,
)
from shardc.decomposition import decompositions, resampling_whole
from shardc.error import CaptureError
from shardc.higher_order import REPLACED, higher_order_ops
from shardc.joint import Ends, assemble
from shardc.location import user_location
from shardc.opaque import Opaque, hold_opaques
from shardc.partition import P
from shardc.program import Input, Output, Phase, Program, Source, types_of
from shardc.refusal import Refusals, Unfit, capture_error, python_effects
from shardc.sharding import TensorType
from shardc.traced import PlainDropout, plain_cells
from shardc.tree import Tree

__all__ = ["CallingConvention", "CaptureError", "Captured", "capture"]

InputKind = Literal["parameter", "buffer", "input"]
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured program and how it is called.

    ``aliases``: for every further name of a tied parameter or buffer its first, which is the one in the program.
    """

    program: Program
    convention: CallingConvention
    aliases: Mapping[str, str]


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    train: bool = True,
    modules: Mapping[str, P] | None = None,
    differentiable: tuple[str, ...] = (),
) -> Captured:
    """Capture ``model(*args, **kwargs)``: only shapes and dtypes of tensors are read, parameters may be on meta.

    ``train`` adds the backward; it starts from the field ``loss`` of the output, else from its 0-dim tensors, else
    from all of them; further outputs by name in ``differentiable``. ``modules``: annotations of modules' outputs, by
    path. Raises a CaptureError that names the user's line where the model has no graph.
    """
    joint = _Joint(model, args, kwargs, train, modules or {}, differentiable)
    try:
        traced = joint.trace()
    except CaptureError:
        raise
    except (RuntimeError, TypeError, ArithmeticError) as error:
        raise capture_error(error) from error
    return joint.captured(traced)


class _Joint:
    """The forward and backward of a call as one function of flat tensors: ``inputs`` in order.

    State: what ``run`` learns of the output while it is traced: ``outputs``, ``output_tree``, ``tangents``; and
    ``watch``, which knows where each traced node comes from.
    """

    outputs: Leaves
    output_tree: Tree
    tangents: tuple[Input, ...]
    watch: _Watch
    opaque: list[Opaque]

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        train: bool,
        modules: Mapping[str, P],
        differentiable: tuple[str, ...],
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.train, self.modules, self.differentiable = train, modules, differentiable
        self.tangents, self.opaque = (), []
        self.parameters, self.buffers, self.aliases = state_names(model)
        leaves, _ = call_leaves(model.forward, args, kwargs)
        self.passed = {name: value for name, value in leaves if isinstance(value, torch.Tensor)}
        self.inputs = (
            *_inputs("parameter", self.parameters),
            *_inputs("buffer", self.buffers),
            *_inputs("input", self.passed),
            Input("random", "random", TensorType((2,), torch.int64)),
        )
        tensors = [*self.passed.values(), *self.parameters.values(), *self.buffers.values()]
        self.device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))

    def trace(self) -> fx.GraphModule:
        """The graph of the model's eager path, or of the path that it offers to compilers."""
        try:
            return self._trace()
        except _DATA_DEPENDENT:
            with changed(torch.compiler, "_is_compiling_flag", True):
                return self._trace()

    def _trace(self) -> fx.GraphModule:
        with contextlib.ExitStack() as stack:
            stack.enter_context(borrowed(self.model, self.train))
            for context in (
                torch.inference_mode(False),
                torch.autograd.set_multithreading_enabled(False),
                plain_cells(),
                PlainDropout(),
                no_checkpoints(),
                higher_order_ops(self.opaque),
                annotating(),
                resampling_whole(),
                python_effects(self.model),
                Refusals(),
                FakeTensorMode(allow_non_fake_inputs=True),
            ):
                stack.enter_context(context)
            stack.enter_context(enable_python_dispatcher())  # works from when it is made, so it is made last
            fakes = [
                torch.empty(
                    entry.type.shape, dtype=entry.type.dtype, device=self.device, requires_grad=entry.requires_grad
                )
                for entry in self.inputs
            ]
            traced = make_fx(dispatch_functionalize(self.run, FunctionalTensorMode()), decompositions())(*fakes)
            hold_opaques(traced)
            return traced

    def run(self, *tensors: torch.Tensor) -> list[torch.Tensor | None]:
        """The traced function; what it returns is said in ``Ends``."""
        keys = [(str(entry.kind), entry.name) for entry in self.inputs]
        named = dict(zip(keys, tensors, strict=True))
        swap(self.model, _of_kinds(named, "parameter", "buffer"), self.aliases)
        args, kwargs = rebuild_call(self.model.forward, self.args, self.kwargs, _of_kinds(named, "input"))
        self.watch = _Watch(self.model, self.modules)
        with self.watch, torch.set_grad_enabled(self.train):
            self.outputs, found, self.output_tree = output_leaves(self.model(*args, **kwargs))
            tangents, gradients = self._backward(dict(found), named) if self.train else ([], [])
            after = [held(self.model, name) if kind == "buffer" else tensor for (kind, name), tensor in named.items()]
            return [*(tensor.detach() for _, tensor in found), *gradients, *(t.detach() for t in after), *tangents]

    def _backward(
        self, outputs: Mapping[str, torch.Tensor], named: Mapping[tuple[str, str], torch.Tensor]
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
        names = differentiable_names(self.outputs, self.differentiable)
        tangents = [torch.empty(outputs[name].shape, dtype=outputs[name].dtype, device=self.device) for name in names]
        self.tangents = tuple(
            Input(name, "tangent", TensorType(tuple(tangent.shape), tangent.dtype))
            for name, tangent in zip(names, tangents, strict=True)
        )
        pairs = zip(self.inputs, named.values(), strict=True)
        sources = [tensor for entry, tensor in pairs if entry.requires_grad]
        if not names or not sources:
            return tangents, [None] * len(sources)
        self.watch.phase = "backward"
        with torch.autocast(self.device.type, enabled=False):
            return tangents, torch.autograd.grad(
                [outputs[name] for name in names], sources, tangents, allow_unused=True
            )

    def captured(self, traced: fx.GraphModule) -> Captured:
        """The traced graph as a program with its calling convention."""
        results = [Output(name, "output") for name, leaf in self.outputs if isinstance(leaf, TensorLeaf)]
        if self.train:
            results += [Output(entry.name, "gradient") for entry in self.inputs if entry.requires_grad]
        ends = Ends(self.inputs, tuple(results), self.tangents)
        types = {node: types_of(node.meta.get("val")) for node in traced.graph.nodes}
        program, constants = assemble(traced, ends, types, self.watch.sources, plain_tensors(self.model))
        leaves, _ = call_leaves(self.model.forward, self.args, self.kwargs)
        signature = call_signature(self.model, self.args, self.kwargs, self.train)
        inputs = tuple((name, leaf_of(value)) for name, value in leaves)
        convention = CallingConvention(self.model.forward, inputs, self.outputs, self.output_tree, signature, constants)
        return Captured(program, convention, self.aliases)


class _Watch(TorchDispatchMode):
    """Notes where in the user's model each traced node comes from; a backward node comes from its forward's place.

    State: ``modules``, the paths of the running modules; ``by_sequence``, the source of the op that made the autograd
    node of that number.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, annotations: Mapping[str, P]) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.phase: Phase = "forward"
        self.sources: dict[fx.Node, Source] = {}
        self.by_sequence: dict[int, Source] = {}
        self.latest = Source()
        for path, spec in annotations.items():
            model.get_submodule(path).register_forward_hook(partial(_annotate_hook, spec))
        follow_modules(model, self.modules)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator) and str(func) in REPLACED:
            raise Unfit(f"{func} is called as an op", "call the function of torch of that name, which takes closures")
        mode = get_proxy_mode()
        assert mode is not None
        last = next(reversed(mode.tracer.graph.nodes))
        source = self._source()
        if _only_checks(func):
            return None
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            tracer: Any = mode.tracer
            with _disable_current_modes():
                number = known_number(next(reversed(tracer.graph.nodes)), tracer.root)
            if number is None:
                raise
            return number
        finally:
            while (last := last.next).op != "root":
                self.sources[last] = source

    def _source(self) -> Source:
        autograd_node = torch._C._current_autograd_node()
        if autograd_node is None and self.phase == "forward":
            line = user_location(sys._getframe(2), stop=_Joint.run.__code__)
            found = Source(self.modules[-1] if self.modules else "", line)
            self.by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, found)
            return found
        if autograd_node is not None and (known := self.by_sequence.get(autograd_node._sequence_nr())):
            self.latest = replace(known, phase=self.phase)
        return self.latest


def _only_checks(func: Any) -> bool:
    """Whether an op of torch's own raises an error or does nothing: it looks at values, and capture has none."""
    return func.namespace == "aten" and not func._schema.returns and not func._schema.is_mutable


def _annotate_hook(spec: P, module: nn.Module, args: Any, output: Any) -> Any:
    return annotate_output(output, spec)


def _inputs(kind: InputKind, tensors: Mapping[str, torch.Tensor]) -> list[Input]:
    return [
        Input(name, kind, TensorType(tuple(tensor.shape), tensor.dtype), tensor.requires_grad)
        for name, tensor in tensors.items()
    ]


def _of_kinds(named: Mapping[tuple[str, str], torch.Tensor], *kinds: str) -> dict[str, torch.Tensor]:
    return {name: tensor for (kind, name), tensor in named.items() if kind in kinds}
