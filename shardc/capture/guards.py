"""Guards: what an op finds in the values of tensors at capture, and the ops that check it in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.refusals import NoValueError
from shardc.language.errors import CaptureError
from shardc.language.sharding import TensorType
from shardc.ops.linalg import STEADY
from shardc.ops.pointwise import is_pointwise
from shardc.program.inference import types_of
from shardc.program.node import ancestors, is_random, op_name
from shardc.program.opaque import Opaque, flat_call

aten = torch.ops.aten
_MET = TensorType((), torch.bool)  # what a guard returns besides, so that it stays alive


class GuardError(CaptureError):
    """A program ran on values for which it was not captured: ``who`` is the user's line. Nothing has happened yet.

    ``finding`` is what an op finds in the values, in words, ``expected`` what it found when the program was captured.
    """

    def __init__(self, where: str, finding: str, expected: str) -> None:
        self.finding = finding
        problem = f"{finding}, the program was captured where it gave {expected}"
        super().__init__(where, problem, "compile it anew for these inputs, as a parallelized module does")


class Guards:
    """The guards of one trace.

    State: ``met``, a result of each guard, as traced; ``names``, what each says; ``kept``, the opaque calls, which
    graphs only name; ``_graph``, what is traced, ``_real``, the values of its placeholders, and ``_unknown``, nodes of
    it that have no value.
    """

    def __init__(self, kept: list[Opaque]) -> None:
        self.met: list[Tensor] = []
        self.names: list[str] = []
        self.kept = kept
        self._graph = fx.Graph()
        self._real: dict[fx.Node, Tensor] = {}
        self._unknown: set[fx.Node] = set()

    def begin(self, values: Sequence[Tensor | None]) -> None:
        """Tell the values of the inputs of what is traced, in order; None where there is none."""
        self._graph = _graph()
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        pairs = zip(placeholders, values, strict=True)
        self._real = {node: value for node, value in pairs if value is not None and _has_values(value)}

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """What is made in the block has no value before the program runs."""
        last = next(reversed(self._graph.nodes))
        yield
        while (last := last.next).op != "root":
            self._unknown.add(last)

    def guarded(self, func: Any, args: Any, kwargs: Mapping[str, Any], where: str) -> Any:
        """What an op finds that the latest node of the graph stands for, and from now on a guard that it finds that.

        Raises a NoValueError where that cannot be known.
        """
        found = self._found(next(reversed(_graph().nodes)), func)
        given, nest = pytree.tree_flatten((args, dict(kwargs)))
        places = [i for i, leaf in enumerate(given) if isinstance(leaf, Tensor)]
        guard = _Guard(op_name(func), flat_call(STEADY.get(func, func), given, nest, places), says(found), where)
        results = types_of(found)
        types = (results,) if isinstance(results, TensorType) else results or ()
        assert None not in types, (func, types)
        opaque = Opaque(guard.name, guard, (*types, _MET), tags=tuple(func.tags))  # type: ignore[arg-type]
        self.kept.append(opaque)
        *tensors, met = opaque(*(given[i] for i in places))
        self.met.append(met)
        self.names.append(f"{len(self.names)}: {guard.name} gives {says(found)} at {where}")
        return found if not types else tensors[0] if isinstance(results, TensorType) else tuple(tensors)

    def _found(self, asked: fx.Node, func: Any) -> Any:
        """The value of a node, from the real values of what it depends on."""
        in_order = self._known(asked, func)
        values = [self._real[node] for node in in_order if node.op == "placeholder"]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in in_order:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[asked])
        root: Any = _mode().tracer.root
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            return fx.Interpreter(fx.GraphModule(root, graph)).run(*map(_whole, values))

    def _known(self, asked: fx.Node, func: Any) -> list[fx.Node]:
        """A node and what it depends on, in order; a NoValueError where one of them has no value."""
        needed = ancestors(asked)
        if asked.target is not func or asked.graph is not self._graph:
            raise NoValueError("it is part of another op")
        if needed & self._unknown:
            raise NoValueError("it depends on a gradient that comes in later")
        if any(map(is_random, needed)):
            raise NoValueError("it depends on numbers that are drawn at random")
        absent = [node.name for node in needed if node.op == "placeholder" and node not in self._real]
        if absent:
            raise NoValueError("it depends on tensors without values: capture with real ones")
        return [node for node in asked.graph.nodes if node in needed]


class _Guard:
    """An op on flat tensors that must find what it found before; it returns what it finds if that is tensors."""

    def __init__(self, name: str, call: Callable[..., Any], expected: str, where: str) -> None:
        self.name, self.call, self.expected, self.where = name, call, expected, where

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        found = self.call(*operands)
        if says(found) != self.expected:
            raise GuardError(self.where, f"{self.name} gives {says(found)}", self.expected)
        tensors = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
        return [*tensors, torch.ones((), dtype=torch.bool, device=operands[0].device)]


def says(found: Any) -> str:
    """What an op found that a program may depend on: the types of tensors, a number itself."""
    types = types_of(found)
    if types is None:
        return repr(found)
    return str(types) if isinstance(types, TensorType) else ", ".join(map(str, types))


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _whole(tensor: Any) -> Tensor:
    """A tensor that lies cut on many ranks, gathered: all of them capture, and ask for the same ones in one order."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def _mode() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode


def _graph() -> fx.Graph:
    graph: fx.Graph = _mode().tracer.graph
    return graph


def known_number(asked: fx.Node, root: nn.Module) -> Any:
    """What the node would return, or None where it depends on an input or on chance. ``root`` holds the constants.

    A check by ``torch._check_tensor_all`` is taken to hold: it raises an error or does nothing.
    """
    if any(node.target is aten._is_all_true.default for node in asked.all_input_nodes):
        return True
    needed = ancestors(asked)
    if any(node.op == "placeholder" or is_random(node) for node in needed):
        return None
    values: dict[fx.Node, Any] = {}
    for node in asked.graph.nodes:
        if node in needed:
            values[node] = _evaluate(node, root, values)
    return values[asked]


def _evaluate(node: fx.Node, root: nn.Module, values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(root, str(node.target))
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return _on_one_row(node.target, args, kwargs)


def _on_one_row(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op; where the rows of dim 0 are all the same (stride 0, a batch), on one of them.

    So the cost of a capture does not grow with the batch.
    """
    tensors: list[torch.Tensor] = []
    map_aggregate((args, dict(kwargs)), lambda a: tensors.append(a) if isinstance(a, torch.Tensor) else None)
    ndim = max((tensor.ndim for tensor in tensors), default=0)
    tall = {id(tensor) for tensor in tensors if tensor.ndim == ndim and ndim and tensor.shape[0] > 1}
    spread = [tensor for tensor in tensors if id(tensor) in tall and tensor.stride(0) == 0]
    if not spread or len({id(tensor) for tensor in spread}) < len(tall) or not _goes_by_row(target, args, ndim):
        return target(*args, **kwargs)
    first: Any = lambda value: value[:1] if id(value) in tall else value  # noqa: E731
    result = target(*map_aggregate(args, first), **kwargs)
    return result.expand(spread[0].shape[0], *result.shape[1:]) if result.ndim else result


def _goes_by_row(target: Any, args: tuple[Any, ...], ndim: int) -> bool:
    """Whether equal rows in give equal rows out, or one number that does not depend on how many there are."""
    if target in (aten.cat.default, aten.cumsum.default):
        return len(args) > 1 and args[1] % ndim != 0
    return is_pointwise(target) or target in (aten.all.default, aten.any.default)
