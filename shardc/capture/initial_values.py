"""A model's own initialisers as a program that takes a seed and returns every parameter and buffer.

The initialisers run on fake tensors, which allocate nothing; numbers, lists and branches in them run as usual.
"""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardc.capture.assembly import TraceSignature, assemble
from shardc.capture.decompositions import TRACED_AS
from shardc.capture.model import (
    borrow,
    current_tensor,
    override_attribute,
    plain_tensors,
    replace_tensors,
    state_names,
    with_aliases,
)
from shardc.capture.values.refusals import failing_line, known_number
from shardc.language.errors import CaptureError, ShardingError
from shardc.language.sharding import TensorType
from shardc.options import check_model
from shardc.program.node import ancestors
from shardc.program.program import Input, Output, Program

Initializer = Callable[[nn.Module], Any]
RESETS = ("reset_parameters", "_reset_parameters")
INITS = ("init_weights", "initialize_weights", "_init_weights", "_initialize_weights")


@dataclass(frozen=True, slots=True)
class Initialized:
    """A model on meta, and the program that computes its values.

    ``program``: one output for every parameter, buffer, and tensor that a module holds as a plain attribute, each by
    its first name. ``constants``: the values of the program's inputs of kind ``buffer``.
    """

    model: nn.Module
    program: Program
    constants: Mapping[str, Tensor]


def record_initializers(
    model: nn.Module | Callable[[], nn.Module], initialize: Initializer | None = None
) -> Initialized:
    """Record the initialisers of a model that was made on meta, or a function that makes a model.

    For a model on meta, every module's ``reset_parameters`` runs, children first, then the model's ``init_weights`` or
    ``_init_weights``, as in torch and transformers; or ``initialize(model)`` alone. A tensor that is not on meta keeps
    its value unless an initialiser writes it. Raises a ShardingError where the constructor wrote a parameter more often
    than these initialisers do.
    """
    record = Record()
    if isinstance(model, nn.Module):
        outputs = _of_model(record, model, initialize)
    else:
        with record.recording():
            model = model()
            check_model(model)
            if initialize is not None:
                initialize(model)
        parameters, buffers, _ = state_names(model)
        tensors = {**parameters, **buffers, **plain_tensors(model)}
        outputs = {name: record.node(tensor) for name, tensor in tensors.items()}
        set_tensors(model, {name: _like(tensor, "meta") for name, tensor in tensors.items()})
    program, constants = record.program(outputs)
    return Initialized(model, program, constants)


def _of_model(record: Record, model: nn.Module, initialize: Initializer | None) -> dict[str, fx.Node]:
    """Run the initialisers of a model with fake tensors in place of its own; returns the node of every tensor."""
    parameters, buffers, aliases = state_names(model)
    plain = {name: tensor for name, tensor in plain_tensors(model).items() if tensor.is_meta}
    with borrow(model, train=False), record.recording():
        fakes = {name: _fake(tensor) for name, tensor in (*parameters.items(), *buffers.items())}
        replace_tensors(model, fakes, aliases)
        before = {name: fakes[name]._version for name in parameters}
        for module in model.modules():
            vars(module).pop("_is_hf_initialized", None)  # transformers' note that this is done
        with torch.no_grad():
            (initialize or _run_own_initializers)(model)
        writes = {name: current_tensor(model, name)._version - before[name] for name in parameters}
        outputs = {name: record.node(current_tensor(model, name)) for name in fakes}
        outputs |= {name: record.node(_fake(tensor)) for name, tensor in plain.items()}
    lost = [name for name, parameter in parameters.items() if parameter.is_meta and parameter._version > writes[name]]
    if lost and initialize is None:
        who = f"parameter {lost[0]!r}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
        what = f"written {parameters[lost[0]]._version} times when the model was made"
        count = writes[lost[0]]
        problem = f"the initialisers of its modules write it {count} times: what else was written on meta is lost"
        remedy = (
            "give the function that makes the model, init_parameters(lambda: Model(config), ...), or say initialize="
        )
        raise ShardingError(who, what, problem, remedy)
    return outputs


def set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set parameters, buffers and plain attributes of modules, by path; the names tied to one get the same tensor.

    They are set as attributes, since a module may keep a list of its parameters (``nn.LSTM``) and update it then.
    """
    _, _, aliases = state_names(model)
    for name, tensor in with_aliases(tensors, aliases):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, tensor)


def _fake(tensor: Tensor) -> Tensor:
    """A fake tensor like one of the model: empty if that is on meta, else with its values."""
    return _like(tensor, "cpu") if tensor.is_meta else _as_parameter(tensor.detach().clone(), tensor)


def _like(tensor: Tensor, device: str) -> Tensor:
    return _as_parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device=device), tensor)


def _as_parameter(new: Tensor, tensor: Tensor) -> Tensor:
    """``new`` as a parameter if ``tensor`` is one."""
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _run_own_initializers(model: nn.Module) -> None:
    for module in reversed(list(model.modules())):
        if reset := next((getattr(module, name) for name in RESETS if hasattr(module, name)), None):
            reset()
    _init_weights(model)


def _init_weights(module: nn.Module) -> None:
    """Call a module's method in ``INITS``, or apply it to all submodules if it takes a module.

    Without such a method do the same for the module's children.
    """
    method = next((getattr(module, name) for name in INITS if callable(getattr(module, name, None))), None)
    if method is None:
        for child in module.children():
            _init_weights(child)
        return
    parameters = inspect.signature(method).parameters.values()
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        module.apply(method)
    else:
        method()


View = tuple[Any, ...]  # a memory, then offset, shape, strides and dtype in it


class Record:
    """The ops of a block, in order.

    State: ``nodes``, the latest node of each view: tensors that are the same view of the same memory have one node;
    ``memory``, that of each node; ``writes``, the nodes that wrote to each memory; ``constants``, the real tensors that
    came in from outside. ``_alive`` keeps every memory, so that torch gives no address twice.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[View, fx.Node] = {}
        self.memory: dict[fx.Node, Any] = {}
        self.writes: dict[Any, set[fx.Node]] = {}
        self.constants: dict[str, Tensor] = {}
        self._alive: list[torch.UntypedStorage] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run every op of the block on fake tensors and record it."""
        with (
            warnings.catch_warnings(),
            override_attribute(nn.init, "_no_grad_trunc_normal_", _trunc_normal),
            override_attribute(nn.Module, "_apply", _apply_to_fakes()),
            FakeTensorMode(allow_non_fake_inputs=True),
            _Recorder(self),
        ):
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy does
            try:
                yield
            except DataDependentOutputException as error:
                problem = "what an initialiser does next depends on numbers that it drew"
                remedy = "draw without rejection, or draw into a tensor of its own with a fixed generator and copy it"
                raise CaptureError(failing_line(error), problem, remedy) from error

    def node(self, tensor: Tensor) -> fx.Node:
        """The latest node of a tensor; a tensor from outside is a constant."""
        if _view(tensor) not in self.nodes:
            name = f"constant_{len(self.constants)}"
            with _disable_current_modes():
                self.constants[name] = tensor.detach().clone()
            self._note(tensor, self.graph.get_attr(name))
        return self.nodes[_view(tensor)]

    def add(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a call and its results."""
        node = self._call(op, args, kwargs)
        for i, argument in enumerate(op._schema.arguments):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            if is_write and isinstance(written, Tensor):
                self.writes.setdefault(_view(written)[0], set()).add(node)
        if isinstance(result, Tensor):
            self._note(result, node)
            return
        for i, tensor in enumerate(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, self.graph.call_function(operator.getitem, (node, i)))

    def number(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The number that an op reads from a tensor, or None if it depends on random numbers or later writes."""
        node = self._call(op, args, kwargs)
        needed = ancestors(node)
        is_final = not any(self.writes.get(self.memory.get(operand), needed) - needed for operand in needed)
        with _disable_current_modes():
            root: Any = SimpleNamespace(**self.constants)
            number = known_number(node, root) if is_final else None
        self.graph.erase_node(node)
        return number

    def program(self, outputs: Mapping[str, fx.Node]) -> tuple[Program, dict[str, Tensor]]:
        """A program of pure ops that returns the values of these nodes, and its constants by name."""

        def replay(random: Tensor) -> list[Tensor]:
            values: dict[fx.Node, Any] = {}
            for node in self.graph.nodes:
                if node.op == "get_attr":
                    values[node] = torch.ops.aten.lift_fresh_copy(self.constants[str(node.target)])
                else:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.target(*args, **kwargs)
            return [*(values[node] for node in outputs.values()), random.detach()]

        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            random = torch.empty(2, dtype=torch.int64)
            traced = make_fx(dispatch_functionalize(replay, FunctionalTensorMode()), TRACED_AS)(random)
        seed = Input("random", "random", TensorType((2,), torch.int64))
        signature = TraceSignature((seed,), tuple(Output(name, "output") for name in outputs))
        return assemble(traced, signature, {}, {})

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        node_or_value: Any = lambda value: self.node(value) if isinstance(value, Tensor) else value  # noqa: E731
        node_args: Any = map_aggregate((args, dict(kwargs)), node_or_value)
        return self.graph.call_function(op, *node_args)

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        view = _view(tensor)
        self.nodes[view], self.memory[node] = node, view[0]
        self._alive.append(tensor.untyped_storage())


class _Recorder(TorchDispatchMode):
    """Adds every op that runs to a record."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            number = self.record.number(func, args, kwargs)
            if number is None:
                raise
            return number
        if isinstance(result, (Tensor, list, tuple)):
            self.record.add(func, args, kwargs, result)
        return result


def _trunc_normal(
    tensor: Tensor, mean: float, std: float, low: float, high: float, generator: torch.Generator | None = None
) -> Tensor:
    """Truncated normal numbers by inversion: torch rejects those out of bounds in a loop, which no graph can hold."""
    bounds = [math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (low, high)]
    is_narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    with torch.no_grad():
        drawn = torch.empty_like(tensor, dtype=torch.float32) if is_narrow else tensor
        drawn.uniform_(*bounds, generator=generator).erfinv_()
        drawn.mul_(std * math.sqrt(2.0)).add_(mean).clamp_(low, high)
        return tensor.copy_(drawn) if is_narrow else tensor


def _apply_to_fakes() -> Callable[..., nn.Module]:
    """An ``nn.Module._apply`` for fake parameters, which torch's own cannot replace; converts tied ones once."""
    conversions: dict[int, tuple[Tensor, Any, Tensor]] = {}  # by id a tensor, the function on it, and the result

    def convert(fn: Any, tensor: Tensor) -> Tensor:
        if id(tensor) not in conversions or conversions[id(tensor)][1] is not fn:
            with torch.no_grad():
                conversions[id(tensor)] = (tensor, fn, _as_parameter(fn(tensor), tensor))
        return conversions[id(tensor)][2]

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for tensors in (self._parameters, self._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = convert(fn, tensor)  # type: ignore[assignment]
        return self

    return apply


def _view(tensor: Tensor) -> View:
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
