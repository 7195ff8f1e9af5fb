"""A model's own initialisers as a program: the seed in, the value of every parameter and buffer out.

Nothing is allocated, and what a constructor or an initialiser does with numbers, lists and branches just runs.
"""

from __future__ import annotations

import inspect
import math
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

from shardc.capture.assembly import TraceSignature, assemble, traced_types
from shardc.capture.decompositions import TRACED_AS
from shardc.capture.guards import known_number
from shardc.capture.model import borrow, changed, held, plain_tensors, state_names, swap, with_aliases
from shardc.capture.refusals import (
    failing_line,
)
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
    """A model on meta, and the program that makes its values.

    ``program``: one output for every parameter, buffer, and tensor that a module holds as a plain attribute, each by
    its first name. ``constants``: the values of the program's inputs of kind ``buffer``.
    """

    model: nn.Module
    program: Program
    constants: Mapping[str, Tensor]


def record_initializers(
    model: nn.Module | Callable[[], nn.Module], initialize: Initializer | None = None
) -> Initialized:
    """The initialisers of a model that was made on meta, or all that a function does that makes a model.

    Of a model on meta run, children first, every module's ``reset_parameters``, then the model's ``init_weights`` or
    ``_init_weights``, as torch and transformers do; or ``initialize(model)`` alone. What is not on meta keeps its value
    unless an initialiser writes it. ShardingError where the constructor wrote a parameter more often than these do.
    """
    record = Record()
    if isinstance(model, nn.Module):
        outputs = _of_model(record, model, initialize)
    else:
        model, outputs = _of_function(record, model, initialize)
    program, constants = record.program(outputs)
    return Initialized(model, program, constants)


def _of_model(record: Record, model: nn.Module, initialize: Initializer | None) -> dict[str, fx.Node]:
    """Run the initialisers of a model with fake tensors in place of its own; the recorded node of every tensor."""
    parameters, buffers, aliases = state_names(model)
    plain = {name: tensor for name, tensor in _plain(model).items() if tensor.is_meta}
    with borrow(model, train=False), record.recording():
        fakes = {name: _fake(tensor) for name, tensor in (*parameters.items(), *buffers.items())}
        swap(model, fakes, aliases)
        before = {name: fakes[name]._version for name in parameters}
        for module in model.modules():
            vars(module).pop("_is_hf_initialized", None)  # transformers' note that this is done
        with torch.no_grad():
            (initialize or _own_initializers)(model)
        writes = {name: held(model, name)._version - before[name] for name in parameters}
        outputs = {name: record.node(held(model, name)) for name in fakes}
        outputs |= {name: record.node(_fake(tensor)) for name, tensor in plain.items()}
    if initialize is None:
        _check_writes(parameters, writes)
    return outputs


def _of_function(
    record: Record, make: Callable[[], nn.Module], initialize: Initializer | None
) -> tuple[nn.Module, dict[str, fx.Node]]:
    """Run a constructor on fake tensors; the model, now on meta, and the recorded node of every tensor."""
    with record.recording():
        model = make()
        check_model(model)
        if initialize is not None:
            initialize(model)
    parameters, buffers, _ = state_names(model)
    plain = _plain(model)
    outputs = {name: record.node(tensor) for name, tensor in {**parameters, **buffers, **plain}.items()}
    set_tensors(model, {name: _on_meta(tensor) for name, tensor in {**parameters, **buffers, **plain}.items()})
    return model, outputs


def set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give modules parameters, buffers and plain attributes, by path; those tied to them are the same tensor.

    As attributes, so that a module which keeps a list of its parameters (nn.LSTM) hears of it.
    """
    _, _, aliases = state_names(model)
    for name, tensor in with_aliases(tensors, aliases):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, tensor)


def _plain(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that modules hold as plain attributes, by path."""
    tensors = {id(value): value for module in model.modules() for value in vars(module).values()}
    return {name: tensors[found] for found, name in plain_tensors(model).items()}


def _fake(tensor: Tensor) -> Tensor:
    """A tensor like one of a model's: of no value yet where that is on meta, else of its value."""
    like = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().clone()
    return nn.Parameter(like, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


def _on_meta(tensor: Tensor) -> Tensor:
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(like, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


def _own_initializers(model: nn.Module) -> None:
    for module in reversed(list(model.modules())):
        reset = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
        if reset is not None:
            reset()
    _init_weights(model)


def _init_weights(module: nn.Module) -> None:
    """Call a module's method of that name, or apply it where it takes a module; else those of its children."""
    found = next((getattr(module, name) for name in INITS if callable(getattr(module, name, None))), None)
    if found is None:
        for child in module.children():
            _init_weights(child)
    elif _needs_argument(found):
        module.apply(found)
    else:
        found()


def _needs_argument(method: Callable[..., Any]) -> bool:
    given = inspect.signature(method).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in given)


def _check_writes(parameters: Mapping[str, nn.Parameter], writes: Mapping[str, int]) -> None:
    lost = [name for name, parameter in parameters.items() if parameter.is_meta and parameter._version > writes[name]]
    if lost:
        raise ShardingError(
            f"parameter {lost[0]!r}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else ""),
            f"written {parameters[lost[0]]._version} times when the model was made",
            f"the initialisers of its modules write it {writes[lost[0]]} times: what else was written on meta is lost",
            "give the function that makes the model, init_parameters(lambda: Model(config), ...), or say initialize=",
        )


Place = tuple[Any, ...]  # where a tensor lies: its memory first, then where in it


class Record:
    """The ops of a block, in order.

    State: ``nodes``, the latest node of a tensor, by where it lies: tensors of one memory, shape and strides are one;
    ``memory`` of each node; ``writes``, the nodes that wrote to each memory; ``constants``, the real tensors that came
    in. Every memory that was seen is kept, so that none is used twice.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[Place, fx.Node] = {}
        self.memory: dict[fx.Node, Any] = {}
        self.writes: dict[Any, set[fx.Node]] = {}
        self.constants: dict[str, Tensor] = {}
        self._kept: list[torch.UntypedStorage] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In the block every op runs on fake tensors and is recorded."""
        with (
            warnings.catch_warnings(),
            changed(nn.init, "_no_grad_trunc_normal_", _trunc_normal),
            changed(nn.Module, "_apply", _converted({})),
            FakeTensorMode(allow_non_fake_inputs=True),
            _Recorder(self),
        ):
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy does
            try:
                yield
            except DataDependentOutputException as error:
                raise CaptureError(
                    failing_line(error),
                    "what an initialiser does next depends on numbers that it drew",
                    "draw without rejection, or draw into a tensor of its own with a fixed generator and copy it",
                ) from error

    def node(self, tensor: Tensor) -> fx.Node:
        """The node that stands for a tensor now; a tensor from outside is a constant."""
        if _place(tensor) not in self.nodes:
            name = f"constant_{len(self.constants)}"
            with _disable_current_modes():
                self.constants[name] = tensor.detach().clone()
            self._note(tensor, self.graph.get_attr(name))
        return self.nodes[_place(tensor)]

    def add(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a call and what it returned."""
        node = self._call(op, args, kwargs)
        for i, argument in enumerate(op._schema.arguments):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            if is_write and isinstance(written, Tensor):
                self.writes.setdefault(_place(written)[0], set()).add(node)
        if isinstance(result, Tensor):
            self._note(result, node)
            return
        for i, each in enumerate(result):
            if isinstance(each, Tensor):
                self._note(each, self.graph.call_function(_item, (node, i)))

    def number(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What an op says of the value of a tensor, or None where that depends on chance."""
        node = self._call(op, args, kwargs)
        needed = ancestors(node)
        is_settled = not any(self.writes.get(self.memory.get(each), needed) - needed for each in needed)
        with _disable_current_modes():
            root: Any = SimpleNamespace(**self.constants)
            number = known_number(node, root) if is_settled else None
        self.graph.erase_node(node)
        return number

    def program(self, outputs: Mapping[str, fx.Node]) -> tuple[Program, dict[str, Tensor]]:
        """The values of these nodes at the end of the block, as a program of pure ops, and its constants by name."""

        def replay(random: Tensor) -> list[Tensor]:
            values = self._replay()
            return [*(values[node] for node in outputs.values()), random.detach()]

        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            random = torch.empty(2, dtype=torch.int64)
            traced = make_fx(dispatch_functionalize(replay, FunctionalTensorMode()), TRACED_AS)(random)
        ends = TraceSignature(
            (Input("random", "random", TensorType((2,), torch.int64)),),
            tuple(Output(name, "output") for name in outputs),
            (),
        )
        return assemble(traced, ends, traced_types(traced), {}, {})

    def _replay(self) -> dict[fx.Node, Any]:
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "get_attr":
                values[node] = self.constants[str(node.target)].clone()
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        return values

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        def argument(value: Any) -> Any:
            return self.node(value) if isinstance(value, Tensor) else value

        given: Any = map_aggregate((args, dict(kwargs)), argument)
        return self.graph.call_function(op, *given)

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        place = _place(tensor)
        self.nodes[place], self.memory[node] = node, place[0]
        self._kept.append(tensor.untyped_storage())


class _Recorder(TorchDispatchMode):
    """Gives every op that runs to a record."""

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
    """Normal numbers within bounds, by inversion: torch rejects those outside, in a loop that has no graph."""
    bounds = [math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (low, high)]
    is_narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    with torch.no_grad():
        drawn = torch.empty_like(tensor, dtype=torch.float32) if is_narrow else tensor
        drawn.uniform_(*bounds, generator=generator).erfinv_()
        drawn.mul_(std * math.sqrt(2.0)).add_(mean).clamp_(low, high)
        return tensor.copy_(drawn) if is_narrow else tensor


def _converted(memo: dict[int, tuple[Tensor, Any, Tensor]]) -> Callable[..., nn.Module]:
    """``nn.Module._apply``, which torch has not for fake parameters: tied ones are converted once.

    ``memo``: for the id of a tensor itself, the function that converted it, and what it became.
    """

    def convert(fn: Any, tensor: Tensor) -> Tensor:
        known = memo.get(id(tensor))
        if known is None or known[1] is not fn:
            with torch.no_grad():
                new = fn(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            known = memo[id(tensor)] = (tensor, fn, new)
        return known[2]

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for tensors in (self._parameters, self._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = convert(fn, tensor)  # type: ignore[assignment]
        return self

    return apply


def _place(tensor: Tensor) -> Place:
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _item(several: Any, index: int) -> Any:
    return several[index]
