"""A record of all the ops that run in a block: on fake tensors, in-place ones as they are, then traced as pure ops."""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardc.capture.annotations import Match, annotate_output
from shardc.capture.decompositions import TRACED_AS, known_number
from shardc.capture.guards import DATA_DEPENDENT, OWN_COLLECTIVE, Guards, NoValueError, Refusals, Unfit
from shardc.capture.higher_order import REPLACED
from shardc.capture.joint import Ends, assemble, traced_types
from shardc.capture.location import failing_line, user_location
from shardc.capture.microbatches import marks_passed
from shardc.capture.model import changed, follow_modules
from shardc.language.errors import CaptureError
from shardc.language.sharding import TensorType
from shardc.program.node import ancestors
from shardc.program.program import Input, Output, Program
from shardc.program.provenance import Phase, Source

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
        ends = Ends(
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
        for held in (self._parameters, self._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = convert(fn, tensor)  # type: ignore[assignment]
        return self

    return apply


def _place(tensor: Tensor) -> Place:
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _item(several: Any, index: int) -> Any:
    return several[index]


class Watch(TorchDispatchMode):
    """Notes where in the user's model each traced node comes from; a backward node comes from its forward's place.

    What an op finds in values is guarded, unless the user's own line asks for it or there are no ``guards``.

    State: ``modules``, the paths of the running modules; ``by_sequence``, the source of the op that made the autograd
    node of that number; ``count`` of the calls of forward.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        annotations: Mapping[str, Match],
        stop: CodeType,
        refusals: Refusals,
        guards: Guards | None,
    ) -> None:
        super().__init__()
        self.stop, self.refusals, self.guards = stop, refusals, guards
        self.modules: list[str] = []
        self.phase: Phase = "forward"
        self.sources: dict[fx.Node, Source] = {}
        self.by_sequence: dict[int, Source] = {}
        self.latest, self.count = Source(), 0
        for path, entry in annotations.items():
            model.get_submodule(path).register_forward_hook(partial(_annotate_hook, entry))
        follow_modules(model, self.modules)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator) and str(func) in REPLACED:
            raise Unfit(f"{func} is called as an op", "call the function of torch of that name, which takes closures")
        if getattr(func, "namespace", "").removeprefix("_").startswith("c10d"):
            raise Unfit(*OWN_COLLECTIVE)
        mode = get_proxy_mode()
        assert mode is not None
        last = next(reversed(mode.tracer.graph.nodes))
        source = self._source()
        if _only_checks(func):
            return None
        try:
            return func(*args, **(kwargs or {}))
        except DATA_DEPENDENT as error:
            return self._found(error, func, args, kwargs or {}, source)
        finally:
            while (last := last.next).op != "root":
                self.sources[last] = source

    def _found(self, error: Exception, func: Any, args: Any, kwargs: Mapping[str, Any], source: Source) -> Any:
        """What an op finds in the values of tensors; the error where they are not known."""
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        if isinstance(error, DataDependentOutputException):
            with _disable_current_modes():
                number = known_number(next(reversed(tracer.graph.nodes)), tracer.root)
            if number is not None:
                return number
        if self.guards is None or self.refusals.is_users(isinstance(error, DataDependentOutputException)):
            raise error
        try:
            return self.guards.guarded(func, args, kwargs, source.location or "the model")
        except NoValueError as reason:
            raise error from reason

    def _source(self) -> Source:
        autograd_node = torch._C._current_autograd_node()
        if autograd_node is None and self.phase == "forward":
            line = user_location(sys._getframe(2), stop=self.stop)
            found = Source(self.modules[-1] if self.modules else "", line, marks=marks_passed(), ordinal=self.count)
            self.count += 1
            self.by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, found)
            return found
        if autograd_node is not None and (known := self.by_sequence.get(autograd_node._sequence_nr())):
            self.latest = replace(known, phase=self.phase)
        return self.latest


def _only_checks(func: Any) -> bool:
    """Whether an op of torch's own raises an error or does nothing: it looks at values, and capture has none."""
    return func.namespace == "aten" and not func._schema.returns and not func._schema.is_mutable


def _annotate_hook(entry: Match, module: nn.Module, args: Any, output: Any) -> Any:
    return annotate_output(output, entry)


NEVER = 2**31 - 1


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Without looks at the oldest objects, which come again at the end."""
    thresholds = gc.get_threshold()
    if thresholds[2] == NEVER:  # another's, who puts it back
        yield
        return
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
