"""The bodies of a higher-order op: functions of the user's, traced apart, with what they close over as operands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardc.error import CaptureError
from shardc.location import user_location
from shardc.node import takes_device
from shardc.opaque import hold_opaques
from shardc.sharding import TensorType


@dataclass(frozen=True)
class TracedBody:
    """A body as graphs: flat operands to flat results; operands and gradients of floating results to those of operands.

    ``types`` are those of its results.
    """

    forward_graph: fx.GraphModule
    vjp_graph: fx.GraphModule
    types: tuple[TensorType, ...]

    def forward(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results, of tensors on any device."""
        return _interpret(self.forward_graph, operands)

    def vjp(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradient of every floating operand, zeros where there is none."""
        return _interpret(self.vjp_graph, given)


@dataclass
class Bodies:
    """What the bodies of one higher-order op close over: outer tensors, which become operands of all of them.

    ``tensors`` grows while bodies are met; only then are they traced.
    """

    name: str
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def outside(self) -> list[Tensor]:
        """The tensors as the place of the op sees them: inside a body of another op they are operands of that."""
        return [torch.ops.aten.alias(tensor) for tensor in self.tensors]

    def body(self, fn: Callable[..., Any], operands: Sequence[Tensor]) -> Body:
        """The body, run once to see what it reads and how its result nests."""
        found = Body(self, fn, operands)
        with _apart() as mode:
            result = found.run(list(map(_standin, operands)), _Outer(mode, self.tensors))
            leaves, found.tree = pytree.tree_flatten(result)
            if not all(isinstance(leaf, Tensor) for leaf in leaves):
                self.refuse("a function given to it returns what is no tensor", "return tensors alone")
            found.types = tuple(map(TensorType.of, leaves))
        return found

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raise a CaptureError that names the user's line."""
        where = user_location(sys._getframe(1)) or "the model"
        raise CaptureError(f"{where}: {self.name}", problem, remedy)


class Body:
    """A function that is given to a higher-order op."""

    tree: Any
    types: tuple[TensorType, ...]
    mode: FakeTensorMode

    def __init__(self, captured: Bodies, fn: Callable[..., Any], operands: Sequence[Tensor]) -> None:
        self.captured, self.fn, self.operands = captured, fn, operands

    def run(self, operands: Sequence[Any], outer: _Outer) -> Any:
        """The function's own result."""
        with outer:
            return self.fn(*operands)

    def traced(self) -> TracedBody:
        """Its graphs, over the operands and then what all bodies close over."""
        given = [*self.operands, *self.captured.tensors]
        with _apart() as self.mode:
            fakes = list(map(_standin, given))
            tangents = [torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in floating(self.types)]
            forward = _graph(self._forward, fakes)
            self._check(forward, len(given))
            vjp = _graph(self._vjp, [*fakes, *tangents])
        forward.graph.eliminate_dead_code()
        return TracedBody(forward, vjp, self.types)

    @property
    def _device(self) -> torch.device:
        return [*self.operands, *self.captured.tensors][0].device

    def _call(self, given: Sequence[Tensor]) -> list[Tensor]:
        size = len(self.operands)
        inner = {id(outer): tensor for outer, tensor in zip(self.captured.tensors, given[size:], strict=True)}
        result = self.run(list(given[:size]), _Outer(self.mode, [], inner))
        return pytree.tree_leaves(result)

    def _forward(self, *given: Tensor) -> list[Tensor]:
        """The results, then the operands as they are at the end."""
        return [*self._call(given), *given]

    def _vjp(self, *given: Tensor) -> list[Tensor]:
        size = len(self.operands) + len(self.captured.tensors)
        operands = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in given[:size]]
        with torch.enable_grad():
            results = [tensor for tensor in self._call(operands) if tensor.is_floating_point()]
        pairs = [(r, t) for r, t in zip(results, given[size:], strict=True) if r.requires_grad]
        sources = [tensor for tensor in operands if tensor.is_floating_point()]
        if not pairs or not sources:
            return [torch.zeros_like(source) for source in sources]
        made = torch.autograd.grad([r for r, _ in pairs], sources, [t for _, t in pairs], allow_unused=True)
        return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, made, strict=True)]

    def _check(self, forward: fx.GraphModule, count: int) -> None:
        """Nothing is drawn at random, nothing that was given is changed."""
        placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
        output = next(reversed(forward.graph.nodes))
        results: Any = output.args[0]
        if list(results[-count:]) != placeholders:
            self.captured.refuse("a function given to it changes a tensor in place that is not its own", "clone it")
        for node in forward.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                self.captured.refuse(
                    f"{node.target} in it draws random numbers, which would not be the same on every rank",
                    "draw them before, and give them to it as an operand",
                )
        output.args = (list(results[:-count]),)
        forward.recompile()


class _Outer(TorchFunctionMode):
    """Tensors of the outer trace give way to those that stand for them inside, by identity.

    ``standins`` has them by the id of the outer one; one that it lacks is noted in ``found`` and gets a stand-in.
    """

    def __init__(self, mode: FakeTensorMode, found: list[Tensor], standins: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self.mode, self.found = mode, found
        self.standins = dict(standins or {id(tensor): _standin(tensor) for tensor in found})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is self.mode:  # else a body in this body
            args, kwargs = pytree.tree_map_only(Tensor, self._inside, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _inside(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.standins and _mode_of(tensor) not in (None, self.mode):
            self.found.append(tensor)
            self.standins[id(tensor)] = _standin(tensor)
        return self.standins.get(id(tensor), tensor)


def _mode_of(tensor: Tensor) -> FakeTensorMode | None:
    """The trace that a tensor belongs to; a constant belongs to none."""
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


class _OnDevice(fx.Interpreter):
    """Runs a traced body on the device of its operands."""

    def __init__(self, graph: fx.GraphModule, device: torch.device) -> None:
        super().__init__(graph)
        self.device = device

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        placed = {**kwargs, "device": self.device} if takes_device(target) else kwargs
        return super().call_function(target, args, placed)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().get_attr(target, args, kwargs).to(self.device)


def _interpret(graph: fx.GraphModule, given: Sequence[Tensor]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = _OnDevice(graph, given[0].device).run(*given)
    return found


@contextlib.contextmanager
def _apart() -> Iterator[FakeTensorMode]:
    """A trace of its own, of which the outer one sees nothing."""
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher():
        yield mode


def _graph(fn: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    traced = make_fx(dispatch_functionalize(fn, FunctionalTensorMode()))(*fakes)
    hold_opaques(traced)
    return traced


def _standin(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def floating(types: Iterable[TensorType]) -> tuple[TensorType, ...]:
    """Those that have gradients."""
    return tuple(type_ for type_ in types if type_.dtype.is_floating_point)
